"""Beam tree: level by level, the most probable continuations of the level before (LongSpec, section 3.3).

The first level are the root's most probable tokens; the next one the best of (nodes of this level x vocabulary) by
cumulative log-probability, and so on. Only the last finished level is expanded, and a node that is not expanded
further stays as a leaf. The last level is never shown to the draft: D levels cost D draft forwards.

Everything stays in tensors until the tree is complete, so a GPU is waited for once a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longdraft.attention.transfer import on_device
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, for those sequences of a batch that go on: B' rows of W nodes.

    Attributes:
        rows: which sequence of the batch each row belongs to, host integers.
        depth: 0 for the roots, one node each.
        tokens: (B', W) target ids.
        parents: (B', W) each node's parent, as an index into its row of the level before; 0 at depths 0 and 1.
    """

    rows: tuple[int, ...]
    depth: int
    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True)
class Scored:
    """A level with each node's log-probability given its path, and summed over the path; float32 (B', W)."""

    level: Level
    log_probs: torch.Tensor
    scores: torch.Tensor

    def kept(self, rows: Sequence[int]) -> Scored:
        """These sequences alone."""
        level = self.level
        if tuple(rows) == level.rows:
            return self
        places = [level.rows.index(row) for row in rows]

        def pick(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[i] for i in places])  # an index tensor would have to travel to the device

        smaller = Level(tuple(rows), level.depth, pick(level.tokens), pick(level.parents))
        return Scored(smaller, pick(self.log_probs), pick(self.scores))


# A score for what is not a number: below all others, and sums of it can still be compared.
_HOPELESS = -1e9
# Told a level, gives the draft's logits (B', W, draft vocabulary) of the tokens that follow its nodes.
Expand = Callable[[Level], torch.Tensor]


def beam(
    roots: Sequence[int],
    expand: Expand,
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    *,
    nodes: int | None = None,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """A beam tree for each sequence of a batch.

    Args:
        roots: token id of each root.
        expand: the draft. Called with the roots, then with each level but the last.
        widths: nodes of each level, fewer where the vocabulary has no more.
        depths: levels of each sequence's tree, at most ``len(widths)``, 0 for a root alone; None: all.
        nodes: keep this many drafted nodes of each tree, the best by cumulative log-probability.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        device: where the draft's logits are.
    """
    depths = [len(widths)] * len(roots) if depths is None else depths
    last = root_level(roots, device)
    levels: list[Scored] = []
    for depth, width in enumerate(widths):
        if not (rows := [r for r in last.level.rows if depths[r] > depth]):
            break
        last = last.kept(rows)
        # No more than `width` children of one node can be among the best: the rest of the vocabulary is never sorted.
        last, _ = best_of(children(last, expand(last.level), width, ids), width)
        levels.append(last)
    return [best_nodes(tree, nodes) for tree in trees(roots, levels)]


def root_level(roots: Sequence[int], device: torch.device | str) -> Scored:
    """The roots, one node a sequence."""
    zeros = torch.zeros(len(roots), 1, device=device)
    tokens = on_device(roots, device)[:, None]
    return Scored(Level(tuple(range(len(roots))), 0, tokens, torch.zeros_like(tokens)), zeros, zeros)


def children(last: Scored, logits: torch.Tensor, count: int, ids: torch.Tensor | None) -> Scored:
    """The ``count`` most probable children of each node, W times as many in a level. Logits (B', W, V), temperature 1.

    Their ``parents`` are indices into ``last``.
    """
    logits = logits.float()
    best, token = logits.topk(min(count, logits.shape[-1]), dim=-1)
    # Rounding must not lift a child above its parent: the best nodes would not be closed under parents. Nor must a
    # draft that overflowed leave numbers that cannot be compared: it proposes badly, that is all.
    log_probs = (best - logits.logsumexp(-1, keepdim=True)).nan_to_num(nan=_HOPELESS).clamp(max=0.0)
    scores = (last.scores[..., None] + log_probs).flatten(1)
    tokens = token.flatten(1) if ids is None else ids[token.flatten(1)]
    parents = torch.arange(token.shape[1], device=token.device).repeat_interleave(token.shape[2]).expand_as(tokens)
    level = Level(last.level.rows, last.level.depth + 1, tokens, parents)
    return Scored(level, log_probs.flatten(1), scores)


def best_of(scored: Scored, width: int) -> tuple[Scored, torch.Tensor]:
    """The ``width`` nodes of a level with the best scores, the best first, and (B', W) which they were."""
    scores, chosen = scored.scores.topk(min(width, scored.scores.shape[1]), dim=-1)
    tokens, parents = scored.level.tokens.gather(1, chosen), scored.level.parents.gather(1, chosen)
    level = Level(scored.level.rows, scored.level.depth, tokens, parents)
    return Scored(level, scored.log_probs.gather(1, chosen), scores), chosen


def trees(roots: Sequence[int], levels: Sequence[Scored]) -> list[TokenTree]:
    """Levels to trees on the host. The one place that waits for the device."""
    if not levels:
        return [TokenTree((root,), (-1,), (0.0,)) for root in roots]
    whole = torch.cat([torch.stack([x.level.tokens, x.level.parents]).flatten() for x in levels])
    # The floats travel as what their bits are as integers: one transfer.
    bits = torch.cat([x.log_probs.flatten() for x in levels]).view(torch.int32)
    fetched = torch.cat([whole, bits]).cpu()
    numbers = fetched[: len(whole)].tolist()
    floats = fetched[len(whole) :].int().view(torch.float32).tolist()
    tokens, parents, log_probs = [[root] for root in roots], [[-1] for _ in roots], [[0.0] for _ in roots]
    at = 0
    above = [0] * len(roots)  # index of the first node of each sequence's last level
    for scored in levels:
        rows, width = scored.level.rows, scored.scores.shape[1]
        count = len(rows) * width
        for i, row in enumerate(rows):
            first = len(tokens[row])
            here = 2 * at + i * width
            tokens[row] += numbers[here : here + width]
            parents[row] += [above[row] + p for p in numbers[here + count : here + count + width]]
            log_probs[row] += floats[at + i * width : at + (i + 1) * width]
            above[row] = first
        at += count
    return [TokenTree(tuple(t), tuple(p), tuple(x)) for t, p, x in zip(tokens, parents, log_probs, strict=True)]


def best_nodes(tree: TokenTree, nodes: int | None) -> TokenTree:
    """The tree's best drafted nodes by cumulative log-probability; with a node always its ancestors."""
    if nodes is None or tree.drafted <= nodes:
        return tree
    scores = tree.path_log_probs
    # A child never scores above its parent; of equal ones the parent comes first, for sorting keeps their order.
    kept = [0, *sorted(sorted(range(1, tree.size), key=lambda i: -scores[i])[:nodes])]
    new = {old: i for i, old in enumerate(kept)} | {-1: -1}
    return TokenTree(
        tuple(tree.tokens[i] for i in kept),
        tuple(new[tree.parents[i]] for i in kept),
        tuple(tree.log_probs[i] for i in kept) if tree.log_probs else (),
    )
