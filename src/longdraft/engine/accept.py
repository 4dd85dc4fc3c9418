"""Acceptance: walk down the verified tree with tokens from the target's own distribution.

At the root the target chooses the next token: the argmax, or one sample from its processed distribution p(. | path).
If a child carries that token, the child is accepted and the walk goes on from it; if not, the token is emitted
all the same and the walk ends. Every emitted token is thus a sample from p(. | its own path), so the output has the
target's distribution for any tree, whoever drafted it and however well: the tree only decides how many samples
one forward can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from longdraft.attention.transfer import on_device
from longdraft.engine.sampler import Sampler
from longdraft.model.runner import not_a_number
from longdraft.trees.tree import TokenTree


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


def decide(nodes: Sequence[tuple[TokenTree, torch.Tensor, Sampler]]) -> list[list[int] | None]:
    """The target's token at every node of some trees: one transfer for all, the check for NaN among it.

    Args:
        nodes: trees with their logits, as :func:`accept` takes them, and what decides.

    Returns:
        Of each tree the token of each node; None where a token depends on more than the node's logits, as with
        processors that read the text.

    Raises:
        NumericalError: a node's logits are NaN.
    """
    tokens: list[torch.Tensor | None] = []
    wrong: list[torch.Tensor] = []
    for tree, own, sampler in nodes:
        # A maximum is NaN when any of its terms is. (-inf alone, a masked vocabulary, is allowed.)
        top, likeliest = own[: tree.size].max(-1)
        wrong.append(top.isnan().any())
        if sampler.plain_greedy:
            tokens.append(likeliest)
        else:
            tokens.append(sampler.samples(own[: tree.size], tree.depths))
    found = torch.cat([torch.stack(wrong).long(), *(x for x in tokens if x is not None)]).tolist()
    if any(found[: len(nodes)]):
        raise not_a_number()
    rest = iter(found[len(nodes) :])
    return [None if x is None else list(islice(rest, len(x))) for x in tokens]


def accept(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    text: Callable[[], torch.Tensor],
    stop: Callable[[int], bool] = lambda token: False,
    decided: Sequence[int] | None = None,
) -> Accepted:
    """Walks the tree.

    Args:
        logits: (at least tree.size, vocabulary) raw target logits of the nodes, none of them NaN.
        sampler: greedy or sampling, with its processors.
        text: gives the (n,) token ids up to and including the root; called only when processors need it.
        stop: told each emitted token in order; True ends the walk there (nothing is sampled after an EOS).
        decided: the tokens of all nodes, as :func:`decide` gives them; None: they are asked for on the way.
    """
    prefix = None if decided is not None or not len(sampler.processors) else text()
    empty = torch.empty(0, dtype=torch.long)
    node, path, tokens = 0, [0], list[int]()
    while True:
        if decided is not None:
            token = decided[node]
        else:
            upto = empty if prefix is None else torch.cat([prefix, on_device(tokens, prefix.device, torch.long)])
            token = sampler.sample(upto, logits[node])
        tokens.append(token)
        child = None if stop(token) else tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    if decided is not None and not sampler.greedy:
        sampler.draws.advance(len(tokens))
    return Accepted(tuple(path), tuple(tokens))
