"""Acceptance: walk down the verified tree with tokens from the target's own distribution.

At the root the target chooses the next token: the argmax, or one sample from its processed distribution p(. | path).
If a child carries that token, the child is accepted and the walk goes on from it; if not, the token is emitted
all the same and the walk ends. Every emitted token is thus a sample from p(. | its own path), so the output has the
target's distribution for any tree, whoever drafted it and however well: the tree only decides how many samples
one forward can serve.

Where a drafter sampled a node's children and says from what distribution, the token is found by residual acceptance
instead (:mod:`longdraft.verify.residual`): distributed alike, and more often one of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.host.runner import not_a_number
from longdraft.trees.tree import TokenTree
from longdraft.verify import residual
from longdraft.verify.sampling import Sampler


@dataclass(frozen=True)
class Accepted:
    """Attributes:
    path: accepted nodes, root first: the block rows to commit.
    tokens: emitted tokens, one for each node of the path; the last is the bonus token, not drafted or refuted.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def from_draft(self) -> int:
        """Emitted tokens that a draft had right: all but the bonus token."""
        return len(self.tokens) - 1


def accept(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    text: Callable[[], torch.Tensor],
    stop: Callable[[int], bool] = lambda token: False,
) -> Accepted:
    """Walks the tree.

    Args:
        logits: (at least tree.size, vocabulary) raw target logits of the nodes.
        sampler: greedy or sampling, with its processors.
        text: gives the (n,) token ids up to and including the root; called only when processors need it.
        stop: told each emitted token in order; True ends the walk there (nothing is sampled after an EOS).

    Raises:
        NumericalError: a node's logits are NaN.
    """
    # A maximum is NaN when any of its terms is. (-inf alone, a masked vocabulary, is allowed.)
    if sampler.plain_greedy:
        # One reduction and one transfer for all nodes, the check among them; the walk itself is on the host.
        top, token_of = logits[: tree.size].max(-1)
        best, wrong = torch.stack([token_of, top.isnan().long()]).tolist()
        if any(wrong):
            raise not_a_number()
    elif bool(logits[: tree.size].amax().isnan()):
        raise not_a_number()
    prefix = None if sampler.plain_greedy or not len(sampler.processors) else text()
    empty = torch.empty(0, dtype=torch.long)
    node, path, tokens = 0, [0], list[int]()
    while True:
        if sampler.plain_greedy:
            token = best[node]
        else:
            upto = empty if prefix is None else torch.cat([prefix, prefix.new_tensor(tokens)])
            sampled = None if sampler.greedy else tree.sampled.get(node)
            if sampled is None:
                token = sampler.sample(upto, logits[node])
            else:
                token = residual.sample(sampler.distribution(upto, logits[node]), sampled, sampler.draws.generator)
        tokens.append(token)
        child = None if stop(token) else tree.child(node, token)
        if child is None:
            return Accepted(tuple(path), tuple(tokens))
        node = child
        path.append(node)
