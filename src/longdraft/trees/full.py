"""Trees of a fixed shape: every node of a level has as many children (TokenSwift's static tree).

The children are a node's likeliest tokens, or tokens drawn by chance from what the draft says follows it. Of drawn ones
the tree remembers the probabilities, and the target may accept them by these (:mod:`longdraft.verify.residual`). The
shape depends on nothing that was drawn, or the probabilities would not be the true ones any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch

from longdraft.trees.beam import Expand, Level, children, root_level, trees
from longdraft.trees.tree import Drawn, TokenTree

# Takes token ids (1, n) and scores (1, vocabulary), returns scores.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# log of what stands for a probability of 0
_NEVER = -1e9


def sizes(widths: Sequence[int]) -> list[int]:
    """Nodes of each level, the root not counted."""
    return list(accumulate(widths, mul))


def full(
    roots: Sequence[int],
    expand: Expand,
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    *,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """A tree of likeliest tokens for each sequence of a batch.

    Args:
        roots: token id of each root.
        expand: the draft. Called with the roots, then with each level but the last.
        widths: children of each node, level by level; fewer where the vocabulary has no more.
        depths: levels of each sequence's tree, at most ``len(widths)``, 0 for a root alone; None: all.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        device: where the draft's logits are.
    """
    depths = [len(widths)] * len(roots) if depths is None else depths
    last, levels = root_level(roots, device), []
    for depth, width in enumerate(widths):
        if not (rows := [r for r in last.level.rows if depths[r] > depth]):
            break
        last = last.kept(rows)
        last = children(last, expand(last.level), width, ids)
        levels.append(last)
    return trees(roots, levels)


class Draws:
    """How a drafter draws for one sequence: from what the target's processors make of its logits.

    Args:
        processors: those that the target's logits go through, or copies of theirs; None for the plain distribution.
        generator: its random numbers, independent of those that the target's tokens are drawn with.
        text: gives the (n,) token ids up to and including the root; called only when processors need it.
        vocabulary: of the target.
    """

    def __init__(
        self,
        processors: Processor | None,
        generator: torch.Generator,
        text: Callable[[], torch.Tensor],
        vocabulary: int,
    ) -> None:
        self._processors, self._generator, self._text, self._vocabulary = processors, generator, text, vocabulary

    def law(self, path: Sequence[int], logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """(vocabulary,) float32: the probabilities of what follows a path from the root.

        Args:
            logits: (draft vocabulary,), the draft's. ids: as :func:`full` takes them.
        """
        scores = torch.full((self._vocabulary,), float("-inf"), device=logits.device)
        places = slice(len(logits)) if ids is None else ids
        scores[places] = logits[: self._vocabulary].float()
        if self._processors is not None:
            text = self._text()
            scores = self._processors(torch.cat([text, text.new_tensor(path)])[None], scores[None])[0]
        law = torch.softmax(scores, -1)
        # A draft that overflowed proposes badly, that is all; so does one that processors left no token.
        return law if bool(law.isfinite().all()) else torch.full_like(law, 1 / self._vocabulary)

    def draw(self, law: torch.Tensor, count: int) -> tuple[list[int], int]:
        """Up to ``count`` different tokens in the order in which they are drawn, and how many may be.

        p / e with one exponential e a token: the largest is a draw from p, the next one a draw from the rest.
        """
        noise = torch.empty_like(law).exponential_(generator=self._generator).clamp_min_(1e-30)
        keys, tokens = (law / noise).topk(min(count, len(law)))
        return tokens.tolist(), int((keys > 0).sum())


class _Growing:
    """One tree as it grows."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.log_probs = [root], [-1], [0.0]
        self.drawn: dict[int, Drawn] = {}
        self.paths: list[list[int]] = [[]]  # tokens from the root to each node, the root left out
        self.last = [0]

    def finished(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.log_probs), self.drawn)


def drawn(
    roots: Sequence[int],
    expand: Expand,
    widths: Sequence[int],
    draws: Sequence[Draws],
    depths: Sequence[int] | None = None,
    *,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """A tree of tokens drawn by chance for each sequence of a batch.

    Args:
        draws: of each sequence. The others are as :func:`full` takes them; ``widths`` of ones make a chain.
    """
    depths = [len(widths)] * len(roots) if depths is None else depths
    made = [_Growing(root) for root in roots]
    level = root_level(roots, device).level
    for depth, width in enumerate(widths):
        if not (rows := [r for r in level.rows if depths[r] > depth]):
            break
        places = [level.rows.index(row) for row in rows]
        level = Level(tuple(rows), depth, level.tokens[places], level.parents[places])
        logits = expand(level)
        found: list[list[int]] = []
        for i, row in enumerate(rows):
            found.append(_children(made[row], logits[i], width, draws[row], ids))
        # All nodes have as many: those that a law holds impossible stay in the tree, as good as any other guess.
        each = min(width, int(logits.shape[-1]))
        parents = torch.arange(level.tokens.shape[1], device=device).repeat_interleave(each)
        tokens = torch.tensor(found, device=device)
        level = Level(tuple(rows), depth + 1, tokens, parents.expand_as(tokens))
    return [tree.finished() for tree in made]


def _children(tree: _Growing, logits: torch.Tensor, width: int, draws: Draws, ids: torch.Tensor | None) -> list[int]:
    """Draws the children of a tree's last level; logits (W, draft vocabulary). Returns their tokens."""
    first = len(tree.tokens)
    for node, row in zip(tree.last, logits, strict=True):
        law = draws.law(tree.paths[node], row, ids)
        tokens, possible = draws.draw(law, min(width, len(row)))
        tree.drawn[node] = Drawn(law, tuple(tokens[:possible]))
        tree.tokens += tokens
        tree.parents += [node] * len(tokens)
        tree.log_probs += law[tokens].log().clamp_min(_NEVER).tolist()
        tree.paths += [[*tree.paths[node], token] for token in tokens]
    tree.last = list(range(first, len(tree.tokens)))
    return tree.tokens[first:]
