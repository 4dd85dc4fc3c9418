"""The layout of a model's keys and values: which layers keep rows of the whole text, and which only the last rows.

It follows from the recorded calls of the attention function, in order, and from the configuration's kinds of layers: a
configuration does not say that layers share keys, attend twice, run several times or are skipped. Call i of a forward
finds its rows at ``places[i]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.memory.recurrent import RecurrentShape
from longdraft.memory.store import KVShape
from longdraft.memory.windows import AttentionSpan, WindowShape

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


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Attributes:
        module: name of the class of the attention module.
        kv_heads: number of heads of keys and values.
        head_dim, value_dim: sizes of a key and of a value.
        layer: the module's number of its layer; None if it has none.
        window: the ``sliding_window`` argument.
        source: index of the earlier call whose keys and values it takes; None if it has some of its own.
    """

    module: str
    kv_heads: int
    head_dim: int
    value_dim: int
    layer: int | None = None
    window: int | None = None
    kv_source: int | None = None


class AttentionTrace:
    """Records a forward; it stands in the place of attention.

    Attributes:
        calls: of the attention function, in order.
        mixers: recurrent layers by their number, with what they were called with (:mod:`.recurrent`).
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.mixers: dict[int, Any] = {}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        """Notes a call. The result has the right shape, and no meaning."""
        number, window = getattr(module, "layer_idx", None), more.get("sliding_window")
        call = AttentionCall(
            type(module).__name__,
            key.shape[1],
            key.shape[-1],
            value.shape[-1],
            number if isinstance(number, int) else None,
            window if isinstance(window, int) else None,
            next((i for i, (k, v) in enumerate(self._kept) if k is key and v is value), None),
        )
        self.calls.append(call)
        self._kept.append((key, value))
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


class KVLocation(NamedTuple):
    """Where one call of the attention function finds its keys and values.

    Attributes:
        window: index of the :class:`WindowShape`; None for rows of the whole text.
        layer: number of the layer within these rows.
        writes: False if the layer reads the rows that an earlier layer has written.
    """

    window: int | None
    layer: int
    writes_kv: bool = True


class KVLayout(NamedTuple):
    """Places of all calls of a forward.

    Attributes:
        shape: of the rows of the whole text; ``layers`` may be 0.
        windows: of the layers that keep the last rows only.
        recurrent: of the layers that keep a state; they are numbered in the order of their modules.
        own: the layers of the model's own cache if it attends with code of its own (:mod:`.own_code`).
    """

    locations: tuple[KVLocation, ...]
    shape: KVShape
    windows: tuple[WindowShape, ...] = ()
    recurrent: Mapping[int, RecurrentShape] = {}
    custom_cache_layers: tuple[AttentionCall, ...] = ()


traced_layouts: WeakKeyDictionary[PreTrainedModel, KVLayout] = WeakKeyDictionary()
"""The layouts of models whose forward was recorded."""


def layout_of(model: PreTrainedModel) -> KVLayout:
    """The layout of a model: a recorded one, or that of a model whose configuration says all.

    Raises:
        UnsupportedModelError: it has no attention heads.
    """
    if (found := traced_layouts.get(model)) is not None:
        return found
    shape = config_kv_shape(model)
    return KVLayout(tuple(KVLocation(None, i) for i in range(shape.layers)), shape)


def build_layout(
    model: PreTrainedModel,
    calls: tuple[AttentionCall, ...],
    recurrent: Mapping[int, RecurrentShape],
    custom_attention: bool,
) -> KVLayout:
    """The layout that follows from the calls of a forward.

    Args:
        own: the model attends with code of its own, and the calls are the layers of its cache.
    """
    config = decoder_config(model)
    # A model's own code knows how far back its layers see.
    spans = [None if custom_attention else _span(config, call) for call in calls]
    kinds = sorted({span for span in spans if span is not None}, key=lambda span: (span.size, span.is_chunked))
    counts = dict.fromkeys([None, *kinds], 0)
    places: list[KVLocation] = []
    for call, span in zip(calls, spans, strict=True):
        if call.kv_source is not None:
            places.append(places[call.kv_source]._replace(writes_kv=False))
            continue
        places.append(KVLocation(None if span is None else kinds.index(span), counts[span]))
        counts[span] += 1

    def sizes(span: AttentionSpan | None) -> tuple[int, int, bool]:
        alike = [call for call, other in zip(calls, spans, strict=True) if other == span]
        heads = {call.kv_heads for call in alike} or {1}
        dims = {size for call in alike for size in (call.head_dim, call.value_dim)} or {16}
        return max(heads), max(dims), len(heads) + len(dims) > 2

    heads, dim, padded = sizes(None)
    windows = tuple(WindowShape(span, counts[span], *sizes(span)[:2], model.dtype) for span in kinds)
    shape = KVShape(counts[None], heads, dim, model.dtype, padded)
    return KVLayout(tuple(places), shape, windows, recurrent, calls if custom_attention else ())


def config_kv_shape(model: PreTrainedModel) -> KVShape:
    """The shape that the configuration gives, as if every layer had full attention: it names a model in its drafts.

    Raises:
        UnsupportedModelError: it has no attention heads.
    """
    config = decoder_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no attention heads, so longdraft cannot host it.")
    kv_heads = _said(config, "num_key_value_heads") or heads
    head_dim = _said(config, "head_dim") or config.hidden_size // heads
    return KVShape(config.num_hidden_layers, kv_heads, head_dim, model.dtype)


def _said(config: Any, name: str) -> Any:
    """A configuration's value; of one with several sizes of layers, that of most; None if it says none."""
    if getattr(config, "is_heterogeneous", False):  # transformers refuses to name one of several
        return config.to_dict().get(name)
    return getattr(config, name, None)


