"""Levels of growing trees, as tensors on the device. The host synchronises once a round, for finished trees only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from longdraft.attention.transfer import to_device
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one depth: W nodes for each of the B sequences of a batch whose trees still grow.

    Attributes:
        sequence_indices: index in the batch of each of the B sequences.
        depth: depth of the nodes; 0: the level of the roots, which has one node for each sequence.
        tokens: (B, W) target ids.
        parents: (B, W) index of each node's parent among the sequence's nodes in the level before.
        logprobs: float32 (B, W) log-probability of each node given the path to its parent.
        path_logprobs: float32 (B, W) log-probability of the path from the root to each node.
    """

    sequence_indices: tuple[int, ...]
    depth: int
    tokens: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor
    path_logprobs: torch.Tensor

    def select(self, sequence_indices: Sequence[int]) -> TreeLevel:
        """Returns the level with the nodes of some of the sequences."""
        tensors = self.tokens, self.parents, self.logprobs, self.path_logprobs
        return TreeLevel(
            tuple(sequence_indices), self.depth, *(self.index_select(sequence_indices, x) for x in tensors)
        )

    def index_select(self, sequence_indices: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """Returns the entries of some of the sequences from a tensor (B, ...)."""
        if tuple(sequence_indices) == self.sequence_indices:
            return x
        # ``stack``, because an index tensor would have to be copied to the device.
        return torch.stack([x[self.sequence_indices.index(i)] for i in sequence_indices])

    def topk(self, k: int) -> tuple[TreeLevel, torch.Tensor]:
        """Returns the level of each sequence's ``k`` best nodes, sorted, and their indices (B, k) in this level."""
        path_logprobs, indices = self.path_logprobs.topk(min(k, self.path_logprobs.shape[1]), dim=-1)
        tokens, parents, logprobs = (x.gather(1, indices) for x in (self.tokens, self.parents, self.logprobs))
        return TreeLevel(self.sequence_indices, self.depth, tokens, parents, logprobs, path_logprobs), indices


# Replaces a NaN log-probability: lower than any real one, but finite, so that sums can be compared.
_NAN_LOGPROB = -1e9
# (level, k) -> log-probabilities and draft ids (B, W, k) of the k likeliest children of each node, sorted. With k = 0,
# the logits (B, W, draft vocabulary) of all children alone.
LogitsOrTopk = Callable[[TreeLevel, int], tuple[torch.Tensor, ...]]
# (level, draft's log-probabilities (B, W, K) of children, their target ids (B, W, K)) -> the log-probabilities with
# which the target will sample these children, as the target's Gumbel noise is known.
CoupledLogprobs = Callable[[TreeLevel, torch.Tensor, torch.Tensor], torch.Tensor]
# (level, log-probabilities (B, W, K) of each node's children, sorted) -> corrected log-probabilities.
Calibrate = Callable[[TreeLevel, torch.Tensor], torch.Tensor]
COUPLED_TOP_K = 64  # minimum K of ``CoupledLogprobs``: noise may make any of the 64 likeliest tokens the best


@dataclass(frozen=True)
class LevelExpander:
    """Drafts the children of a level's nodes in one round.

    Attributes:
        logits_or_topk: runs the draft on the roots, then on the expanded nodes of each level but the last.
        device: device of the draft's logits.
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None: both vocabularies are the same.
        coupled_logprobs: replaces the draft's log-probabilities if the target's sampling noise is known in advance.
        calibrate: corrects the log-probabilities by how often drafts were accepted.
    """

    logits_or_topk: LogitsOrTopk
    device: torch.device | str = "cpu"
    draft_to_target_ids: torch.Tensor | None = None
    coupled_logprobs: CoupledLogprobs | None = None
    calibrate: Calibrate | None = None

    def expand(self, level: TreeLevel, k: int) -> TreeLevel:
        """Returns the level of each node's ``k`` most probable children. Its ``parents`` are indices into ``level``."""
        logprobs, tokens = self.logits_or_topk(level, k if self.coupled_logprobs is None else max(k, COUPLED_TOP_K))
        tokens = tokens if self.draft_to_target_ids is None else self.draft_to_target_ids[tokens]
        if self.coupled_logprobs is not None:
            logprobs = self.coupled_logprobs(level, logprobs, tokens).nan_to_num(nan=_NAN_LOGPROB)
            logprobs, indices = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
            tokens = tokens.gather(-1, indices)
        logprobs = logprobs if self.calibrate is None else self.calibrate(level, logprobs)
        # The best nodes must contain their parents. The clamp ensures that rounding makes no path likelier than the
        # path to the parent. A draft that overflowed to NaN may propose badly, but must not break the comparisons.
        logprobs = logprobs.nan_to_num(nan=_NAN_LOGPROB).clamp(max=0.0)
        path_logprobs = (level.path_logprobs[..., None] + logprobs).flatten(1)
        parents = _repeated_indices(tokens.shape[1], tokens.shape[2], tokens.device).expand_as(path_logprobs)
        tokens, logprobs = tokens.flatten(1), logprobs.flatten(1)
        return TreeLevel(level.sequence_indices, level.depth + 1, tokens, parents, logprobs, path_logprobs)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and ids (..., k) of the ``k`` largest logits (..., vocabulary), sorted."""
    values, ids = (logits := logits.float()).topk(min(k, logits.shape[-1]), dim=-1)
    return values - logits.logsumexp(-1, keepdim=True), ids


def logits_or_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Returns the result of a :data:`LogitsOrTopk`, from all logits (..., draft vocabulary)."""
    return topk_logprobs(logits, k) if k else (logits,)


def root_level(roots: Sequence[int], device: torch.device | str) -> TreeLevel:
    """Makes the level of the roots, with one node for each sequence. ``roots``: token id of each root."""
    tokens = to_device(roots, device)[:, None]
    zeros = torch.zeros(tokens.shape, device=device, dtype=torch.float32)
    parents = _repeated_indices(1, 1, tokens.device).expand_as(tokens)
    return TreeLevel(tuple(range(len(roots))), 0, tokens, parents, zeros, zeros)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _repeated_indices(count: int, repeats: int, device: torch.device) -> torch.Tensor:
    """Returns 0 .. count - 1, each number ``repeats`` times. Cached, because a draft uses few sizes."""
    return torch.arange(count, device=device).repeat_interleave(repeats)


def to_trees(roots: Sequence[int], levels: Sequence[TreeLevel]) -> list[TokenTree]:
    """Copies levels to the host and joins them to trees. Only here drafting waits for the device."""
    if not levels:
        return [TokenTree((root,), (-1,), (0.0,)) for root in roots]
    # One copy of 32-bit words: tokens and parents (int64) of all levels, then their log-probabilities (float32).
    int_tensors = [x.contiguous().flatten() for level in levels for x in (level.tokens, level.parents)]
    words = [x.view(torch.int32) for x in (*int_tensors, *(level.logprobs.flatten() for level in levels))]
    copied = torch.cat(words).cpu()
    num_int_words = 2 * sum(map(len, int_tensors))  # an int64 is two words
    integers = copied[:num_int_words].view(torch.long).tolist()
    floats = copied[num_int_words:].view(torch.float32).tolist()
    tokens, parents, logprobs = [[root] for root in roots], [[-1] for _ in roots], [[0.0] for _ in roots]
    level_start = 0  # number of nodes of all sequences in earlier levels
    parent_offset = [0] * len(roots)  # for each sequence, index in the tree of the first node of the level before
    for level in levels:
        width = level.path_logprobs.shape[1]
        level_size = len(level.sequence_indices) * width
        for i, sequence in enumerate(level.sequence_indices):
            offset = parent_offset[sequence]
            parent_offset[sequence] = len(tokens[sequence])
            first_logprob = level_start + i * width
            first_token = level_start + first_logprob  # a node has one float, but two integers
            first_parent = first_token + level_size
            tokens[sequence] += integers[first_token : first_token + width]
            parents[sequence] += [offset + p for p in integers[first_parent : first_parent + width]]
            logprobs[sequence] += floats[first_logprob : first_logprob + width]
        level_start += level_size
    return [TokenTree(tuple(t), tuple(p), tuple(x)) for t, p, x in zip(tokens, parents, logprobs, strict=True)]
