"""Reads TokenSwift's published heads: tensors ``model.medusa_layers.N.*`` in the folder of the target.

    h_i = h_{i-1} + linear(RMSNorm(h_{i-1}; input_layernorm));   logits_i = target_head(RMSNorm(h_i; post_layernorm))

transformers drops these tensors when it loads the model (TokenSwift, Wu et al. 2025, arXiv:2502.18890).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from longdraft.drafts import draft_folder, tensor_files
from longdraft.drafts.draft_folder import DraftFolder

_HEAD = re.compile(r"^(?:model\.)?medusa_layers\.(\d+)\.(linear|input_layernorm|post_layernorm)\.weight$")


def has_heads(folder: Path | str) -> bool:
    """True if a target's folder contains TokenSwift heads."""
    return bool(tensor_files.select_names(folder, _select_heads))


def read(folder: Path | str) -> DraftFolder | None:
    """Reads the heads in a target's folder as the contents of a draft folder; None if there are no heads.
    Raises CheckpointError if the folder cannot be read."""
    names = tensor_files.select_names(folder, _select_heads)
    if not names:
        return None
    tensors = tensor_files.read(folder, list(names))
    config = draft_folder.read_config(folder)
    heads = {name.split(".")[1] for name in names.values()}
    hidden_size = next(iter(tensors.values())).shape[-1]
    draft_config = {
        "hidden_size": hidden_size,
        "heads": len(heads),
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "own_norms": True,
        "draft_vocab_size": None,
    }
    vocabulary = config.get("vocab_size")
    target = {"hidden_size": hidden_size} | ({"vocab_size": vocabulary} if vocabulary else {})
    return DraftFolder("tokenswift", draft_config, {names[name]: tensor for name, tensor in tensors.items()}, target)


def _select_heads(names: Iterable[str]) -> dict[str, str]:
    """Maps the heads' tensors from their names in the folder to their names in our module."""
    renamed: dict[str, str] = {}
    for name in names:
        if (match := _HEAD.match(name)) is not None:
            number, part = match.groups()
            modules = {"linear": f"heads.{number}.proj", "input_layernorm": f"heads.{number}.norm"}
            renamed[name] = f"{modules.get(part, f'norms.{number}')}.weight"
    return renamed
