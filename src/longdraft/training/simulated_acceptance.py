"""Simulated acceptance: how many tokens a draft would get accepted, computed on held-out text in a few forwards.

On text that the target wrote greedily, drafting follows the true tokens up to its first wrong one. So the ranks of the
true next token at every level tell how far a tree of given widths would come from any position: a level is accepted if
the true token is among its first choices. (Levels are shifts j = 1, 2, ... for LongSpec, steps of the training-time
test for EAGLE-3, and all the same for a language model.)

Rounds follow each other as in decoding. The first root is the first learned token, which prefill has given; a round
emits the accepted tokens and one more, and that one is the next root.
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


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Simulated acceptance on some documents.

    Attributes:
        agreement: share of the positions where the draft's first choice is right, by level.
        chain: mean accepted length (tokens a round, bonus included) of a chain as deep as there are levels.
        tree: the same if level d offers each node's best ``WIDTHS[d]`` tokens. It stands in for the tree of decoding,
            which takes the best paths instead.
    """

    agreement: tuple[float, ...]
    chain: float
    tree: float


# The rank where a level has none.
NO_RANK = 1 << 30


def label_ranks(
    trainer: Callable[..., StepOutput], document: Features, levels: int, level_mode: LevelMode
) -> torch.Tensor:
    """Ranks of the text's next tokens (levels, L - 1).

    Column t is for the token after t, which level d predicts as the d-th token beyond what the target has read.
    """
    ranks = torch.full((levels, len(document.token_ids) - 1), NO_RANK)
    for shift in range(1, min(levels + 1, ranks.shape[1])) if level_mode == "shift" else (1,):
        out = trainer([document], [shift], *([levels] if level_mode == "step" else []))
        for depth in out.depths.unique().tolist():  # a one-pass draft may have fewer levels
            row = out.ranks[out.depths == depth].cpu()
            ranks[depth - 1, ranks.shape[1] - len(row) :] = row
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
    """Simulated acceptance over documents.

    Args:
        trainee: in eval mode. by: how it computes its levels.
        levels: of the tree, whatever number the draft was trained for.
        all_reduce: adds up whole numbers over processes.
    """
    # Of each level the hits and the learned rows; of chain and tree the tokens and the rounds.
    levelled, walked = torch.zeros(2, levels, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)
    widths = [1] * levels, [*TREE_WIDTHS, *[1] * levels][:levels]
    for document in documents:
        ranks = label_ranks(trainer, document, levels, level_mode)
        levelled += torch.stack([(ranks == 0).sum(1), (ranks < NO_RANK).sum(1)])
        within = [ranks < torch.tensor(width)[:, None] for width in widths]
        for first, end in _spans(document.loss_mask.tolist()):
            walked += torch.tensor([_walk(each[:, : end - 1], first) for each in within])
    counts = all_reduce(torch.cat([levelled.flatten(), walked.flatten()]))
    (hits, learned), walked = counts[:-4].view(2, levels), counts[-4:].view(2, 2)
    chain, tree = (tokens / max(1, rounds) for tokens, rounds in walked.tolist())
    return SimulatedAcceptance(tuple((hits / learned.clamp_min(1)).tolist()), chain, tree)


def _spans(learned: list[bool]) -> list[tuple[int, int]]:
    """First and end of each run of learned tokens."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *learned, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _walk(within: torch.Tensor, position: int) -> tuple[int, int]:
    """Tokens and rounds of decoding with the first root at column ``position``.

    Args:
        within: (levels, T) bool: whether the proposals of level d after column t hold the text's next token.
    """
    levels, length = within.shape
    table = within.tolist()
    tokens = rounds = 0
    while position < length:
        accepted = 0
        while accepted < levels and position + accepted < length and table[accepted][position + accepted]:
            accepted += 1
        emitted = min(accepted + 1, length - position)
        tokens, rounds, position = tokens + emitted, rounds + 1, position + emitted
    return tokens, rounds