def decoder_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def has_non_full_attention(model: PreTrainedModel) -> bool:
    """True if the configuration names layers that are not full attention: windows, recurrent ones."""
    config = decoder_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any("full" not in _WORDS.get(kind, ()) for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _span(config: Any, call: AttentionCall) -> AttentionSpan | None:
    """The rows that a call's layer sees; None for the whole text.

    Raises:
        UnsupportedModelError: longdraft does not know this kind of layer.
    """
    kinds = getattr(config, "layer_types", None)
    size = call.window or getattr(config, "sliding_window", None)
    if kinds and call.layer is not None and 0 <= call.layer < len(kinds):
        kind = kinds[call.layer]
        words = _WORDS.get(kind, ())
        if "chunk" in words:
            return _bounded(config, AttentionSpan(int(config.attention_chunk_size), is_chunked=True))
        if "window" in words:
            if size is None:
                raise UnsupportedModelError(f"{call.module} has a sliding window of no known size.")
            return _bounded(config, AttentionSpan(int(size)))
        if "full" in words:
            return None
        raise UnsupportedModelError(
            f"{call.module} has layers of the kind {kind}, which longdraft cannot host exactly yet."
        )
    return None if size is None else _bounded(config, AttentionSpan(int(size)))


def _bounded(config: Any, span: AttentionSpan) -> AttentionSpan | None:
    """The span, or None if no text is longer."""
    longest = getattr(config, "max_position_embeddings", None)
    return None if isinstance(longest, int) and span.size >= longest else span


def layer_type_names(model: PreTrainedModel) -> tuple[str, ...]:
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
        "own code": model in traced_layouts and bool(traced_layouts[model].custom_cache_layers),
    }
    return (*(kind for kind in _ORDER if counts[kind]), *(kind for kind, has in more.items() if has))


def sparse_layer_types(model: PreTrainedModel) -> list[str]:
    """The names of the kinds of layers that see a part of the text by a choice of their own."""
    return sorted({*(getattr(decoder_config(model), "layer_types", None) or ())} - _WORDS.keys())


def describe_layers(model: PreTrainedModel) -> str:
    """The layers in a sentence's part: "26 layers: 4 full, 22 window; experts"."""
    counts = _counts(model)
    parts = [f"{counts[kind]} {kind}" for kind in _ORDER if counts[kind]]
    rest = [kind for kind in layer_type_names(model) if kind not in _ORDER]
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
