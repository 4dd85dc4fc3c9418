"""Simulated acceptance: what a draft would have accepted, computed from held-out text in a few forwards.

On text that the target wrote greedily, drafting with the true tokens as the path is what happens up to the first
wrong one. So the ranks of the next token at every level (LongSpec: shift j = 1, 2, ...; EAGLE-3: a step of the
training-time test; a language model: the same at all levels) tell, for every position, how far a tree of given widths
would have come: a level counts when the true token is among its first choices.

Rounds follow each other as in decoding: the first root is the first learned token (a prefill has given it), a round
emits what it accepts and one token more, and that token is the next root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from longdraft.training.config import DEPTH
from longdraft.training.features import Features
from longdraft.training.trainee import StepOutput

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


# trainee, document, levels -> (levels, L - 1) ranks of the text's next token, UNSEEN where a level tells none. Row t is
# that of the token t: what is said after it, with level d being the d-th token beyond what the target has read.
Ranks = Callable[[Callable[..., StepOutput], Features, int], torch.Tensor]
UNSEEN = 1 << 30


def by_shift(trainee: Callable[..., StepOutput], document: Features, levels: int) -> torch.Tensor:
    """A LongSpec draft's ranks: a forward a level."""
    ranks = torch.full((levels, len(document.tokens) - 1), UNSEEN)
    for j in range(1, levels + 1):
        first = max(document.start - 1, j)
        if first < ranks.shape[1]:
            out = trainee([document], [j])
            assert out.ranks is not None
            ranks[j - 1, first:] = out.ranks.cpu()
    return ranks


def by_step(trainee: Callable[..., StepOutput], document: Features, levels: int) -> torch.Tensor:
    """An EAGLE-3 or one-pass draft's ranks: one forward of as many steps."""
    ranks = torch.full((levels, len(document.tokens) - 1), UNSEEN)
    out = trainee([document], [1], levels)
    assert out.ranks is not None
    for i in range(int(out.depths.max())):  # a one-pass draft has no more than its rows
        ranks[i, document.start + i :] = out.ranks[out.depths == i + 1].cpu()
    return ranks


def by_text(trainee: Callable[..., StepOutput], document: Features, levels: int) -> torch.Tensor:
    """A language model's ranks: it reads the text itself, so a level says what any other would."""
    ranks = torch.full((levels, len(document.tokens) - 1), UNSEEN)
    out = trainee([document], [1])
    assert out.ranks is not None
    ranks[:, document.start - 1 :] = out.ranks.cpu()
    return ranks


@torch.no_grad()
def simulate(
    trainee: Callable[..., StepOutput],
    documents: Iterable[Features],
    levels: int = DEPTH,
    widths: Sequence[int] = WIDTHS,
    ranks_of: Ranks = by_shift,
) -> Simulated:
    """Simulated acceptance over documents.

    Args:
        trainee: in eval mode; ``ranks_of`` knows how to ask it.
        levels: of the tree, whatever the draft was trained for: decoding drafts that deep.
        widths: choices of each level; 1 beyond its end.
    """
    hits = torch.zeros(levels)
    learned = torch.zeros(levels)
    tokens = {"chain": 0, "tree": 0}
    rounds = {"chain": 0, "tree": 0}
    for document in documents:
        ranks = ranks_of(trainee, document, levels)
        hits += (ranks == 0).sum(1)
        learned += (ranks < UNSEEN).sum(1)
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
