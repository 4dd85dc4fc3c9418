"""Hosting: runs transformers' own code of a model with longdraft's attention and KV store.

transformers lets a registered function (AttentionInterface) replace a model's attention. Our function calls the
:class:`ForwardContext`, a keyword argument of the model's forward. The context receives a layer's queries, keys (after
RoPE) and values, writes keys and values to the KV store, and attends to the store. transformers' cache is unused. The
model that runs is longdraft's copy of the user's model (:mod:`longdraft.model.execution_model`).
Shapes: B sequences of T tokens, Hq query heads, Hkv KV heads, head size d.
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
from longdraft.model.layout import AttentionTrace, KVLayout, KVLocation
from longdraft.model.model_parts import decoder_config, decoder_layers

ATTENTION_NAME = "longdraft"


@dataclass
class ForwardContext:
    """One forward: what it computes with, and the queries and hidden states that it collects.

    Attributes:
        store: the KV store that the forward reads and writes.
        batch: the tokens to compute.
        attend: computes attention of queries to the store's KV.
        layout: where the KV of each attention call lies.
        query_layers: layers of the store whose queries are collected.
        hidden_layers: decoder layers whose outputs are collected.
        fused: True runs fused layers on a GPU.
        queries: layer of the store -> queries (B, Hq, T, d), after RoPE.
        hidden: decoder layer -> output hidden states (B, T, hidden size).
        num_attention_calls: number of calls of the attention function so far."""

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
        """Attends: query (B, Hq, T, d), key and value (B, Hkv, T, d) -> (B, T, Hq, d). ``s_aux`` are sinks too."""
        name = type(module).__name__
        if position_bias is not None:
            raise UnsupportedModelError(f"{name} uses position_bias, which longdraft does not support.")
        if attention_mask is not None:
            raise UnsupportedModelError(
                f"{name} does not attend to the whole text before each token (it brings its own mask), so longdraft "
                "cannot host it exactly: decode it with its own generate."
            )
        if self.num_attention_calls >= len(self.layout.locations):
            raise UnsupportedModelError(f"{name} calls attention more often than in the forward that was traced.")
        # The call's number, not the module, tells where its KV is: layers may share a module, or attend twice.
        location = self.layout.locations[self.num_attention_calls]
        self.num_attention_calls += 1
        with torch._C.DisableTorchFunction():  # no batch-invariant replacements of operators: attention needs none
            batch, (keys, values) = self._write(location, key, value)
            if location.window_index is None and location.writes_kv and location.layer in self.query_layers:
                self.queries[location.layer] = query
            num_kv_heads, value_dim = key.shape[1], max(key.shape[3], value.shape[3])
            if keys.shape[1::2] != (num_kv_heads, key.shape[3]) or values.shape[3] != value_dim:
                # The store has the largest layer's sizes. Values narrower than keys are zero-padded to the keys' size.
                keys, values = keys[:, :num_kv_heads, :, : key.shape[3]], values[:, :num_kv_heads, :, :value_dim]
            sinks = s_aux if sinks is None else sinks
            is_plain = softcap is None and sinks is None
            modifiers = NO_MODIFIERS if is_plain else ScoreModifiers(softcap, None if sinks is None else sinks.detach())
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            last_tokens = batch.last_tokens(query.shape[2])  # a layer may compute the last tokens only
            out = self.attend(query, keys, values, last_tokens, scale, modifiers)
            return out[..., : value.shape[3]].transpose(1, 2).contiguous(), None

    def _write(
        self, location: KVLocation, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[ForwardBatch, tuple[torch.Tensor, torch.Tensor]]:
        """Writes a layer's new KV. Returns the batch, with indices into the layer's cache, and the cache's KV."""
        if location.window_index is None:
            if location.writes_kv:
                self.store.write(location.layer, key, value, self.batch)
            return self.batch, self.store.layer(location.layer)
        cache = window_cache(self.store, location.window_index)
        buffer_batch = cache.batch_in_buffer(self.batch)
        if location.writes_kv:
            cache.write(location.layer, key, value, buffer_batch)
        return buffer_batch, cache.layer(location.layer)


