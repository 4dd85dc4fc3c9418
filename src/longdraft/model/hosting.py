"""Hosting: runs a transformers model, without a fork of its code, with our attention and our KV store.

transformers lets a model's attention be any registered function. Ours calls the state of the forward (:class:`ForwardContext`),
which is one keyword argument that transformers hands through. It receives the block's queries, keys (after RoPE) and
values of one layer, writes the keys and values into the store, and attends to the store's rows. The model's own cache
is never used. All this is done to a copy of the model (``model/execution_model.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.reference import AttentionFunction
from longdraft.errors import UnsupportedModelError
from longdraft.memory.recurrent import RecurrentStates
from longdraft.memory.store import KVStore, LayerStates
from longdraft.memory.windows import WindowKVCache
from longdraft.model.layout import AttentionTrace, KVLayout, KVLocation, layout_of
from longdraft.model.layout import decoder_config as decoder_config

ATTENTION_NAME = "longdraft"
# The context of models without a limit, in tokens.
UNLIMITED_CONTEXT = 1 << 20


@dataclass
class ForwardContext:
    """The state of one forward: its inputs to every layer and its attention, and its results.

    Attributes:
        layout: where each call of the attention function finds its rows.
        query_layers, hidden_layers: layers whose queries and output hidden states go to ``queries`` and ``hidden``.
        fused: layers that our kernels can compute in one piece are computed so.
        num_attention_calls: number of layers that went through our attention.
    """

    store: KVStore
    batch: ForwardBatch
    attend: AttentionFunction
    layout: KVLayout
    query_layers: frozenset[int] = frozenset()
    hidden_layers: frozenset[int] = frozenset()
    fused: bool = False
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    num_attention_calls: int = 0

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query (B, Hq, T, d), key and value (B, Hkv, T, d) -> (B, T, Hq, d), as transformers expects."""
        name = type(module).__name__
        if position_bias is not None:
            raise UnsupportedModelError(f"{name} uses position_bias, which longdraft does not host exactly.")
        if attention_mask is not None:
            raise UnsupportedModelError(
                f"{name} does not attend to the whole text before each token (it brings its own mask), so longdraft "
                "cannot host it exactly."
            )
        if self.num_attention_calls >= len(self.layout.locations):
            raise UnsupportedModelError(f"{name} attends more often than in another forward.")
        # Calls are counted: modules of several depths may be one, and a layer may attend twice.
        place = self.layout.locations[self.num_attention_calls]
        self.num_attention_calls += 1
        with torch._C.DisableTorchFunction():  # what is called inside is exact by row as it is
            block, (keys, values) = self._stored(place, key, value)
            if place.window is None and place.writes_kv and place.layer in self.query_layers:
                self.queries[place.layer] = query
            heads, size = key.shape[1], max(key.shape[3], value.shape[3])
            if keys.shape[1::2] != (heads, key.shape[3]) or values.shape[3] != size:
                # Narrow values are read with the zeros behind them, as wide as keys.
                keys, values = keys[:, :heads, :, : key.shape[3]], values[:, :heads, :, :size]
            sinks = s_aux if sinks is None else sinks
            plain = softcap is None and sinks is None
            scoring = NO_MODIFIERS if plain else ScoreModifiers(softcap, None if sinks is None else sinks.detach())
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out = self.attend(query, keys, values, block.last_tokens(query.shape[2]), scale, scoring)
            return out[..., : value.shape[3]].transpose(1, 2).contiguous(), None

    def _stored(
        self, place: KVLocation, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[ForwardBatch, tuple[torch.Tensor, torch.Tensor]]:
        """Writes a layer's keys and values. Returns all of its rows, and the block as it lies on them."""
        if place.window is None:
            if place.writes_kv:
                self.store.write(place.layer, key, value, self.batch)
            return self.batch, self.store.layer(place.layer)
        windows = [states for states in self.store.states if isinstance(states, WindowKVCache)][place.window]
        placed = windows.batch_in_buffer(self.batch)
        if place.writes_kv:
            windows.write(place.layer, key, value, placed)
        return placed, windows.layer(place.layer)


# A model may drop keyword arguments on the way to its attention, so the forward is found here too.
_running: ContextVar[ForwardContext | AttentionTrace | None] = ContextVar("longdraft_running", default=None)


def current_forward() -> ForwardContext | None:
    """The forward that this thread is computing; None outside of :func:`run`."""
    found = _running.get()
    return found if isinstance(found, ForwardContext) else None


def in_decode() -> bool:
    """True while this thread computes rows whose bits must not depend on the rows beside them: see ``Block.prompt``."""
    hosted = current_forward()
    return hosted is not None and not hosted.batch.is_prefill


def in_prefill() -> bool:
    """True while this thread computes rows of a prompt."""
    hosted = current_forward()
    return hosted is not None and hosted.batch.is_prefill


def current_trace() -> AttentionTrace | None:
    """The forward that this thread is recording; None where it records none."""
    found = _running.get()
    return found if isinstance(found, AttentionTrace) else None


@contextmanager
def forward_scope(forward: ForwardContext | AttentionTrace) -> Iterator[None]:
    """Inside, :func:`current_forward` or :func:`current_trace` is this forward."""
    before = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(before)


def run(module: nn.Module, hosted: ForwardContext, **more: Any) -> Any:
    """Runs a hosted model, or its decoder, on a block.

    Args:
        hosted: the state of the forward; hidden states and queries are left in it.
        more: further arguments of the model.
    """
    block = hosted.batch
    with forward_scope(hosted):
        return module(
            input_ids=block.token_ids, position_ids=block.positions, use_cache=False, longdraft_attend=hosted, **more
        )


def _attention(
    module: nn.Module, *given: Any, longdraft_attend: Callable[..., Any] | None = None, **named: Any
) -> tuple[torch.Tensor, None]:
    """The attention of every model that we run: that which the caller hands through, or the forward's."""
    attend = longdraft_attend or _running.get()
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} was called outside of longdraft's forward.")
    out: tuple[torch.Tensor, None] = attend(module, *given, **named)
    return out


