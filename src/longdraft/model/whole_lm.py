"""A level of a language model's tree in one call of our kernels: all layers, the head, the likeliest tokens.

What a hosted forward does beside is left out: it takes as long in Python as the layers take in the kernels.
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

# Positions that are computed beyond those that are asked for.
FURTHER = 4096


class WholeLM:
    """Draft forwards of a Llama that is hosted, of few rows, with weights in fewer bytes than verifications read.

    Args:
        runner: the model. stack: all of its layers, for our kernels.

    Attributes:
        lighter: whether it reads other weights than verifications, in fewer bytes.
    """

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        found = kernels()
        assert found is not None
        self._kernels, self._stack = found, stack
        self.lighter = stack is not runner.twin.fused.stack
        self._embedding = runner.model.get_input_embeddings()
        rotary = rotary_module(runner.model)
        assert rotary is not None
        self._rotary = rotary
        # cos and sin (2, positions, d) of as many positions as were asked for.
        self._known = torch.empty(2, 0, 0)

    @classmethod
    def of(cls, runner: TargetRunner) -> WholeLM | None:
        """None where our kernels do not compute all of the model, or its positions turn otherwise in longer texts."""
        if getattr(rotary_module(runner.model), "rope_type", None) in ("dynamic", "longrope"):
            return None
        stack = runner.twin.fused.draft_stack
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def takes(store: KVStore, rows: int) -> bool:
        """Whether it serves so many rows, on this store."""
        return in_place(store) and rows <= MOST

    def chains(
        self, store: KVStore, slots: Sequence[int], chains: Sequence[Sequence[int]], best: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens of each sequence, equally many, behind its committed rows.

        Returns:
            Log-probabilities and draft ids (B, 1, k) of the ``best`` likeliest tokens behind each chain.
        """
        size = len(chains[0])
        sees = torch.ones(size, size, dtype=torch.bool).tril().expand(len(slots), -1, -1) if size > 1 else None
        positions = [[n + i for i in range(size)] for n in (store.lengths[slot] for slot in slots)]
        return self._forward(store, slots, torch.tensor(chains), positions, sees, size, best, "last")

    def nodes(
        self,
        store: KVStore,
        slots: Sequence[int],
        tokens: torch.Tensor,
        positions: Sequence[int],
        ancestors: torch.Tensor,
        best: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A level of trees whose levels before lie behind the committed rows.

        Args:
            tokens: (B, W). positions: of each sequence's nodes.
            ancestors: (B, W, S) bool: S nodes were fed, these W the last of them.

        Returns:
            Log-probabilities and draft ids (B, W, k) of the ``best`` likeliest tokens behind each node.
        """
        each = [[p] * tokens.shape[1] for p in positions]
        return self._forward(store, slots, tokens, each, ancestors, ancestors.shape[2], best, "all")

    def _forward(
        self,
        store: KVStore,
        slots: Sequence[int],
        tokens: torch.Tensor,
        positions: list[list[int]],
        sees: torch.Tensor | None,
        fed: int,
        best: int,
        which: Literal["all", "last"],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fed: rows behind the committed ones, these tokens' the last of them."""
        store.check_room(slots, fed)
        ends = [store.lengths[slot] + fed for slot in slots]
        rows = Rows(*self._turns(positions), slots, [end - tokens.shape[1] for end in ends], ends, sees)
        x = self._embedding(tokens).float()
        out = self._kernels.stack(self._stack, rows, store.keys, store.values, x, logits=which, best=best)
        assert out.log_probs is not None and out.places is not None
        return out.log_probs, out.places

    def _turns(self, positions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (B, T, d)."""
        if (most := max(row[-1] for row in positions)) >= self._known.shape[1]:
            places = torch.arange(most + FURTHER)[None]
            self._known = torch.cat(self._rotary(torch.empty(0), places))
        cos, sin = self._known[:, torch.tensor(positions)]
        return cos, sin
