"""One pass: all levels of a tree from one forward of EAGLE-3's layer (P-EAGLE, arXiv:2602.01469; DSpark, 2607.05147).

The rows that are new enter as EAGLE-3's do; behind the root stand rows for the tokens further on, in the same forward.
They say which tokens are likely there; which of them follows which, a bigram of low rank says, node by node, from
numbers that are at hand. Memory is a window: it does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from longdraft.drafters.eagle3 import Eagle3Drafter, Eagle3Round
from longdraft.drafters.eagle3_draft import BoundDraft
from longdraft.drafters.kinds import Kind, Training, register
from longdraft.drafters.levels import Inputs
from longdraft.drafters.onepass_block import OnePassBlock
from longdraft.drafters.onepass_draft import KIND, OnePassDraft
from longdraft.sequence import Sequence
from longdraft.trees.level import Level

# Likely tokens of a row that the bigram chooses among; the rest keep the share of the distribution that they have.
CANDIDATES = 24


class OnePassDrafter(Eagle3Drafter):
    """Drafts trees with one forward a round.

    Args:
        draft: a trained draft.
        widths, nodes, tree, depth, top_k, threshold, window: as :class:`~longdraft.drafters.eagle3.Eagle3Drafter` takes
            them; no deeper than the draft has rows, which is the depth by default.

    Raises:
        ValueError: for sizes that make no tree, or one that is deeper.
    """

    draft: OnePassDraft

    def __init__(
        self,
        draft: OnePassDraft,
        widths: SequenceOf[int] | None = None,
        nodes: int | None = None,
        tree: str | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        window: int | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__(draft, widths, nodes, tree, depth, top_k, window, threshold)
        slots = draft.shape.slots
        if (widths is not None or depth is not None) and self.tree.depth > slots:
            raise ValueError(f"a tree of {self.tree.depth} levels is deeper than the {slots} tokens the draft proposes")
        self.tree = self.tree.limited(slots)

    @property
    def scratch(self) -> int:
        return self.draft.shape.slots - 1

    def round_of(self, bound: BoundDraft, sequences: list[Sequence], depth: int) -> OnePassRound:
        return OnePassRound(self, bound, sequences, depth)


class OnePassRound(Eagle3Round):
    """One round of a batch."""

    def __init__(self, drafter: OnePassDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, bound, sequences, max(1, depth))
        assert isinstance(bound.block, OnePassBlock)
        self._block = bound.block
        # For each sequence, of each row: logits (K, V') or, of the likeliest tokens, log-probabilities and ids (K, M).
        self._said: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if level.depth == 0:
            self._drafter.forwards += 1
            self._ask(level, best)
        found = [self._after(row, level.depth, level.tokens[i], best) for i, row in enumerate(level.rows)]
        if not best:
            logits = torch.cat([numbers for numbers, _ in found])
            return logits, logits[:, :0], logits[:, :0]
        log_probs, ids = (torch.cat([each[j] for each in found]) for j in (0, 1))
        return log_probs[:, :0], log_probs, ids

    def _ask(self, level: Level, best: int) -> None:
        """The forward: the rows that the cache lacks, and behind each root those of the tokens further on."""
        block, ahead = self._block, self._depth - 1
        fed, inputs, newest = self.roots(level)
        counts = fed.counts
        parts: list[list[torch.Tensor]] = [[], [], [], []]
        assert inputs.joined is not None
        for row, *each in zip(level.rows, *(t.split(list(counts)) for t in inputs if t is not None), strict=True):
            x, g = each[0][-1:], each[1][-1:]
            behind = (x + block.slot_embedding[:ahead], g + block.slot_state[:ahead], *self._ahead[row])
            for part, own, more in zip(parts, each, behind, strict=True):
                part += [own, more]
        inputs = Inputs(*(torch.cat(part) for part in parts))
        fed = replace(fed, counts=tuple(n + ahead for n in counts), width=1 + ahead, behind=ahead)
        if self._whole is not None:
            _, _, log_probs, ids = self._whole(fed, inputs, self._cache, None, max(best, CANDIDATES))
            each_row = zip(log_probs.split(fed.width), ids.split(fed.width), strict=True)
            self._said = dict(zip(level.rows, each_row, strict=True))
            return
        # The rows that go on: each root, which now lies further back, and those behind it.
        ends = newest + ahead * torch.arange(len(counts), device=newest.device)
        going = (ends[:, None] + torch.arange(1 + ahead, device=newest.device)).flatten()
        x, g, cos, sin = inputs
        assert g is not None
        logits = block.logits(block(x, g, cos, sin, fed.attend(self._cache), going))
        self._said = {row: (part, None) for row, part in zip(level.rows, logits.split(fed.width), strict=True)}

    def _after(self, row: int, depth: int, tokens: torch.Tensor, best: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows each of (W,) nodes at a depth: logits (W, V'), or log-probabilities and ids (W, best)."""
        block = self._block
        before = tokens if self._bound.draft_ids is None else self._bound.draft_ids[tokens]
        known = block.bigram_in.weight[before.clamp_min(0)] * (before >= 0)[:, None]
        numbers, ids = self._said[row]
        if ids is None:
            return numbers[depth] + block.bigram_out(known), numbers
        likely, chosen = numbers[depth], ids[depth]
        scores = likely + known @ block.bigram_out.weight[chosen].T
        # What is not among the likely keeps its share.
        rest = torch.log1p(-likely.exp().sum().clamp(max=1 - 1e-6)).expand(len(tokens), 1)
        scores = scores - torch.logsumexp(torch.cat([scores, rest], 1), 1, keepdim=True)
        found = scores.topk(best)
        return found.values, chosen[found.indices]


register(
    Kind(
        KIND,
        OnePassDraft.load,
        OnePassDrafter,
        "a trained one-layer draft that proposes all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469; DSpark, arXiv:2607.05147",
        Training(
            "longdraft.training.config:OnePassConfig",
            "longdraft.training.onepass:train_onepass",
            "Train a one-pass draft",
        ),
    )
)
