"""A chain: one continuation, as long as the draft believes in it.

A node is accepted with about the probability that the draft gives its path, and one more level costs a draft forward
and a row of the verification. With one rate `a` of acceptance for all tokens this is MagicDec's choice of the length
(Sadhukhan et al. 2024, section 3): the largest (1 - a^(g+1)) / (1 - a) for the time of g drafts and a verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch

from longdraft.trees.beam import Expand, Scored, children, root_level, trees
from longdraft.trees.tree import TokenTree

# Tokens of a chain where nobody says otherwise (MagicDec's gamma), and where a planner ends it, at most.
LENGTH, LONGEST = 4, 12


def chain_of(
    roots: Sequence[int],
    expand: Expand,
    depths: Sequence[int],
    price: float = 0.0,
    *,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """The draft's first choices, a chain for each sequence of a batch; none depends on the others.

    Args:
        roots: token id of each root.
        expand: the draft. Called with the roots, then with the last token of each chain that goes on.
        depths: tokens of each sequence's chain at most, 0 for a root alone.
        price: a chain ends with the first token whose path is no likelier than this.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        device: where the draft's logits are.
    """
    last = root_level(roots, device)
    levels: list[Scored] = []
    going = [row for row, depth in enumerate(depths) if depth > 0]
    while going:
        last = last.kept(going)
        last = children(last, expand(last.level), 1, ids)
        levels.append(last)
        going = [row for row in last.level.rows if depths[row] > last.level.depth]
        if price > 0 and going:
            likely = dict(zip(last.level.rows, last.scores[:, 0].tolist(), strict=True))
            going = [row for row in going if likely[row] > log(price)]
    return trees(roots, levels)
