"""Levels of a growing tree, as tensors: a GPU is waited for once a round, when the finished tree goes to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longdraft.attention.transfer import on_device
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, for those sequences of a batch that go on: B' rows of W nodes.

    Attributes:
        rows: which sequence of the batch each row belongs to, host integers.
        depth: 0 for the roots, one node each.
        tokens: (B', W) target ids.
        parents: (B', W) each node's parent, as an index into its row of the level before; 0 at depths 0 and 1.
    """

    rows: tuple[int, ...]
    depth: int
    tokens: torch.Tensor
    parents: torch.Tensor

    def kept(self, rows: Sequence[int]) -> Level:
        """The level of these sequences alone."""
        return Level(tuple(rows), self.depth, self.of(rows, self.tokens), self.of(rows, self.parents))

    def of(self, rows: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """These sequences' rows of a tensor that has one for each row of the level."""
        if tuple(rows) == self.rows:
            return x
        # An index tensor would have to travel to the device.
        return torch.stack([x[self.rows.index(row)] for row in rows])


@dataclass(frozen=True)
class Scored:
    """A level with each node's log-probability given its path, and summed over the path; float32 (B', W)."""

    level: Level
    log_probs: torch.Tensor
    scores: torch.Tensor

    def kept(self, rows: Sequence[int]) -> Scored:
        """The level of these sequences alone."""
        of = self.level.of
        return Scored(self.level.kept(rows), of(rows, self.log_probs), of(rows, self.scores))

    def best(self, width: int) -> tuple[Scored, torch.Tensor]:
        """The ``width`` nodes of each row with the best scores, the best first, and (B', W) which they were."""
        scores, chosen = self.scores.topk(min(width, self.scores.shape[1]), dim=-1)
        tokens, parents = self.level.tokens.gather(1, chosen), self.level.parents.gather(1, chosen)
        level = Level(self.level.rows, self.level.depth, tokens, parents)
        return Scored(level, self.log_probs.gather(1, chosen), scores), chosen

    def first(self, width: int) -> Scored:
        """The first nodes of each row. They keep their places, so their children know them by these."""
        level = self.level
        fewer = Level(level.rows, level.depth, level.tokens[:, :width], level.parents[:, :width])
        return Scored(fewer, self.log_probs[:, :width], self.scores[:, :width])


# A score for what is not a number: below all others, and sums of it can still be compared.
_HOPELESS = -1e9
# Told a level, gives the draft's logits (B', W, draft vocabulary) of the tokens that follow its nodes.
Expand = Callable[[Level], torch.Tensor]
# Told a level and a number k, gives log-probabilities and draft ids (B', W, k) of the likeliest of them, best first.
Likeliest = Callable[[Level, int], tuple[torch.Tensor, torch.Tensor]]
# Told a level, and log-probabilities and target ids (B', W, K) of the draft's likeliest tokens behind its nodes: how
# likely each is the one that will be sampled there.
Foresee = Callable[[Level, torch.Tensor, torch.Tensor], torch.Tensor]
# Told a level, and log-probabilities (B', W, K) of its nodes' children, the likeliest first: what to believe of them.
Lift = Callable[[Level, torch.Tensor], torch.Tensor]
# Of how many of a draft's likeliest tokens that is asked.
FORESEEN = 64


@dataclass(frozen=True)
class Growth:
    """What the trees of one round grow by.

    Attributes:
        expand: the draft. Called with the roots, then with those nodes of each level but the last that go on.
        depths: levels of each sequence's tree at most, 0 for a root alone.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        sampled: the target's tokens are sampled, not greedy, and nothing is known of the random numbers.
        likeliest: the draft, where it can say the likeliest tokens without giving logits; in place of ``expand``.
        foresee: where tokens are sampled and the random numbers are known; None: nodes are as likely as the draft says.
        lift: what the draft says, put right by how it fared; None: it is believed.
    """

    expand: Expand
    depths: Sequence[int]
    ids: torch.Tensor | None = None
    sampled: bool = False
    likeliest: Likeliest | None = None
    foresee: Foresee | None = None
    lift: Lift | None = None

    def deeper(self, level: Level) -> list[int]:
        """The sequences whose trees may have another level."""
        return [row for row in level.rows if self.depths[row] > level.depth]

    def children(self, last: Scored, count: int) -> Scored:
        """The ``count`` most probable children of each node: a level W times as wide.

        Their ``parents`` are indices into ``last``.
        """
        find, asked = self.likeliest, count if self.foresee is None else max(count, FORESEEN)
        log_probs, token = find(last.level, asked) if find else likeliest(self.expand(last.level), asked)
        token = token if self.ids is None else self.ids[token]
        if self.foresee is not None:
            log_probs = self.foresee(last.level, log_probs, token).nan_to_num(nan=_HOPELESS)
            log_probs, chosen = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
            token = token.gather(-1, chosen)
        log_probs = log_probs if self.lift is None else self.lift(last.level, log_probs)
        # Rounding must not lift a child above its parent: the best nodes would not be closed under parents. Nor must a
        # draft that overflowed leave numbers that cannot be compared: it proposes badly, that is all.
        log_probs = log_probs.nan_to_num(nan=_HOPELESS).clamp(max=0.0)
        scores = (last.scores[..., None] + log_probs).flatten(1)
        tokens = token.flatten(1)
        parents = torch.arange(token.shape[1], device=token.device).repeat_interleave(token.shape[2]).expand_as(tokens)
        level = Level(last.level.rows, last.level.depth + 1, tokens, parents)
        return Scored(level, log_probs.flatten(1), scores)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits (..., vocabulary): log-probabilities and ids (..., k) of the ``count`` largest, the largest first."""
    logits = logits.float()
    best, token = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return best - logits.logsumexp(-1, keepdim=True), token


def root_level(roots: Sequence[int], device: torch.device | str) -> Scored:
    """The roots, one node a sequence."""
    zeros = torch.zeros(len(roots), 1, device=device)
    tokens = on_device(roots, device)[:, None]
    return Scored(Level(tuple(range(len(roots))), 0, tokens, torch.zeros_like(tokens)), zeros, zeros)


def to_trees(roots: Sequence[int], levels: Sequence[Scored]) -> list[TokenTree]:
    """Turns levels into trees on the host. The one place that waits for the device."""
    if not levels:
        return [TokenTree((root,), (-1,), (0.0,)) for root in roots]
    whole = torch.cat([torch.stack([x.level.tokens, x.level.parents]).flatten() for x in levels])
    # The floats travel as what their bits are as integers: one transfer.
    bits = torch.cat([x.log_probs.flatten() for x in levels]).view(torch.int32)
    fetched = torch.cat([whole, bits]).cpu()
    numbers = fetched[: len(whole)].tolist()
    floats = fetched[len(whole) :].int().view(torch.float32).tolist()
    tokens, parents, log_probs = [[root] for root in roots], [[-1] for _ in roots], [[0.0] for _ in roots]
    at = 0
    above = [0] * len(roots)  # index of the first node of each sequence's last level
    for scored in levels:
        rows, width = scored.level.rows, scored.scores.shape[1]
        count = len(rows) * width
        for i, row in enumerate(rows):
            first = len(tokens[row])
            here = 2 * at + i * width
            tokens[row] += numbers[here : here + width]
            parents[row] += [above[row] + p for p in numbers[here + count : here + count + width]]
            log_probs[row] += floats[at + i * width : at + (i + 1) * width]
            above[row] = first
        at += count
    return [TokenTree(tuple(t), tuple(p), tuple(x)) for t, p, x in zip(tokens, parents, log_probs, strict=True)]
