"""Describes a decoder's layers in words: full attention, windows, chunks, recurrent states, experts.

The configuration is read, and no weights: it serves models that longdraft cannot host as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from longdraft.model import calls
from longdraft.model.layout import decoder_config

# What transformers calls a layer -> what it does with the text before a token.
_WORDS = {
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunk",),
    "linear_attention": ("recurrent",),
    "conv": ("recurrent",),
    "hybrid": ("full", "recurrent"),
    "hybrid_sliding": ("window", "recurrent"),
    "mlp": (),
    "moe": (),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Kinds in the order in which they are told.
_ORDER = ("full", "window", "chunk", "recurrent", "sparse")


def layer_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """Names the kinds of a model's layers, as "full", "window", "recurrent" or "experts".

    The others are "chunk", "sparse", "latent" and "shared KV".
    A hosted model may also have "own code" (:mod:`.own_code`).
    """
    config = decoder_config(model)
    counts = _counts(model)
    more = {
        "latent": bool(getattr(config, "kv_lora_rank", None)),
        "experts": any(_number(config, name) > 1 for name in _EXPERTS),
        "shared KV": _number(config, "num_kv_shared_layers") > 0,
        "own code": (found := calls.recorded.get(model)) is not None and found.own,
    }
    return (*(kind for kind in _ORDER if counts[kind]), *(kind for kind, has in more.items() if has))


def sparse_kinds(model: PreTrainedModel) -> list[str]:
    """The names of the kinds of layers that see a part of the text by a choice of their own."""
    return sorted({*(getattr(decoder_config(model), "layer_types", None) or ())} - _WORDS.keys())


def described(model: PreTrainedModel) -> str:
    """The layers in a sentence's part: "26 layers: 4 full, 22 window; experts"."""
    counts = _counts(model)
    parts = [f"{counts[kind]} {kind}" for kind in _ORDER if counts[kind]]
    rest = [kind for kind in layer_kinds(model) if kind not in _ORDER]
    return "; ".join([f"{decoder_config(model).num_hidden_layers} layers: {', '.join(parts)}", *rest])


def _counts(model: PreTrainedModel) -> Counter[str]:
    """Counts the layers of each kind; a layer may be of two."""
    config = decoder_config(model)
    depth = int(getattr(config, "num_hidden_layers", None) or 1)
    names = getattr(config, "layer_types", None)
    if not names:
        # Configurations such as Mistral's have no layer_types, and a window for every layer.
        windowed = getattr(config, "sliding_window", None) is not None
        recurrent = getattr(model, "_is_stateful", False)
        names = ["linear_attention" if recurrent else "sliding_attention" if windowed else "full_attention"] * depth
    return Counter(kind for name in names for kind in _WORDS.get(name, ("sparse",)))


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
