"""Simulated acceptance: mean accepted length on held-out text, computed in a few forwards without decoding.

On text that the target wrote greedily, drafted tokens are accepted up to the first one that differs from the text. So
the rank that the draft gives each token of the text tells what decoding would accept: a tree whose level has w tokens
contains the token at that level if the token's rank is below w.

Level d = 1, 2, ... is the depth of a node in the tree: the draft proposes it d tokens beyond the last verified token.
A LongSpec draft computes level d with shift d, an EAGLE-3 draft in step d of the training-time test. A language model
ranks a token alike at every level.

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

# Number of children of a node at each level of the tree; at deeper levels 1.
TREE_WIDTHS = (4, 3, 2, 1, 1)
# The rank of a token that is not in the loss.
NO_RANK = 1 << 30


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Simulated acceptance on some documents."""

    agreement: tuple[float, ...]  # share of the tokens that are the draft's first choice, by level
    chain: float  # mean accepted length (tokens a round, bonus token included) of a chain with all levels
    tree: float  # mean accepted length of a tree whose nodes have TREE_WIDTHS children (decoding keeps the best paths)


@torch.no_grad()
def simulate(
    trainer: Callable[..., StepOutput], documents: Iterable[Features], levels: int = EVAL_DEPTH,
    level_mode: LevelMode = "step", all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
) -> SimulatedAcceptance:  # fmt: skip
    """Measures simulated acceptance on documents.

    Args:
        trainer: a :class:`DraftTrainer` in eval mode.
        levels: depth of chain and tree, which may differ from the depth that the draft was trained for.
        level_mode: how the trainer computes its levels.
        all_reduce: sums integers over processes.
    """
    num_correct, num_labels = torch.zeros(2, levels, dtype=torch.long)  # by level
    chain_counts, tree_counts = torch.zeros(2, 2, dtype=torch.long)  # (emitted tokens, rounds)
    chain_widths, tree_widths = [1] * levels, [*TREE_WIDTHS, *[1] * levels][:levels]
    for document in documents:
        ranks = rank_tokens(trainer, document, levels, level_mode)
        num_correct += (ranks == 0).sum(1)
        num_labels += (ranks < NO_RANK).sum(1)
        for counts, widths in ((chain_counts, chain_widths), (tree_counts, tree_widths)):
            is_drafted = ranks < torch.tensor(widths)[:, None]
            for first, end in _loss_spans(document.loss_mask.tolist()):
                counts += torch.tensor(_simulate_rounds(is_drafted[:, : end - 1].tolist(), first))
    summed = all_reduce(torch.cat([num_correct, num_labels, chain_counts, tree_counts]))
    num_correct, num_labels, chain_counts, tree_counts = summed.split([levels, levels, 2, 2])
    chain, tree = (tokens / max(1, rounds) for tokens, rounds in (chain_counts.tolist(), tree_counts.tolist()))
    return SimulatedAcceptance(tuple((num_correct / num_labels.clamp_min(1)).tolist()), chain, tree)


def rank_tokens(
    trainer: Callable[..., StepOutput], document: Features, levels: int, level_mode: LevelMode
) -> torch.Tensor:
    """Returns the ranks (levels, tokens - 1) that the draft gives a document's tokens but the first, at each level."""
    ranks = torch.full((levels, len(document.token_ids) - 1), NO_RANK)
    # A shift by all tokens would leave no label.
    for shift in range(1, min(levels + 1, ranks.shape[1])) if level_mode == "shift" else (1,):
        out = trainer([document], [shift], *([levels] if level_mode == "step" else []))
        for depth in out.depths.unique().tolist():
            level_ranks = out.ranks[out.depths == depth].cpu()
            ranks[depth - 1, ranks.shape[1] - len(level_ranks) :] = level_ranks  # of the last tokens
    ranks[:, ~document.loss_mask[1:]] = NO_RANK
    return ranks[:1].repeat(levels, 1) if level_mode == "text" else ranks


def _loss_spans(loss_mask: list[bool]) -> list[tuple[int, int]]:
    """Returns (first, end) of each span of tokens in the loss."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *loss_mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _simulate_rounds(is_drafted: list[list[bool]], position: int) -> tuple[int, int]:
    """Simulates decoding with the token at ``position`` as the first root, and returns (emitted tokens, rounds).
    ``is_drafted``: by level and position t, True if the draft proposes token t + 1 at that level."""
    levels, length = len(is_drafted), len(is_drafted[0])
    tokens = rounds = 0
    while position < length:
        accepted = 0
        while accepted < levels and position + accepted < length and is_drafted[accepted][position + accepted]:
            accepted += 1
        emitted = min(accepted + 1, length - position)
        tokens, rounds, position = tokens + emitted, rounds + 1, position + emitted
    return tokens, rounds
