"""OPT-Tree: the tree with the longest expected acceptance that the draft knows of (Wang et al. 2025, section 3).

A node is accepted with about the probability that the draft gives its path, so a tree's expected accepted length is the
sum of its nodes' path probabilities, and the best tree of N nodes are the N most probable paths. The root's N most
probable tokens are the first level; the children of a level's nodes are the next one's candidates. The expectation of
the best N so far grows with each level: drafting goes on for as long as it grows by more than a threshold, the price of
a draft forward in tokens. So a tree is wide where the draft hesitates, and deep where it is sure.

A node that the N best candidates so far leave behind, or that only ties with the last of them, has no descendant among
the best: it is not shown to the draft. The host waits for the device once a level, to know who goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.trees.beam import Expand, Level, Scored, best_nodes, best_of, children, root_level, trees
from longdraft.trees.tree import TokenTree

# SpecExtend, appendix D.
NODES, DEPTH, THRESHOLD = 50, 10, 0.7
# Nodes of a level that go on at most; the paper's are as many as the tree has.
TOP_K = 10


def opt(
    roots: Sequence[int],
    expand: Expand,
    nodes: int = NODES,
    depth: int = DEPTH,
    threshold: float = THRESHOLD,
    top_k: int = TOP_K,
    depths: Sequence[int] | None = None,
    *,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """An OPT-Tree for each sequence of a batch; none depends on the others.

    Args:
        roots: token id of each root.
        expand: the draft. Called with the roots, then with the nodes of each level but the last that go on.
        nodes: drafted nodes of a tree, the root not counted.
        depth: levels at most, and so calls of the draft.
        threshold: another level only where the last one made the tree's expected accepted length longer by more.
        top_k: nodes of a level that go on at most; ``nodes`` of them, the paper's number, look at everything.
        depths: levels of each sequence's tree, at most ``depth``, 0 for a root alone; None: all.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        device: where the draft's logits are.
    """
    depths = [depth] * len(roots) if depths is None else depths
    shown = root_level(roots, device)
    # (B', up to N) scores of the best candidates so far, the best first.
    best = shown.scores[:, :0]
    expected = [0.0] * len(roots)
    going = [row for row, own in enumerate(depths) if own > 0]
    pool: list[Scored] = []
    while going:
        best = torch.stack([best[shown.level.rows.index(row)] for row in going])
        shown = shown.kept(going)
        level, _ = best_of(children(shown, expand(shown.level), nodes, ids), nodes)
        pool.append(level)
        deeper = [row for row in going if depths[row] > level.level.depth]
        if not deeper:
            break
        best = torch.cat([best, level.scores], dim=1)
        best = best.topk(min(nodes, best.shape[1]), dim=-1).values
        # Where there are fewer candidates than nodes, all of them may have children that get in.
        hopeful = level.scores > (best[:, -1:] if best.shape[1] == nodes else float("-inf"))
        lengths, counts = torch.stack([best.exp().sum(1), hopeful.float().sum(1)]).tolist()
        width = 0
        grown = dict(zip(going, zip(lengths, counts, strict=True), strict=True))
        going = []
        for row in deeper:
            length, count = grown[row]
            if count and length - expected[row] > threshold:
                going.append(row)
                width = max(width, min(top_k, int(count)))
            expected[row] = length
        shown = _first(level, width)
    return [best_nodes(tree, nodes) for tree in trees(roots, pool)]


def _first(scored: Scored, width: int) -> Scored:
    """The first nodes of each row. They keep their places, so that their children know them by these."""
    level = scored.level
    fewer = Level(level.rows, level.depth, level.tokens[:, :width], level.parents[:, :width])
    return Scored(fewer, scored.log_probs[:, :width], scored.scores[:, :width])
