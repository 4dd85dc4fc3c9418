"""Simulated acceptance: mean accepted length on held-out text, computed in a few forwards without decoding.

On text that the target wrote greedily, drafting follows the text up to the draft's first error. So the ranks of next
tokens, at each level, tell how far a tree reaches from any position: a level of width w is accepted if the true token
is among the draft's top w. (Levels are shifts j = 1, 2, ... in LongSpec, steps of the training-time test in EAGLE-3,
and all the same in a language model.)

Rounds follow one another as in decoding. The first root is the first token of an answer, which prefill predicts. A
round emits the accepted tokens and a bonus token, which is the next root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from longdraft.training.config import EVAL_DEPTH
from longdraft.training.features import Features
from longdraft.training.trainer import LevelMode, StepOutput

TREE_WIDTHS = (4, 3, 2, 1, 1)
# The rank of a token that is not in the loss.
NO_RANK = 1 << 30


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Simulated acceptance on some documents.

    Attributes:
        agreement: share of the tokens that are the draft's first choice, by level.
        chain: mean accepted length (tokens a round, bonus token included) of a chain with all levels.
        tree: mean accepted length of a tree in which each node at level d has the top ``TREE_WIDTHS[d]`` tokens as
            children. It approximates the trees of decoding, which keep the best paths.
    """

    agreement: tuple[float, ...]
    chain: float
    tree: float


def label_ranks(
    trainer: Callable[..., StepOutput], document: Features, levels: int, level_mode: LevelMode
) -> torch.Tensor:
    """Returns (levels, L - 1): the ranks of the tokens t + 1, for t = 0, 1, ..., at each level.

    At level d, token t + 1 is drafted d tokens beyond the last verified token.
    """
    ranks = torch.full((levels, len(document.token_ids) - 1), NO_RANK)
    for shift in range(1, min(levels + 1, ranks.shape[1])) if level_mode == "shift" else (1,):
        out = trainer([document], [shift], *([levels] if level_mode == "step" else []))
        for depth in out.depths.unique().tolist():  # a one-pass draft may have fewer levels
            level_ranks = out.ranks[out.depths == depth].cpu()
            ranks[depth - 1, ranks.shape[1] - len(level_ranks) :] = level_ranks
    ranks[:, ~document.loss_mask[1:]] = NO_RANK
    return ranks[:1].repeat(levels, 1) if level_mode == "text" else ranks


@torch.no_grad()
def simulate(
    trainer: Callable[..., StepOutput],
    documents: Iterable[Features],
    levels: int = EVAL_DEPTH,
    level_mode: LevelMode = "step",
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
) -> SimulatedAcceptance:
    """Measures simulated acceptance on documents.

    Args:
        trainer: a :class:`DraftTrainer` in eval mode.
        level_mode: how the trainer computes its levels.
        levels: depth of chain and tree, which may differ from the draft's in training.
        all_reduce: sums integers over processes.
    """
    # by_level: correct tokens, and all tokens, of each level; by_shape: (tokens, rounds) of chain and tree
    by_level, by_shape = torch.zeros(2, levels, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)
    widths = [1] * levels, [*TREE_WIDTHS, *[1] * levels][:levels]
    for document in documents:
        ranks = label_ranks(trainer, document, levels, level_mode)
        by_level += torch.stack([(ranks == 0).sum(1), (ranks < NO_RANK).sum(1)])
        hits = [ranks < torch.tensor(width)[:, None] for width in widths]
        for first, end in _spans(document.loss_mask.tolist()):
            by_shape += torch.tensor([_decode(hit[:, : end - 1], first) for hit in hits])
    counts = all_reduce(torch.cat([by_level.flatten(), by_shape.flatten()]))
    (correct, total), by_shape = counts[:-4].view(2, levels), counts[-4:].view(2, 2)
    chain, tree = (tokens / max(1, rounds) for tokens, rounds in by_shape.tolist())
    return SimulatedAcceptance(tuple((correct / total.clamp_min(1)).tolist()), chain, tree)


def _spans(loss_mask: list[bool]) -> list[tuple[int, int]]:
    """Returns (first, end) of each span of tokens in the loss."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *loss_mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _decode(hits: torch.Tensor, position: int) -> tuple[int, int]:
    """Simulates decoding with the first root at column ``position``, and returns (tokens, rounds).

    Args:
        hits: (levels, T) bool, True if the drafted tokens at a level include token t + 1.
    """
    levels, length = hits.shape
    table = hits.tolist()
    tokens = rounds = 0
    while position < length:
        accepted = 0
        while accepted < levels and position + accepted < length and table[accepted][position + accepted]:
            accepted += 1
        emitted = min(accepted + 1, length - position)
        tokens, rounds, position = tokens + emitted, rounds + 1, position + emitted
    return tokens, rounds
