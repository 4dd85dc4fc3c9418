"""Hosts models with custom attention code: biases by distance (ALiBi), masks of their own, no AttentionInterface.

Such a model runs as in ``generate``, with transformers' DynamicCache, on one chain of consecutive tokens at a time. The
cache gets from our KV store what lies before the chain: the prefix, and the chain's ancestors in the tree. A sequence
whose tokens are a chain takes one forward. A sequence whose tokens are a tree takes one forward for each node.
Shapes: B sequences of T tokens in a batch. A forward of the model has one sequence.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.model import hosting
from longdraft.model.layout import AttentionCall
from longdraft.model.tree_paths import tree_parents

# Names of a forward's cache argument, in transformers 5.24 and in 5.17.
_CACHE_ARGS = ("cache", "past_key_values")


@torch.inference_mode()
def trace_cache_layers(model: PreTrainedModel, token_ids: torch.Tensor) -> tuple[AttentionCall, ...]:
    """Returns KV heads and sizes of each cache layer, as AttentionCalls, from a forward of ``token_ids`` (1, T).
    Returns () if the model does not fill a DynamicCache."""
    cache = DynamicCache()
    _forward(model, token_ids, torch.arange(token_ids.shape[1], device=token_ids.device)[None], cache, 0)
    calls: list[AttentionCall] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != token_ids.shape[1]:
            return ()
        calls.append(AttentionCall(type(model).__name__, keys.shape[1], keys.shape[3], values.shape[3]))
    return tuple(calls)


def run(module: nn.Module, ctx: hosting.ForwardContext, logits_to_keep: int = 0) -> SimpleNamespace:
    """Runs a batch. Returns an object with the attribute ``logits``, (B, T, vocabulary) or (B, 1, vocabulary).

    Args:
        module: the hosted model, or only its decoder, whose ``logits`` are None.
        ctx: the forward's batch and KV store. Receives the hidden states.
        logits_to_keep: 1 computes only the last token's logits, 0 computes all tokens' logits."""
    batch = ctx.batch
    sequences = [_SequenceForward(ctx, index) for index in range(batch.batch_size)]
    for sequence in sequences:
        sequence.run(module, last_only=bool(logits_to_keep))
    for layer in range(len(ctx.layout.custom_cache_layers)):
        new_keys, new_values = (
            torch.stack([s.tree_kv[i][layer] for s in sequences])[:, :, batch.tree_offset :] for i in range(2)
        )
        ctx.store.write(layer, new_keys, new_values, batch)
    for layer in ctx.hidden_layers:
        ctx.hidden[layer] = torch.stack([s.hidden[layer] for s in sequences])
    logits = [s.logits for s in sequences if s.logits is not None]
    return SimpleNamespace(logits=torch.stack(logits) if logits else None)


class _SequenceForward:
    """Computes one sequence of a batch.

    Attributes:
        tree_kv: the keys of all layers, and the values of all layers: tensors (kv_heads, tree nodes, head size).
        hidden: decoder layer -> hidden states (T, hidden size).
        logits: (T, vocabulary), or (1, vocabulary) of the last token. None before :meth:`run`, and without a head."""

    def __init__(self, ctx: hosting.ForwardContext, sequence_index: int) -> None:
        self._ctx, self._sequence_index, batch = ctx, sequence_index, ctx.batch
        slot, prefix_len = batch.slots[sequence_index], batch.prefix_lens[sequence_index]
        self._prefix_kv: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values by layer
        self.tree_kv: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for layer, call in enumerate(ctx.layout.custom_cache_layers):
            keys, values = (x[slot, : call.kv_heads, : prefix_len + batch.tree_len] for x in ctx.store.layer(layer))
            keys, values = keys[..., : call.head_dim], values[..., : call.value_dim]
            self._prefix_kv.append((keys[:, :prefix_len], values[:, :prefix_len]))
            self.tree_kv[0].append(keys[:, prefix_len:].clone())
            self.tree_kv[1].append(values[:, prefix_len:].clone())
        self.hidden: dict[int, torch.Tensor] = {}
        self.logits: torch.Tensor | None = None

    def run(self, module: nn.Module, last_only: bool) -> None:
        """Computes all tokens, chain by chain. ``last_only`` leaves out all logits but the last if it can."""
        batch = self._ctx.batch
        assert batch.token_ids is not None and batch.positions is not None
        token_ids, positions = batch.token_ids[self._sequence_index], batch.positions[self._sequence_index]
        parents, nodes = tree_parents(batch)[self._sequence_index], list(range(batch.tree_offset, batch.tree_len))
        chains = [nodes] if batch.mask is None else [[node] for node in nodes]  # without a mask the tokens are a chain
        for chain in chains:
            indices = [node - batch.tree_offset for node in chain]  # the batch's tensors begin at node tree_offset
            chain_batch = replace(
                batch,
                token_ids=token_ids[indices][None],
                positions=positions[indices][None],
                query_len=len(chain),
                mask=None,
            )
            ancestors = _ancestors(parents, chain[0])
            self._compute_chain(module, chain_batch, chain, ancestors, last_only and len(chains) == 1)

    def _compute_chain(
        self, module: nn.Module, chain_batch: ForwardBatch, chain: list[int], ancestors: list[int], last_only: bool
    ) -> None:
        """Computes a chain of nodes. ``ancestors`` are the nodes on the path from the root to the chain."""
        cache = DynamicCache()
        for layer, prefix_kv in enumerate(self._prefix_kv):
            pairs = zip(prefix_kv, self.tree_kv, strict=True)
            keys, values = (torch.cat([prefix, tree[layer][:, ancestors]], 1)[None] for prefix, tree in pairs)
            cache.update(keys, values, layer)
        past_len = self._prefix_kv[0][0].shape[1] + len(ancestors)
        ctx = replace(self._ctx, batch=chain_batch, hidden={})
        with hosting.forward_scope(ctx):
            out = _forward(module, chain_batch.token_ids, chain_batch.positions, cache, past_len, last_only)
        for layer, cache_layer in enumerate(cache.layers):
            for tree, computed in zip(self.tree_kv, (cache_layer.keys, cache_layer.values), strict=True):
                tree[layer][:, chain] = computed[0, :, past_len:]
        indices = [node - self._ctx.batch.tree_offset for node in chain]
        for layer, hidden in ctx.hidden.items():
            self.hidden.setdefault(layer, self._new_output(hidden[0]))[indices] = hidden[0]
        logits = getattr(out, "logits", None)
        if last_only and logits is not None:
            self.logits = logits[0, -1:]
        elif logits is not None:
            self.logits = self._new_output(logits[0]) if self.logits is None else self.logits
            self.logits[indices] = logits[0]

    def _new_output(self, x: torch.Tensor) -> torch.Tensor:
        """Returns zeros (T, size of x's last dimension), for the results of all tokens of the sequence."""
        return x.new_zeros(self._ctx.batch.query_len, x.shape[-1])


def _forward(
    module: nn.Module,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: DynamicCache,
    past_len: int,
    last_only: bool = False,
) -> Any:
    """Runs one sequence's tokens behind ``past_len`` cached tokens, with the arguments that ``generate`` would pass."""
    assert token_ids is not None
    parameters = inspect.signature(type(module).forward).parameters
    name = next((name for name in _CACHE_ARGS if name in parameters), _CACHE_ARGS[0])
    kwargs: dict[str, Any] = {name: cache}
    if "position_ids" in parameters:
        kwargs["position_ids"] = positions
    if last_only and "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = 1
    mask = torch.ones(1, past_len + token_ids.shape[1], dtype=torch.long, device=token_ids.device)
    return module(input_ids=token_ids, attention_mask=mask, use_cache=True, **kwargs)


def _ancestors(parents: list[int], node: int) -> list[int]:
    """Returns a node's ancestors, the root first. A root's parent is negative."""
    path: list[int] = []
    while (node := parents[node]) >= 0:
        path.append(node)
    return path[::-1]
