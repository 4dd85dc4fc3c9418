"""Finds the layout of a model's KV: which layers cache the full context, and which cache a window or chunk.

A layout follows from the attention calls of a traced forward and from the configuration's layer types. A configuration
alone does not say which layers share keys, attend twice, run several times or are skipped. ``KVLayout.locations[i]`` is
where the KV of attention call i lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.memory.recurrent import RecurrentShape
from longdraft.memory.store import KVShape
from longdraft.memory.windows import AttentionSpan, WindowShape
from longdraft.model.model_parts import decoder_config

# transformers' layer type -> our kinds, by how a layer reads the context. A hybrid layer has two; an MLP has none.
_LAYER_TYPES = {
    "full_attention": ("full",), "attention": ("full",),
    "sliding_attention": ("window",), "chunked_attention": ("chunk",),
    "linear_attention": ("recurrent",), "conv": ("recurrent",),
    "hybrid": ("full", "recurrent"), "hybrid_sliding": ("window", "recurrent"),
    "mlp": (), "moe": (),
}  # fmt: skip
# Names of the setting for the number of experts, in different models.
_NUM_EXPERTS_SETTINGS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# All kinds, in the order in which reports list them. "sparse" stands for a layer type that is not in _LAYER_TYPES.
_KINDS = ("full", "window", "chunk", "recurrent", "sparse")


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Attributes:
        class_name: class name of the attention module.
        kv_heads: number of KV heads.
        head_dim: size of a key.
        value_dim: size of a value.
        layer_idx: the module's ``layer_idx``; None if it has none.
        window_size: the call's argument ``sliding_window``, in tokens; None if there is none.
        kv_source: index of the earlier call whose keys and values this call reads; None if it brings its own."""

    class_name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    layer_idx: int | None = None
    window_size: int | None = None
    kv_source: int | None = None


class AttentionTrace:
    """An attention function that records the calls of one forward.

    Attributes:
        calls: the attention calls, in order.
        mixers: index of a recurrent layer -> (its mixer, the mixer's cache adapter); see :mod:`.linear_attention`."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.mixers: dict[int, Any] = {}
        self._keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Records a call. Returns zeros in the shape of attention's output, (B, T, heads, value size)."""
        layer_idx, window_size = getattr(module, "layer_idx", None), kwargs.get("sliding_window")
        call = AttentionCall(
            type(module).__name__,
            key.shape[1],
            key.shape[-1],
            value.shape[-1],
            layer_idx if isinstance(layer_idx, int) else None,
            window_size if isinstance(window_size, int) else None,
            next((i for i, (k, v) in enumerate(self._keys_values) if k is key and v is value), None),
        )
        self.calls.append(call)
        self._keys_values.append((key, value))
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


class KVLocation(NamedTuple):
    """Where the keys and values of one attention call lie.

    Attributes:
        window_index: index of the window cache in :attr:`KVLayout.windows`; None for the full-context store.
        layer: index of the layer within this window cache or store.
        writes_kv: False if the layer reads an earlier layer's KV."""

    window_index: int | None
    layer: int
    writes_kv: bool = True


class KVLayout(NamedTuple):
    """Where a forward's attention calls find their KV.

    Attributes:
        locations: the KV location of each attention call, in order.
        shape: shape of the full-context store. Its number of layers may be 0.
        windows: shapes of the window caches.
        recurrent: index of a recurrent layer, in module order -> shape of its state."""

    locations: tuple[KVLocation, ...]
    shape: KVShape
    windows: tuple[WindowShape, ...] = ()
    recurrent: Mapping[int, RecurrentShape] = {}


def config_layout(model: PreTrainedModel) -> KVLayout:
    """Returns the layout of a model whose layers all have full attention, from its configuration.
    Raises UnsupportedModelError if the model has no attention heads."""
    shape = config_kv_shape(model)
    return KVLayout(tuple(KVLocation(None, i) for i in range(shape.layers)), shape)


def build_layout(
    model: PreTrainedModel,
    calls: tuple[AttentionCall, ...],
    recurrent: Mapping[int, RecurrentShape],
) -> KVLayout:
    """Builds the layout that follows from a forward's attention calls.

    Args:
        model: the traced model.
        calls: the attention calls, in order.
        recurrent: index of a recurrent layer, in module order -> shape of its state."""
    config = decoder_config(model)
    spans = [_span(config, call) for call in calls]
    window_spans = sorted({span for span in spans if span is not None}, key=lambda span: (span.size, span.is_chunked))
    layer_counts = dict.fromkeys([None, *window_spans], 0)
    locations: list[KVLocation] = []
    for call, span in zip(calls, spans, strict=True):
        if call.kv_source is not None:
            locations.append(locations[call.kv_source]._replace(writes_kv=False))
            continue
        locations.append(KVLocation(None if span is None else window_spans.index(span), layer_counts[span]))
        layer_counts[span] += 1

    def largest_sizes(span: AttentionSpan | None) -> tuple[int, int, bool]:
        """Returns the most KV heads and the largest head size of layers with this span, and True if sizes differ."""
        same_span = [call for call, call_span in zip(calls, spans, strict=True) if call_span == span]
        heads = {call.kv_heads for call in same_span} or {1}  # without layers, any number of heads and any size will do
        dims = {dim for call in same_span for dim in (call.head_dim, call.value_dim)} or {16}
        return max(heads), max(dims), len(heads) > 1 or len(dims) > 1

    heads, dim, padded = largest_sizes(None)
    windows = tuple(WindowShape(s, layer_counts[s], *largest_sizes(s)[:2], model.dtype) for s in window_spans)
    shape = KVShape(layer_counts[None], heads, dim, model.dtype, padded)
    return KVLayout(tuple(locations), shape, windows, recurrent)


