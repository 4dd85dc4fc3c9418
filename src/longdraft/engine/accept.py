"""Acceptance: walk down the verified tree with tokens from the target's own distribution.

At the root the target chooses the next token: the argmax, or one sample from its processed distribution p(. | path).
If a child carries that token, the child is accepted and the walk goes on from it. If not, the token is emitted all the
same and the walk ends. So every emitted token is a sample from p(. | its own path), and the output has the target's
distribution for any tree, however well drafted: the tree only decides how many samples one forward can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from longdraft.attention.transfer import to_device
from longdraft.engine.sampler import Sampler
from longdraft.model.outputs import nan_logits_error
from longdraft.native.boundary import CPU_INT64
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class AcceptedPath:
    """The result of a walk.

    Attributes:
        path: accepted nodes, root first: the block rows to commit.
        tokens: emitted tokens, one for each node of the path; the last is the bonus token, which was not drafted.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]


def sample_target_tokens(
    trees: Sequence[tuple[TokenTree, torch.Tensor, Sampler]], model: torch.nn.Module | None = None
) -> list[list[int] | None]:
    """Computes the target's token at every node of several trees in one transfer, with the check for NaN.

    Args:
        nodes: trees, with logits as :func:`accept_path` takes them and the sampler of each.
        model: whose logits they are, which an error names.

    Returns:
        For each tree the tokens of its nodes; None if they depend on more than the nodes' logits, as with processors
        that read the text.

    Raises:
        NumericalError: a node's logits are NaN.
    """
    tokens: list[torch.Tensor | None] = []
    has_nan: list[torch.Tensor] = []
    for tree, padded, sampler in trees:
        logits = padded[: tree.size]
        # A maximum is NaN when any of its terms is. (-inf alone, a masked vocabulary, is allowed.)
        top, likeliest = logits.max(-1)
        has_nan.append(top.isnan().any())
        tokens.append(likeliest if sampler.is_argmax else sampler.sample_nodes(logits, tree.depths))
    numbers = torch.cat([torch.stack(has_nan).long(), *(x for x in tokens if x is not None)]).tolist()
    if any(numbers[: len(trees)]):
        raise nan_logits_error(model)
    rest = iter(numbers[len(trees) :])
    return [None if x is None else list(islice(rest, len(x))) for x in tokens]


def accept_path(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    get_context: Callable[[], torch.Tensor],
    should_stop: Callable[[int], bool] = lambda token: False,
    target_tokens: Sequence[int] | None = None,
) -> AcceptedPath:
    """Walks down the tree.

    Args:
        logits: (at least tree.size, vocabulary) raw target logits of the nodes, none of them NaN.
        sampler: greedy or sampling, with its processors.
        text: returns the (n,) token ids up to and including the root; called only if processors need it.
        stop: called with each emitted token in order; True ends the walk there (nothing is sampled after an EOS).
        decided: the tokens of all nodes, from :func:`sample_target_tokens`; None: they are sampled on the way.
    """
    prefix = None if target_tokens is not None or not len(sampler.processors) else get_context()
    empty = torch.empty(0, **CPU_INT64)
    node, path, tokens = 0, [0], list[int]()
    while True:
        if target_tokens is not None:
            token = target_tokens[node]
        else:
            path_text = empty if prefix is None else torch.cat([prefix, to_device(tokens, prefix.device, torch.long)])
            token = sampler.sample(path_text, logits[node])
        tokens.append(token)
        child = None if should_stop(token) else tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    if target_tokens is not None and not sampler.greedy:
        sampler.noise.advance(len(tokens))
    return AcceptedPath(tuple(path), tuple(tokens))
