"""A level of a language model's tree in one call of our kernels: all layers, the head, the likeliest tokens.

This avoids the Python code of a hosted forward, which takes as long as the layers take in the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from longdraft.attention.block import Block
from longdraft.memory.store import KVStore
from longdraft.model.few_rows import MOST
from longdraft.model.layer_parts import UNTURNED, CosSin
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module
from longdraft.native import DecoderStack, kernels
from longdraft.native.boundary import FLOATS, WHOLE

# Number of positions that are computed ahead.
AHEAD = 4096


class WholeLM:
    """Draft forwards of a hosted model over few rows, with the kernels' layers in ``stack``.

    Attributes:
        lighter: True if the stack has other weights than verifications use, in fewer bytes.
    """

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        own, kinds = kernels(), runner.twin.fused.kinds
        assert own is not None and kinds is not None
        self._kernels, self._stack, self._kinds = own, stack, kinds
        self.lighter = stack is not runner.twin.fused.stack
        self._embedding = runner.model.get_input_embeddings()
        # cos and sin (2, positions, d) for each rotary embedding, as far as they were needed.
        self._cos_sin: dict[str, torch.Tensor] = {}

    @classmethod
    def of(cls, runner: TargetRunner) -> WholeLM | None:
        """The forwards of a model; None if our kernels do not compute all of it, or if its rotary frequencies depend
        on the text's length."""
        found = getattr(rotary_module(runner.model), "rope_type", None)
        if {"dynamic", "longrope"} & set(found.values() if isinstance(found, dict) else [found]):
            return None
        stack = runner.twin.fused.draft_stack
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def takes(store: KVStore, rows: int) -> bool:
        """True if it computes this number of rows on this store."""
        return store.in_place and rows <= MOST

    def chains(
        self, store: KVStore, slots: Sequence[int], chains: Sequence[Sequence[int]], best: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a chain of new tokens behind the committed rows of each sequence, all of one length.

        Returns:
            Log-probabilities and draft ids (B, 1, k) of the ``best`` likeliest tokens after each chain.
        """
        size = len(chains[0])
        bases = [store.lengths[slot] for slot in slots]
        positions = [[n + i for i in range(size)] for n in bases]
        return self._forward(store, slots, bases, torch.tensor(chains, **WHOLE), positions, None, size, best, "last")

    def nodes(
        self,
        store: KVStore,
        slots: Sequence[int],
        tokens: torch.Tensor,
        positions: Sequence[int],
        ancestors: torch.Tensor,
        best: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a level of trees whose earlier levels are in the store, behind the committed rows.

        Args:
            tokens: (B, W).
            positions: position of each sequence's nodes.
            ancestors: (B, W, S) bool, for S nodes in all, of which the last W are the level's.

        Returns:
            Log-probabilities and draft ids (B, W, k) of the ``best`` likeliest tokens after each node.
        """
        each = [[p] * tokens.shape[1] for p in positions]
        depth = int(ancestors[0, 0].sum()) - 1
        bases = [p - depth for p in positions]
        return self._forward(store, slots, bases, tokens, each, ancestors, ancestors.shape[2], best, "all")

    def _forward(
        self,
        store: KVStore,
        slots: Sequence[int],
        bases: Sequence[int],
        tokens: torch.Tensor,
        positions: list[list[int]],
        mask: torch.Tensor | None,
        size: int,
        best: int,
        logits: Literal["all", "last"],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """size: number of rows behind the committed ones, of which the last are these tokens'."""
        store.check_room(slots, size)
        for states in store.states:
            states.prepare(slots, bases, size)
        lengths, count = [store.lengths[slot] for slot in slots], tokens.shape[1]
        block = Block.make(slots, lengths, count, mask, offset=size - count, bases=bases)
        turns = [self._rotations(kind.rope, positions) for kind in self._kinds.of_layers]
        rows, *more = self._kinds.rows(store, block, turns)
        x = self._embedding(tokens).float()
        out = self._kernels.stack(self._stack, *rows, x, logits=logits, best=best, more=more)
        assert out.log_probs is not None and out.places is not None
        return out.log_probs, out.places

    def _rotations(self, rope: str | None, positions: list[list[int]]) -> CosSin:
        """cos and sin (B, T, d) of a kind of layer."""
        if rope is None:
            return UNTURNED
        known, last = self._cos_sin.get(rope), max(row[-1] for row in positions)
        if known is None or last >= known.shape[1]:
            places = torch.arange(last + AHEAD, device="cpu")[None]
            known = torch.cat(self._kinds.rotate(rope, torch.empty(0, **FLOATS), places))
            self._cos_sin[rope] = known
        cos, sin = known[:, torch.tensor(positions, **WHOLE)]
        return cos, sin
