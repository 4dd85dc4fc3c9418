"""Levels of growing trees, as tensors: the host waits for a GPU once a round, when the finished trees go to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from longdraft.attention.transfer import on_device
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, for the sequences of a batch whose trees go on: B' rows of W nodes.

    Attributes:
        rows: the sequence of the batch that each row belongs to, integers on the host.
        depth: 0 for the roots, one node each.
        tokens: (B', W) target ids.
        parents: (B', W) each node's parent, as an index into its row of the level before; 0 at depths 0 and 1.
        log_probs: float32 (B', W) each node's log-probability given its path.
        scores: float32 (B', W) the log-probability of its path.
    """

    rows: tuple[int, ...]
    depth: int
    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    scores: torch.Tensor

    def kept(self, rows: Sequence[int]) -> Level:
        """Returns the level of these sequences alone."""
        tensors = self.tokens, self.parents, self.log_probs, self.scores
        return Level(tuple(rows), self.depth, *(self.of(rows, x) for x in tensors))

    def of(self, rows: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """Returns these sequences' rows of a tensor that has one for each row of the level."""
        if tuple(rows) == self.rows:
            return x
        # An index tensor would have to be copied to the device.
        return torch.stack([x[self.rows.index(row)] for row in rows])

    def best(self, width: int) -> tuple[Level, torch.Tensor]:
        """Returns the ``width`` best nodes of each row, the best first, and their places (B', W) in this level."""
        scores, chosen = self.scores.topk(min(width, self.scores.shape[1]), dim=-1)
        tokens, parents, log_probs = (x.gather(1, chosen) for x in (self.tokens, self.parents, self.log_probs))
        return Level(self.rows, self.depth, tokens, parents, log_probs, scores), chosen


# The score of NaN: below all others, and sums of it can still be compared.
_HOPELESS = -1e9
# A level -> the draft's logits (B', W, draft vocabulary) of the tokens that follow its nodes.
Expand = Callable[[Level], torch.Tensor]
# A level and a number k -> log-probabilities and draft ids (B', W, k) of the likeliest following tokens, best first.
Likeliest = Callable[[Level, int], tuple[torch.Tensor, torch.Tensor]]
# A level, and the draft's log-probabilities and target ids (B', W, K) of the likeliest following tokens -> the
# log-probability (B', W, K) that each of them will be sampled there.
Foresee = Callable[[Level, torch.Tensor, torch.Tensor], torch.Tensor]
# A level, and log-probabilities (B', W, K) of its nodes' children, the likeliest first -> corrected log-probabilities.
Lift = Callable[[Level, torch.Tensor], torch.Tensor]
# How many of a draft's likeliest tokens are given to ``Foresee``.
FORESEEN = 64


def children(
    last: Level,
    count: int,
    likeliest: Likeliest,
    ids: torch.Tensor | None = None,
    foresee: Foresee | None = None,
    lift: Lift | None = None,
) -> Level:
    """Returns the ``count`` most probable children of each node, their ``parents`` as indices into ``last``.

    Arguments are those of :meth:`longdraft.trees.kind.TreeKind.grow`.
    """
    log_probs, token = likeliest(last, count if foresee is None else max(count, FORESEEN))
    token = token if ids is None else ids[token]
    if foresee is not None:
        log_probs = foresee(last, log_probs, token).nan_to_num(nan=_HOPELESS)
        log_probs, chosen = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
        token = token.gather(-1, chosen)
    log_probs = log_probs if lift is None else lift(last, log_probs)
    # Rounding must not lift a child above its parent: the best nodes would not be closed under parents. And a draft
    # that overflowed may propose badly, but its numbers must still be comparable.
    log_probs = log_probs.nan_to_num(nan=_HOPELESS).clamp(max=0.0)
    scores, tokens = (last.scores[..., None] + log_probs).flatten(1), token.flatten(1)
    parents = _in_groups(token.shape[1], token.shape[2], token.device).expand_as(tokens)
    return Level(last.rows, last.depth + 1, tokens, parents, log_probs.flatten(1), scores)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids (..., k) of the ``count`` largest logits (..., vocabulary), the largest first."""
    logits = logits.float()
    best, token = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return best - logits.logsumexp(-1, keepdim=True), token


def root_level(roots: Sequence[int], device: torch.device | str) -> Level:
    """Makes the level of the roots, one node a sequence."""
    tokens = on_device(roots, device)[:, None]
    zeros = torch.zeros(tokens.shape, device=device, dtype=torch.float32)
    parents = _in_groups(1, 1, tokens.device).expand_as(tokens)
    return Level(tuple(range(len(roots))), 0, tokens, parents, zeros, zeros)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _in_groups(groups: int, size: int, device: torch.device) -> torch.Tensor:
    """The group that each of ``groups * size`` numbers belongs to. There are few shapes: it is kept for each."""
    return torch.arange(groups, device=device).repeat_interleave(size)


def to_trees(roots: Sequence[int], levels: Sequence[Level]) -> list[TokenTree]:
    """Turns levels into trees on the host; the one place that waits for the device."""
    if not levels:
        return [TokenTree((root,), (-1,), (0.0,)) for root in roots]
    # Everything is transferred as integers of 32 bits, in one copy.
    integers = [x.contiguous().flatten() for level in levels for x in (level.tokens, level.parents)]
    parts = [x.view(torch.int32) for x in (*integers, *(x.log_probs.flatten() for x in levels))]
    fetched = torch.cat(parts).cpu()
    count = 2 * sum(map(len, integers))
    numbers, floats = fetched[:count].view(torch.long).tolist(), fetched[count:].view(torch.float32).tolist()
    tokens, parents, log_probs = [[root] for root in roots], [[-1] for _ in roots], [[0.0] for _ in roots]
    at = 0
    above = [0] * len(roots)  # index of the first node of each sequence's last level
    for level in levels:
        width = level.scores.shape[1]
        count = len(level.rows) * width
        for i, row in enumerate(level.rows):
            first = len(tokens[row])
            here = 2 * at + i * width
            tokens[row] += numbers[here : here + width]
            parents[row] += [above[row] + p for p in numbers[here + count : here + count + width]]
            log_probs[row] += floats[at + i * width : at + (i + 1) * width]
            above[row] = first
        at += count
    return [TokenTree(tuple(t), tuple(p), tuple(x)) for t, p, x in zip(tokens, parents, log_probs, strict=True)]
