"""The layout of a model's keys and values: which layers keep rows of the whole text, and which only the last rows.

It follows from the recorded calls of the attention function (:mod:`.calls`), in order, and from the configuration's
kinds of layers. Call i of a forward finds its rows at ``places[i]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.memory.recurrent import RecurrentShape
from longdraft.memory.store import KVShape
from longdraft.memory.windows import Span, WindowShape
from longdraft.model import calls
from longdraft.model.calls import Call

# Kinds of layers as transformers names them, that attend to rows of the text.
FULL = ("full_attention", "attention", "hybrid")
SLIDING = ("sliding_attention", "hybrid_sliding")
CHUNKED = "chunked_attention"


class Place(NamedTuple):
    """Where one call of the attention function finds its keys and values.

    Attributes:
        window: index of the :class:`WindowShape`; None for rows of the whole text.
        layer: number of the layer within these rows.
        writes: False if the layer reads the rows that an earlier layer has written.
    """

    window: int | None
    layer: int
    writes: bool = True


class Layout(NamedTuple):
    """Places of all calls of a forward.

    Attributes:
        shape: of the rows of the whole text; ``layers`` may be 0.
        windows: of the layers that keep the last rows only.
        recurrent: of the layers that keep a state; they are numbered in the order of their modules.
        own: the layers of the model's own cache if it attends with code of its own (:mod:`.own_code`).
    """

    places: tuple[Place, ...]
    shape: KVShape
    windows: tuple[WindowShape, ...] = ()
    recurrent: Mapping[int, RecurrentShape] = {}
    own: tuple[Call, ...] = ()


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout of a model whose calls are known, or whose configuration says all.

    Raises:
        UnsupportedModelError: it has no attention heads.
    """
    config = decoder_config(model)
    found = calls.recorded.get(model)
    if found is None:
        shape = configured_shape(model)
        return Layout(tuple(Place(None, i) for i in range(shape.layers)), shape)
    recorded = found.calls
    # A model's own code knows how far back its layers see.
    spans = [None if found.own else _span(config, call) for call in recorded]
    kinds = sorted({span for span in spans if span is not None}, key=lambda span: (span.size, span.chunked))
    counts = dict.fromkeys([None, *kinds], 0)
    places: list[Place] = []
    for call, span in zip(recorded, spans, strict=True):
        if call.source is not None:
            places.append(places[call.source]._replace(writes=False))
            continue
        places.append(Place(None if span is None else kinds.index(span), counts[span]))
        counts[span] += 1

    def sizes(span: Span | None) -> tuple[int, int, bool]:
        own = [call for call, other in zip(recorded, spans, strict=True) if other == span]
        heads = {call.kv_heads for call in own} or {1}
        dims = {size for call in own for size in (call.head_dim, call.value_dim)} or {16}
        return max(heads), max(dims), len(heads) + len(dims) > 2

    heads, dim, padded = sizes(None)
    windows = tuple(WindowShape(span, counts[span], *sizes(span)[:2], model.dtype) for span in kinds)
    shape = KVShape(counts[None], heads, dim, model.dtype, padded)
    return Layout(tuple(places), shape, windows, found.recurrent, recorded if found.own else ())


def configured_shape(model: PreTrainedModel) -> KVShape:
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


def has_windows(model: PreTrainedModel) -> bool:
    """True if the configuration names layers that are not full attention: windows, recurrent ones."""
    config = decoder_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind not in FULL for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _span(config: Any, call: Call) -> Span | None:
    """The rows that a call's layer sees; None for the whole text.

    Raises:
        UnsupportedModelError: longdraft does not know this kind of layer.
    """
    kinds = getattr(config, "layer_types", None)
    size = call.window or getattr(config, "sliding_window", None)
    if kinds and call.layer is not None and 0 <= call.layer < len(kinds):
        kind = kinds[call.layer]
        if kind == CHUNKED:
            return _bounded(config, Span(int(config.attention_chunk_size), chunked=True))
        if kind in SLIDING:
            if size is None:
                raise UnsupportedModelError(f"{call.module} has a sliding window of no known size.")
            return _bounded(config, Span(int(size)))
        if kind in FULL:
            return None
        raise UnsupportedModelError(
            f"{call.module} has layers of the kind {kind}, which longdraft cannot host exactly yet."
        )
    return None if size is None else _bounded(config, Span(int(size)))


def _bounded(config: Any, span: Span) -> Span | None:
    """The span, or None if no text is longer."""
    longest = getattr(config, "max_position_embeddings", None)
    return None if isinstance(longest, int) and span.size >= longest else span
