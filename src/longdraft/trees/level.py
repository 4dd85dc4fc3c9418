"""Levels of growing trees, as tensors: the host waits for a GPU once a round, when the finished trees go to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from longdraft.attention.transfer import to_device
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one depth, for the sequences of a batch whose trees go on: B' rows of W nodes.

    Attributes:
        rows: the sequence of the batch that each row belongs to, integers on the host.
        depth: 0 for the roots, one node each.
        tokens: (B', W) target ids.
        parents: (B', W) each node's parent, as an index into its row of the level before; 0 at depths 0 and 1.
        logprobs: float32 (B', W) each node's log-probability given its path.
        scores: float32 (B', W) the log-probability of its path.
    """

    sequence_indices: tuple[int, ...]
    depth: int
    tokens: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor
    path_logprobs: torch.Tensor

    def select(self, sequence_indices: Sequence[int]) -> TreeLevel:
        """Returns the level of these sequences alone."""
        tensors = self.tokens, self.parents, self.logprobs, self.path_logprobs
        return TreeLevel(
            tuple(sequence_indices), self.depth, *(self.index_select(sequence_indices, x) for x in tensors)
        )

    def index_select(self, sequence_indices: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """Returns these sequences' rows of a tensor that has one for each row of the level."""
        if tuple(sequence_indices) == self.sequence_indices:
            return x
        # An index tensor would have to be copied to the device.
        return torch.stack([x[self.sequence_indices.index(row)] for row in sequence_indices])

    def topk(self, k: int) -> tuple[TreeLevel, torch.Tensor]:
        """Returns the ``k`` best nodes of each row, the best first, and their places (B', W) in this level."""
        scores, chosen = self.path_logprobs.topk(min(k, self.path_logprobs.shape[1]), dim=-1)
        tokens, parents, logprobs = (x.gather(1, chosen) for x in (self.tokens, self.parents, self.logprobs))
        return TreeLevel(self.sequence_indices, self.depth, tokens, parents, logprobs, scores), chosen


# The score of NaN: below all others, and sums of it can still be compared.
_HOPELESS = -1e9
# A level -> the draft's logits (B', W, draft vocabulary) of the tokens that follow its nodes.
DraftLogits = Callable[[TreeLevel], torch.Tensor]
# A level and a number k -> log-probabilities and draft ids (B', W, k) of the likeliest following tokens, best first.
DraftTopk = Callable[[TreeLevel, int], tuple[torch.Tensor, torch.Tensor]]
# A level, and the draft's log-probabilities and target ids (B', W, K) of the likeliest following tokens -> the
# log-probability (B', W, K) that each of them will be sampled there.
CoupledLogprobs = Callable[[TreeLevel, torch.Tensor, torch.Tensor], torch.Tensor]
# A level, and log-probabilities (B', W, K) of its nodes' children, the likeliest first -> corrected log-probabilities.
Calibrate = Callable[[TreeLevel, torch.Tensor], torch.Tensor]
# How many of a draft's likeliest tokens are given to ``Foresee``.
COUPLED_TOP_K = 64


def expand_level(
    level: TreeLevel,
    k: int,
    likeliest: DraftTopk,
    draft_to_target_ids: torch.Tensor | None = None,
    coupled_logprobs: CoupledLogprobs | None = None,
    calibrate: Calibrate | None = None,
) -> TreeLevel:
    """Returns the ``k`` most probable children of each node, their ``parents`` as indices into ``level``.

    Arguments are those of :meth:`longdraft.trees.kind.TreeConfig.grow`.
    """
    logprobs, token = likeliest(level, k if coupled_logprobs is None else max(k, COUPLED_TOP_K))
    token = token if draft_to_target_ids is None else draft_to_target_ids[token]
    if coupled_logprobs is not None:
        logprobs = coupled_logprobs(level, logprobs, token).nan_to_num(nan=_HOPELESS)
        logprobs, chosen = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
        token = token.gather(-1, chosen)
    logprobs = logprobs if calibrate is None else calibrate(level, logprobs)
    # Rounding must not lift a child above its parent: the best nodes would not be closed under parents. And a draft
    # that overflowed may propose badly, but its numbers must still be comparable.
    logprobs = logprobs.nan_to_num(nan=_HOPELESS).clamp(max=0.0)
    scores, tokens = (level.path_logprobs[..., None] + logprobs).flatten(1), token.flatten(1)
    parents = _in_groups(token.shape[1], token.shape[2], token.device).expand_as(tokens)
    return TreeLevel(level.sequence_indices, level.depth + 1, tokens, parents, logprobs.flatten(1), scores)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids (..., k) of the ``k`` largest logits (..., vocabulary), the largest first."""
    logits = logits.float()
    best, token = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return best - logits.logsumexp(-1, keepdim=True), token


def root_level(roots: Sequence[int], device: torch.device | str) -> TreeLevel:
    """Makes the level of the roots, one node a sequence."""
    tokens = to_device(roots, device)[:, None]
    zeros = torch.zeros(tokens.shape, device=device, dtype=torch.float32)
    parents = _in_groups(1, 1, tokens.device).expand_as(tokens)
    return TreeLevel(tuple(range(len(roots))), 0, tokens, parents, zeros, zeros)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _in_groups(groups: int, size: int, device: torch.device) -> torch.Tensor:
    """The group that each of ``groups * size`` numbers belongs to. There are few shapes: it is kept for each."""
    return torch.arange(groups, device=device).repeat_interleave(size)


def to_trees(roots: Sequence[int], levels: Sequence[TreeLevel]) -> list[TokenTree]:
    """Turns levels into trees on the host; the one place that waits for the device."""
    if not levels:
        return [TokenTree((root,), (-1,), (0.0,)) for root in roots]
    # Everything is transferred as integers of 32 bits, in one copy.
    integers = [x.contiguous().flatten() for level in levels for x in (level.tokens, level.parents)]
    parts = [x.view(torch.int32) for x in (*integers, *(x.logprobs.flatten() for x in levels))]
    fetched = torch.cat(parts).cpu()
    count = 2 * sum(map(len, integers))
    numbers, floats = fetched[:count].view(torch.long).tolist(), fetched[count:].view(torch.float32).tolist()
    tokens, parents, logprobs = [[root] for root in roots], [[-1] for _ in roots], [[0.0] for _ in roots]
    at = 0
    above = [0] * len(roots)  # index of the first node of each sequence's last level
    for level in levels:
        width = level.path_logprobs.shape[1]
        count = len(level.sequence_indices) * width
        for i, row in enumerate(level.sequence_indices):
            first = len(tokens[row])
            here = 2 * at + i * width
            tokens[row] += numbers[here : here + width]
            parents[row] += [above[row] + p for p in numbers[here + count : here + count + width]]
            logprobs[row] += floats[at + i * width : at + (i + 1) * width]
            above[row] = first
        at += count
    return [TokenTree(tuple(t), tuple(p), tuple(x)) for t, p, x in zip(tokens, parents, logprobs, strict=True)]
