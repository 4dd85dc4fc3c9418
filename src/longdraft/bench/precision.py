"""In what numbers weights are kept, in words."""

from __future__ import annotations

from collections import Counter

from torch import nn

from longdraft.native.stored import Stored


def of_model(model: nn.Module) -> str:
    """Precisions of a model's weights, the most common first: ``float32``, ``Q4_1 and Q8_0``."""
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        stored = getattr(module, "matrix", None)
        own = [(p.data_ptr(), str(p.dtype).removeprefix("torch."), p.numel()) for p in module.parameters(recurse=False)]
        if isinstance(stored, Stored):
            own.append((stored.data.data_ptr(), stored.format, stored.shape[0] * stored.shape[1]))
        for place, name, numbers in own:
            if place not in seen:
                seen.add(place)
                counts[name] += numbers
    all_of_them = counts.total()
    # Norms and biases stay in float32 whatever the matrices are.
    return " and ".join(name for name, numbers in counts.most_common() if numbers > all_of_them / 100)


def of_file_type(number: object) -> str:
    """Precision of a GGUF file's weights by its ``general.file_type``, in GGUF's words: ``Q4_1``."""
    try:
        from gguf import LlamaFileType

        return str(LlamaFileType(int(str(number))).name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    except (ImportError, ValueError):
        return f"GGUF file type {number or 'unknown'}"