def config_kv_shape(model: PreTrainedModel) -> KVShape:
    """Returns the KV shape as if all layers had full attention. Draft files contain the shape of their target.
    Raises UnsupportedModelError if the model has no attention heads."""
    config = decoder_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no attention heads, so longdraft cannot host it.")
    kv_heads = _config_value(config, "num_key_value_heads") or heads
    head_dim = _config_value(config, "head_dim") or config.hidden_size // heads
    return KVShape(config.num_hidden_layers, kv_heads, head_dim, model.dtype)


def _config_value(config: Any, name: str) -> Any:
    """Returns a setting, or None. If layers have different values, returns the value for the whole model."""
    if getattr(config, "is_heterogeneous", False):  # getattr raises for settings that differ between layers
        return config.to_dict().get(name)
    return getattr(config, name, None)


def has_non_full_attention(model: PreTrainedModel) -> bool:
    """True if the configuration has layers without full attention: window, chunk or recurrent layers."""
    config = decoder_config(model)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return any("full" not in _LAYER_TYPES.get(name, ()) for name in layer_types)
    return getattr(config, "sliding_window", None) is not None


def _span(config: Any, call: AttentionCall) -> AttentionSpan | None:
    """Returns the window or chunk that a layer attends to; None for the full context.
    Raises UnsupportedModelError if the layer type or the window's size is unknown."""
    layer_types = getattr(config, "layer_types", None)
    window_size = call.window_size or getattr(config, "sliding_window", None)
    if layer_types and call.layer_idx is not None and 0 <= call.layer_idx < len(layer_types):
        layer_type = layer_types[call.layer_idx]
        kinds = _LAYER_TYPES.get(layer_type, ())
        if "chunk" in kinds:
            return _span_if_shorter(config, AttentionSpan(int(config.attention_chunk_size), is_chunked=True))
        if "window" in kinds:
            if window_size is None:
                name = call.class_name
                raise UnsupportedModelError(f"{name} has a sliding window of unknown size: set sliding_window.")
            return _span_if_shorter(config, AttentionSpan(int(window_size)))
        if "full" in kinds:
            return None
        raise UnsupportedModelError(
            f"{call.class_name} has layers of the kind {layer_type}, which longdraft cannot host exactly yet."
        )
    return None if window_size is None else _span_if_shorter(config, AttentionSpan(int(window_size)))


def _span_if_shorter(config: Any, span: AttentionSpan) -> AttentionSpan | None:
    """Returns the span if it is shorter than the model's context; otherwise None, for full attention."""
    context_length = getattr(config, "max_position_embeddings", None)
    return None if isinstance(context_length, int) and span.size >= context_length else span


def layer_type_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the kinds of layers that a model has ("full", "window", "chunk", "recurrent", "sparse") and its features.
    Features are "latent" (attention), "experts" and "shared KV"."""
    config = decoder_config(model)
    counts = _layer_counts(model)
    features = {
        "latent": bool(getattr(config, "kv_lora_rank", None)),
        "experts": any(_int_setting(config, name) > 1 for name in _NUM_EXPERTS_SETTINGS),
        "shared KV": _int_setting(config, "num_kv_shared_layers") > 0,
    }
    return (*(kind for kind in _KINDS if counts[kind]), *(name for name, is_present in features.items() if is_present))


def sparse_layer_types(model: PreTrainedModel) -> list[str]:
    """Returns the layer types that are unknown to us. So far, these all choose the KV that a token attends to."""
    return sorted({*(getattr(decoder_config(model), "layer_types", None) or ())} - _LAYER_TYPES.keys())


def describe_layers(model: PreTrainedModel) -> str:
    """Describes the layers in words, such as "26 layers: 4 full, 22 window; experts"."""
    counts = _layer_counts(model)
    parts = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
    features = [name for name in layer_type_names(model) if name not in _KINDS]
    return "; ".join([f"{decoder_config(model).num_hidden_layers} layers: {', '.join(parts)}", *features])


def _layer_counts(model: PreTrainedModel) -> Counter[str]:
    """Counts the layers of each kind. A hybrid layer counts in both of its kinds."""
    config = decoder_config(model)
    num_layers = int(getattr(config, "num_hidden_layers", None) or 1)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        # Configurations such as Mistral's have one window for all layers and no layer_types.
        has_window = getattr(config, "sliding_window", None) is not None
        is_recurrent = getattr(model, "_is_stateful", False)
        attention_type = "sliding_attention" if has_window else "full_attention"
        layer_types = ["linear_attention" if is_recurrent else attention_type] * num_layers
    return Counter(kind for name in layer_types for kind in _LAYER_TYPES.get(name, ("sparse",)))


def _int_setting(config: Any, name: str) -> int:
    """Returns a setting that is a number; 0 if there is none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
