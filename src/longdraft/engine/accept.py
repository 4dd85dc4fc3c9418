"""Acceptance: a walk down the verified tree along tokens of the target.

At each node, beginning at the root, the target's token is the argmax of the processed logits (greedy), or a sample of
p(. | path). The token is emitted. If a child of the node has that token, the child is accepted and the walk continues
there; otherwise the walk ends.

This is not rejection sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a draft
token is not accepted with probability min(1, p / q), the draft's distribution q is not used, and there is no residual
distribution max(0, p - q) to sample from after a rejection. It is exact for a simpler reason: every emitted token is a
sample of p(. | its path), drawn before the tree is looked at. So the output has the target's distribution for any tree,
and the tree only decides how many tokens one forward yields.
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
        nodes: the accepted nodes, root first. Their KV entries are committed next.
        token_ids: the emitted tokens: the token of each accepted node after the root, then the bonus token.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]


def sample_target_tokens(
    trees: Sequence[tuple[TokenTree, torch.Tensor, Sampler]],
    model: torch.nn.Module | None = None,
    maxima: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> list[list[int] | None]:
    """Computes the target's token at every node of several trees, with one copy from the device to the host.

    Args:
        trees: a triple (tree, logits, sampler) for each sequence, as in :func:`accept_path`.
        model: the target. The error message names it.
        maxima: for each tree, the largest logit of each node and its token, if they are known for the whole batch.

    Returns:
        For each tree, the target's token at each node; None for a tree if :meth:`Sampler.sample_nodes` returns None,
        for example because a processor reads the context.

    Raises:
        NumericalError: a node's logits are NaN.
    """
    maxima = maxima or [logits[: tree.size].max(-1) for tree, logits, _ in trees]
    tokens = [
        argmax[: tree.size] if sampler.is_argmax else sampler.sample_nodes(logits[: tree.size], tree.depths)
        for (tree, logits, sampler), (_, argmax) in zip(trees, maxima, strict=True)
    ]
    # The maximum is NaN if any logit is NaN. A row in which all logits are -inf (all tokens masked) is allowed.
    has_nan = torch.cat([row_max[: tree.size] for (tree, *_), (row_max, _) in zip(trees, maxima, strict=True)]).isnan()
    host_values = iter(torch.cat([has_nan.any()[None].long(), *(t for t in tokens if t is not None)]).tolist())
    if next(host_values):
        raise nan_logits_error(model)
    return [None if t is None else list(islice(host_values, len(t))) for t in tokens]


def accept_path(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    get_prefix: Callable[[], torch.Tensor],
    should_stop: Callable[[int], bool] = lambda token: False,
    target_tokens: Sequence[int] | None = None,
) -> AcceptedPath:
    """Walks down ``tree`` as long as the target's next token is a child, and returns the accepted path.

    Args:
        tree: the verified tree.
        logits: (at least tree.size, vocabulary) raw target logits of the nodes, then of padding. No logit is NaN.
        sampler: processes the logits, and takes the argmax or samples.
        get_prefix: returns the token ids (n,) from the prompt to the root. Called only if there are processors.
        should_stop: called with each emitted token, in order. True ends the walk, so nothing is sampled after an EOS.
        target_tokens: the target's token at each node, from :func:`sample_target_tokens`; None: sample during the walk.
    """
    prefix = None if target_tokens is not None or not len(sampler.processors) else get_prefix()
    no_ids = torch.empty(0, **CPU_INT64)
    node, path, tokens = 0, [0], list[int]()
    while True:
        if target_tokens is not None:
            token = target_tokens[node]
        else:
            context = no_ids if prefix is None else torch.cat([prefix, to_device(tokens, prefix.device, torch.long)])
            token = sampler.sample(context, logits[node])
        tokens.append(token)
        child = None if should_stop(token) else tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    if target_tokens is not None and not sampler.greedy:
        sampler.noise.advance(len(tokens))  # target_tokens were sampled with SampleNoise.peek, which uses up nothing
    return AcceptedPath(tuple(path), tuple(tokens))