AttentionInterface.register(ATTENTION_NAME, _attention)


def set_attention(model: PreTrainedModel, implementation: str = ATTENTION_NAME) -> None:
    """Routes a model's attention through longdraft, or another one. The model must be a copy of our own."""
    own = decoder_config(model)
    # A layer from another model, or a copied one, brings its configuration along.
    configs = (getattr(module, "config", None) for module in model.modules())
    for config in (own, *(each for each in configs if type(each) is type(own))):
        config._attn_implementation = implementation


def new_layer_states(
    model: PreTrainedModel, slots: int, capacity: int, transposed: bool = False, dtype: torch.dtype | None = None
) -> list[LayerStates]:
    """Makes the states of layers that do not keep rows of the whole text, for a store of this size.

    Args:
        transposed, dtype: of the rows of windows.
    """
    layout = layout_of(model)
    shapes = layout.windows
    if dtype is not None:
        shapes = tuple(replace(shape, dtype=dtype) for shape in shapes)
    states: list[LayerStates] = [WindowKVCache(shape, slots, capacity, model.device, transposed) for shape in shapes]
    return [*states, RecurrentStates(layout.recurrent, slots, model.device)] if layout.recurrent else states


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model that computes hidden states: the decoder that holds the token embedding."""
    embedding = model.get_input_embeddings()
    parts: list[nn.Module] = [model.get_decoder(), model.base_model]
    return next((part for part in parts if any(m is embedding for m in part.modules())), parts[0])


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers: the module list that is as long as the model is deep.

    Layers that a forward runs several times are in it once: it is then the longest list of modules of one class.
    """
    count = getattr(decoder_config(model), "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    for each in lists:
        if len(each) == count:
            return each
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers.")
    return max(lists, key=lambda each: len(each) if len({type(m) for m in each}) == 1 else 0)


def context_length(model: PreTrainedModel) -> int:
    """The longest sequence in tokens that the model takes, YaRN's factor included."""
    config = decoder_config(model)
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions", "max_seq_len"))
    return next((int(length) for length in found if length), UNLIMITED_CONTEXT)


def add_hidden_hook(model: PreTrainedModel, layer: int) -> RemovableHandle:
    """Adds a hook to a decoder layer that keeps its output (B, T, hidden) in forwards that ask for it."""

    def hook(_module: nn.Module, _inputs: Any, named: dict[str, Any], output: Any) -> None:
        hosted = named.get("longdraft_attend") or current_forward()
        if hosted is not None and layer in hosted.hidden_layers:
            hosted.hidden[layer] = output[0] if isinstance(output, tuple) else output

    return decoder_layers(model)[layer].register_forward_hook(hook, with_kwargs=True)