# The forward that a thread computes, for models that do not pass keyword arguments on to their attention.
_thread_forward: ContextVar[ForwardContext | AttentionTrace | None] = ContextVar("longdraft_running", default=None)


def current_forward() -> ForwardContext | None:
    """Returns the forward that this thread is computing; None outside of :func:`forward_scope`."""
    forward = _thread_forward.get()
    return forward if isinstance(forward, ForwardContext) else None


def in_decode() -> bool:
    """True while this thread computes a batch that is not a prefill. Results must then be batch invariant."""
    ctx = current_forward()
    return ctx is not None and not ctx.batch.is_prefill


def in_prefill() -> bool:
    """True while this thread computes tokens of a prompt."""
    ctx = current_forward()
    return ctx is not None and ctx.batch.is_prefill


def current_trace() -> AttentionTrace | None:
    """Returns the trace of attention calls that this thread is recording; None if it records none."""
    forward = _thread_forward.get()
    return forward if isinstance(forward, AttentionTrace) else None


@contextmanager
def forward_scope(forward: ForwardContext | AttentionTrace) -> Iterator[None]:
    """Makes :func:`current_forward` or :func:`current_trace` return ``forward`` inside the ``with``."""
    token = _thread_forward.set(forward)
    try:
        yield
    finally:
        _thread_forward.reset(token)


def run(module: nn.Module, ctx: ForwardContext, **kwargs: Any) -> Any:
    """Runs a hosted model, or its decoder, on the batch of ``ctx``. ``ctx`` receives hidden states and queries."""
    batch = ctx.batch
    with forward_scope(ctx):
        return module(
            input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False, longdraft_attend=ctx, **kwargs
        )


def _attention(
    module: nn.Module, *args: Any, longdraft_attend: Callable[..., Any] | None = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Is the registered attention function. Calls ``longdraft_attend``; without it this thread's current forward."""
    attend = longdraft_attend or _thread_forward.get()
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} was called outside of longdraft's forward.")
    out: tuple[torch.Tensor, None] = attend(module, *args, **kwargs)
    return out


AttentionInterface.register(ATTENTION_NAME, _attention)


def set_attention(model: PreTrainedModel, implementation: str = ATTENTION_NAME) -> None:
    """Sets the attention implementation of a model. The model must be our own copy."""
    model_config = decoder_config(model)
    # Layers that were copied or that come from another model can have their own configuration objects.
    configs = (getattr(module, "config", None) for module in model.modules())
    for config in (model_config, *(c for c in configs if type(c) is type(model_config))):
        config._attn_implementation = implementation


def window_cache(store: Any, index: int) -> WindowKVCache:
    """Returns the window cache of a store with this index in :attr:`KVLayout.windows`."""
    return [states for states in store.states if isinstance(states, WindowKVCache)][index]


def recurrent_states(store: KVStore) -> RecurrentStates:
    """Returns the states of a store's recurrent layers."""
    return next(states for states in store.states if isinstance(states, RecurrentStates))


def attach_states(store: KVStore, layout: KVLayout, transposed: bool = False, dtype: torch.dtype | None = None) -> None:
    """Makes a store's window caches and recurrent states.
    ``transposed``: layout of the window caches' keys. ``dtype``: their dtype; None: the model's."""
    shapes = layout.windows
    if dtype is not None:
        shapes = tuple(replace(shape, dtype=dtype) for shape in shapes)
    slots, device = store.slots, store.device
    states: list[LayerStates] = [WindowKVCache(shape, slots, store.capacity, device, transposed) for shape in shapes]
    if layout.recurrent:
        states.append(RecurrentStates(layout.recurrent, slots, device))
    store.attach_states(*states)


def add_hidden_hook(model: PreTrainedModel, layer: int) -> RemovableHandle:
    """Adds a hook that collects a layer's output (B, T, hidden size) if the context's ``hidden_layers`` have it."""

    def hook(_module: nn.Module, _inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        ctx = kwargs.get("longdraft_attend") or current_forward()
        if ctx is not None and layer in ctx.hidden_layers:
            ctx.hidden[layer] = output[0] if isinstance(output, tuple) else output

    return decoder_layers(model)[layer].register_forward_hook(hook, with_kwargs=True)
