"""Hosts models that attend with code of their own: biases by distance, masks of their own, no attention interface.

Such a model runs as its ``generate`` runs it, with a cache of transformers and one chain of tokens at a time. The cache
is filled with the rows of our store that the chain comes after: the text, and the nodes above it in the tree. So a
chain takes one forward, a tree one for each node, and a batch as many for each sequence.
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

# What models call their cache, in the words of transformers 5.24 and of 5.17.
_CACHES = ("cache", "past_key_values")


@torch.inference_mode()
def trace_cache_layers(model: PreTrainedModel, token_ids: torch.Tensor) -> tuple[AttentionCall, ...]:
    """The layers of a model's cache after a forward of tokens (1, T); none if it does not keep rows in one."""
    cache = DynamicCache()
    _forward(model, token_ids, torch.arange(token_ids.shape[1], device=token_ids.device)[None], cache, 0)
    found: list[AttentionCall] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != token_ids.shape[1]:
            return ()
        found.append(AttentionCall(type(model).__name__, keys.shape[1], keys.shape[3], values.shape[3]))
    return tuple(found)


def run(module: nn.Module, hosted: hosting.ForwardContext, logits_to_keep: int = 0) -> SimpleNamespace:
    """Runs a hosted model, or its decoder, on a block.

    Args:
        hosted: the state of the forward; hidden states are left in it.
        logits_to_keep: 1 if only the logits of the last row are wanted, 0 for those of all rows.

    Returns:
        ``logits`` (B, T, vocabulary) or (B, 1, vocabulary); None from a decoder.
    """
    block = hosted.batch
    sequences = [_Sequence(hosted, index) for index in range(block.batch_size)]
    for sequence in sequences:
        sequence.run(module, bool(logits_to_keep))
    for layer in range(len(hosted.layout.custom_cache_layers)):
        keys, values = (torch.stack([s.kept[i][layer] for s in sequences])[:, :, block.tree_offset :] for i in range(2))
        hosted.store.write(layer, keys, values, block)
    for layer in hosted.hidden_layers:
        hosted.hidden[layer] = torch.stack([s.hidden[layer] for s in sequences])
    logits = [s.logits for s in sequences if s.logits is not None]
    return SimpleNamespace(logits=torch.stack(logits) if logits else None)


class _Sequence:
    """One sequence of a block.

    Attributes:
        kept: keys and values of the tree's rows, each (kv_heads, width, size) for every layer.
        hidden: layer -> (T, hidden).
        logits: (T, vocabulary), or (1, vocabulary) of the last row.
    """

    def __init__(self, hosted: hosting.ForwardContext, index: int) -> None:
        self._hosted, self._index, block = hosted, index, hosted.batch
        slot, length = block.slots[index], block.prefix_lens[index]
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kept: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for layer, call in enumerate(hosted.layout.custom_cache_layers):
            keys, values = (x[slot, : call.kv_heads, : length + block.tree_len] for x in hosted.store.layer(layer))
            keys, values = keys[..., : call.head_dim], values[..., : call.value_dim]
            self._before.append((keys[:, :length], values[:, :length]))
            self.kept[0].append(keys[:, length:].clone())
            self.kept[1].append(values[:, length:].clone())
        self.hidden: dict[int, torch.Tensor] = {}
        self.logits: torch.Tensor | None = None

    def run(self, module: nn.Module, last: bool) -> None:
        """Computes all rows.

        Args:
            last: only the logits of the last row are wanted.
        """
        block = self._hosted.batch
        assert block.token_ids is not None and block.positions is not None
        token_ids, positions = block.token_ids[self._index], block.positions[self._index]
        parents, rows = tree_parents(block)[self._index], list(range(block.tree_offset, block.tree_len))
        chains = [rows] if block.mask is None else [[row] for row in rows]
        for chain in chains:
            places = [row - block.tree_offset for row in chain]
            part = replace(
                block,
                token_ids=token_ids[places][None],
                positions=positions[places][None],
                query_len=len(chain),
                mask=None,
            )
            self._compute(module, part, chain, _above(parents, chain[0]), last and len(chains) == 1)

    def _compute(self, module: nn.Module, part: ForwardBatch, chain: list[int], above: list[int], last: bool) -> None:
        """Computes a chain of rows that comes after the rows ``above`` of the tree."""
        cache = DynamicCache()
        for layer, before in enumerate(self._before):
            both = zip(before, self.kept, strict=True)
            keys, values = (torch.cat([x, kept[layer][:, above]], 1)[None] for x, kept in both)
            cache.update(keys, values, layer)
        past = self._before[0][0].shape[1] + len(above)
        hosted = replace(self._hosted, batch=part, hidden={})
        with hosting.forward_scope(hosted):
            out = _forward(module, part.token_ids, part.positions, cache, past, last)
        for layer, new in enumerate(cache.layers):
            for kept, rows in zip(self.kept, (new.keys, new.values), strict=True):
                kept[layer][:, chain] = rows[0, :, past:]
        places = [row - self._hosted.batch.tree_offset for row in chain]
        for layer, rows in hosted.hidden.items():
            self.hidden.setdefault(layer, self._empty(rows[0]))[places] = rows[0]
        logits = getattr(out, "logits", None)
        if last and logits is not None:
            self.logits = logits[0, -1:]
        elif logits is not None:
            self.logits = self._empty(logits[0]) if self.logits is None else self.logits
            self.logits[places] = logits[0]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._hosted.batch.query_len, like.shape[-1])


def _forward(
    module: nn.Module,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: DynamicCache,
    past: int,
    last: bool = False,
) -> Any:
    """A forward of a chain of tokens (1, T) behind ``past`` rows, as ``generate`` makes it."""
    assert token_ids is not None
    known = inspect.signature(type(module).forward).parameters
    name = next((name for name in _CACHES if name in known), _CACHES[0])
    more: dict[str, Any] = {name: cache}
    if "position_ids" in known:
        more["position_ids"] = positions
    if last and "logits_to_keep" in known:
        more["logits_to_keep"] = 1
    mask = torch.ones(1, past + token_ids.shape[1], dtype=torch.long, device=token_ids.device)
    return module(input_ids=token_ids, attention_mask=mask, use_cache=True, **more)


def _above(parents: list[int], row: int) -> list[int]:
    """The rows that a row descends from, the first one first."""
    found: list[int] = []
    while (row := parents[row]) >= 0:
        found.append(row)
    return found[::-1]
