"""Acceptance: a walk down the verified tree along tokens of the target.

At each node, beginning at the root, the target's next token is the argmax, or a sample of its processed distribution
p(. | path). If a child has that token, the child is accepted and the walk continues there. If not, the token is emitted
all the same and the walk ends. So each emitted token is a sample of p(. | its path), and the output has the target's
distribution for any tree. The tree only decides how many tokens one forward yields.
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
    """The accepted path of a tree.

    Attributes:
        nodes: accepted nodes, root first; their KV entries are to be committed.
        token_ids: emitted tokens, one for each node. The last is the bonus token, which was not drafted.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]


def sample_target_tokens(
    trees: Sequence[tuple[TokenTree, torch.Tensor, Sampler]], model: torch.nn.Module | None = None
) -> list[list[int] | None]:
    """Computes the target's token at every node of several trees, and checks for NaN, with one copy to the host.

    Args:
        trees: (tree, logits as in :func:`accept_path`, sampler) of each sequence.
        model: the target, named in the error.

    Returns:
        For each tree the tokens of its nodes; None if they depend on more than the node's logits, for example on
        processors that read the context.

    Raises:
        NumericalError: a node's logits are NaN.
    """
    tokens: list[torch.Tensor | None] = []
    has_nan: list[torch.Tensor] = []
    for tree, padded, sampler in trees:
        logits = padded[: tree.size]
        # The maximum is NaN if any logit is. (All -inf, a fully masked vocabulary, is allowed.)
        row_max, argmax = logits.max(-1)
        has_nan.append(row_max.isnan().any())
        tokens.append(argmax if sampler.is_argmax else sampler.sample_nodes(logits, tree.depths))
    values = torch.cat([torch.stack(has_nan).long(), *(x for x in tokens if x is not None)]).tolist()
    if any(values[: len(trees)]):
        raise nan_logits_error(model)
    remaining = iter(values[len(trees) :])
    return [None if x is None else list(islice(remaining, len(x))) for x in tokens]


def accept_path(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    get_context: Callable[[], torch.Tensor],
    should_stop: Callable[[int], bool] = lambda token: False,
    target_tokens: Sequence[int] | None = None,
) -> AcceptedPath:
    """Walks down the tree as far as the target's tokens are in it.

    Args:
        logits: (at least tree.size, vocabulary) raw target logits of the nodes, none of them NaN.
        sampler: greedy or sampling, with its processors.
        get_context: returns the (n,) token ids up to and including the root; called only if processors need it.
        should_stop: called with each emitted token in order; True ends the walk (nothing is sampled after an EOS).
        target_tokens: the tokens of all nodes, from :func:`sample_target_tokens`; None: they are sampled on the way.
    """
    prefix = None if target_tokens is not None or not len(sampler.processors) else get_context()
    empty = torch.empty(0, **CPU_INT64)
    node, path, tokens = 0, [0], list[int]()
    while True:
        if target_tokens is not None:
            token = target_tokens[node]
        else:
            context = empty if prefix is None else torch.cat([prefix, to_device(tokens, prefix.device, torch.long)])
            token = sampler.sample(context, logits[node])
        tokens.append(token)
        child = None if should_stop(token) else tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    if target_tokens is not None and not sampler.greedy:
        sampler.noise.advance(len(tokens))
    return AcceptedPath(tuple(path), tuple(tokens))
