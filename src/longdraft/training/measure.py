"""Simulated acceptance: what a draft would have accepted, computed from held-out text in a few forwards.

On text that the target wrote greedily, drafting with the true tokens as the path is what happens up to the first
wrong one. So the ranks of the next token for shift j = 1, 2, ... (a node's level) tell, for every position, how far
a tree of given widths would have come: a level counts when the true token is among its first choices.

Rounds follow each other as in decoding: the first root is the first learned token (a prefill has given it), a round
emits what it accepts and one token more, and that token is the next root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from longdraft.training.features import Features
from longdraft.training.longspec import StepOutput

WIDTHS = (4, 3, 2, 1, 1)


@dataclass(frozen=True)
class Simulated:
    """Attributes:
    agreement: share of the positions where the draft's first choice is right, by level.
    chain: mean accepted length (tokens a round, bonus included) of a chain as deep as there are levels.
    tree: the same where level d offers each node's best ``WIDTHS[d]`` tokens. A stand-in for the tree of decoding,
        which takes the best paths instead.
    """

    agreement: tuple[float, ...]
    chain: float
    tree: float


@torch.no_grad()
def simulate(
    trainee: Callable[..., StepOutput],
    documents: Iterable[Features],
    levels: int = len(WIDTHS),
    widths: Sequence[int] = WIDTHS,
) -> Simulated:
    """Simulated acceptance over documents.

    Args:
        trainee: as :class:`~longdraft.training.longspec.LongSpecTrainee`, in eval mode.
        levels: of the tree, whatever the draft was trained for: decoding drafts that deep.
        widths: choices of each level; 1 beyond its end.
    """
    hits = torch.zeros(levels)
    learned = torch.zeros(levels)
    tokens = {"chain": 0, "tree": 0}
    rounds = {"chain": 0, "tree": 0}
    for document in documents:
        length = len(document.tokens) - 1
        ranks = torch.full((levels, length), 1 << 30)
        for j in range(1, levels + 1):
            first = max(document.start - 1, j)
            if first >= length:
                continue
            out = trainee([document], [j])
            assert out.ranks is not None
            found = out.ranks.cpu()
            ranks[j - 1, first:] = found
            hits[j - 1] += (found == 0).sum()
            learned[j - 1] += len(found)
        for name, wide in (("chain", [1] * levels), ("tree", [*widths, *[1] * levels][:levels])):
            within = ranks < torch.tensor(wide)[:, None]
            n, r = _walk(within, document.start)
            tokens[name] += n
            rounds[name] += r
    return Simulated(
        tuple((hits / learned.clamp_min(1)).tolist()),
        tokens["chain"] / max(1, rounds["chain"]),
        tokens["tree"] / max(1, rounds["tree"]),
    )


def _walk(within: torch.Tensor, position: int) -> tuple[int, int]:
    """Tokens and rounds of decoding with the first root at row ``position``.

    Args:
        within: (levels, T) bool: whether what level d proposes after row t holds the text's next token.
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
