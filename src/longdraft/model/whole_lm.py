"""A level of a language model's tree in one call of our kernels: all layers, the head, the likeliest tokens.

This avoids the Python code of a hosted forward, which takes as long as the layers take in the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from longdraft.memory.store import KVStore
from longdraft.model.few_rows import MOST
from longdraft.model.fused import in_place
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module
from longdraft.native import DecoderStack, Rows, kernels

# Number of positions that are computed ahead.
AHEAD = 4096


class WholeLM:
    """Draft forwards of a hosted Llama over few rows, with the kernels' layers in ``stack``.

    Attributes:
        lighter: True if the stack has other weights than verifications use, in fewer bytes.
    """

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        own = kernels()
        assert own is not None
        self._kernels, self._stack = own, stack
        self.lighter = stack is not runner.twin.fused.stack
        self._embedding = runner.model.get_input_embeddings()
        rotary = rotary_module(runner.model)
        assert rotary is not None
        self._rotary = rotary
        # cos and sin (2, positions, d), as far as they were needed.
        self._cos_sin = torch.empty(2, 0, 0)

    @classmethod
    def of(cls, runner: TargetRunner) -> WholeLM | None:
        """The forwards of a model; None if our kernels do not compute all of it, or if its rotary frequencies depend
        on the text's length."""
        if getattr(rotary_module(runner.model), "rope_type", None) in ("dynamic", "longrope"):
            return None
        stack = runner.twin.fused.draft_stack
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def takes(store: KVStore, rows: int) -> bool:
        """True if it computes this number of rows on this store."""
        return in_place(store) and rows <= MOST

    def chains(
        self, store: KVStore, slots: Sequence[int], chains: Sequence[Sequence[int]], best: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a chain of new tokens behind the committed rows of each sequence, all of one length.

        Returns:
            Log-probabilities and draft ids (B, 1, k) of the ``best`` likeliest tokens after each chain.
        """
        size = len(chains[0])
        mask = torch.ones(size, size, dtype=torch.bool).tril().expand(len(slots), -1, -1) if size > 1 else None
        positions = [[n + i for i in range(size)] for n in (store.lengths[slot] for slot in slots)]
        return self._forward(store, slots, torch.tensor(chains), positions, mask, size, best, "last")

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
        return self._forward(store, slots, tokens, each, ancestors, ancestors.shape[2], best, "all")

    def _forward(
        self,
        store: KVStore,
        slots: Sequence[int],
        tokens: torch.Tensor,
        positions: list[list[int]],
        mask: torch.Tensor | None,
        size: int,
        best: int,
        logits: Literal["all", "last"],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """size: number of rows behind the committed ones, of which the last are these tokens'."""
        store.check_room(slots, size)
        ends = [store.lengths[slot] + size for slot in slots]
        rows = Rows(*self._rotations(positions), slots, [end - tokens.shape[1] for end in ends], ends, mask)
        x = self._embedding(tokens).float()
        out = self._kernels.stack(self._stack, rows, store.keys, store.values, x, logits=logits, best=best)
        assert out.log_probs is not None and out.places is not None
        return out.log_probs, out.places

    def _rotations(self, positions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (B, T, d)."""
        if (last := max(row[-1] for row in positions)) >= self._cos_sin.shape[1]:
            self._cos_sin = torch.cat(self._rotary(torch.empty(0), torch.arange(last + AHEAD)[None]))
        cos, sin = self._cos_sin[:, torch.tensor(positions)]
        return cos, sin
