"""Kinds of trees: how they grow from a draft level by level, their sizes, and the sizes that a planner gives them.

All grow alike: the nodes of a level that are expanded get their most probable children, and those are the next level.
The kinds differ in four numbers: children of a node, nodes that a level keeps, nodes of it that are expanded, and where
they stop. Of all that was drafted, the most probable nodes by cumulative log-probability are verified; they are closed
under parents, for a score only falls along a path. The last level is never expanded: D levels cost D draft forwards.

* beam: a level keeps its best nodes, and all of them are expanded (LongSpec, appendix E);
* static: all nodes of a level have the same number of children (TokenSwift);
* dynamic: the ``top_k`` best nodes of a level have ``top_k`` children each, and all children are candidates: wide where
  the draft hesitates, deep where it is sure (EAGLE-2, section 4; EAGLE-3 keeps it);
* chain: first choices, ended where the draft grows unsure (MagicDec's gamma, Sadhukhan et al. 2024, section 3);
* opt: OPT-Tree, the tree with the longest expected acceptance (Wang et al. 2025, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import torch

from longdraft.attention.transfer import AsyncHostCopy
from longdraft.trees.level import Calibrate, CoupledLogprobs, DraftLogits, DraftTopk, TreeLevel, root_level, to_trees
from longdraft.trees.level import expand_level as children_of
from longdraft.trees.level import topk_logprobs as likeliest_of
from longdraft.trees.tree import NodeLimit, TokenTree

# LongSpec, appendix E.
BEAM = (4, 16, 16, 16, 16)
# TokenSwift's widths, without its first level, which is the target's own token.
STATIC = (3, 3, 3)
# EAGLE-3's dynamic tree: levels, nodes of a level that are expanded, and drafted nodes (its 60 count the root).
DYNAMIC = (8, 10, 59)
# SpecExtend's OPT-Tree, appendix D: nodes, levels, threshold. The paper expands all nodes of a level; here it is 10.
OPT, OPT_TOP_K = (50, 10, 0.7), 10
# Tokens of a chain by default, and at most if a planner ends it.
CHAIN_LENGTH, MAX_CHAIN_LENGTH = 4, 12


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """A kind of tree with its sizes.

    Attributes:
        name: what options call it.
        branching: of an expanded node, level by level; fewer if the vocabulary has no more.
        prune_levels: a level keeps no more nodes than one node has children, the best; else all.
        top_k: nodes of a level that are expanded at most, the best; None: all.
        nodes: drafted nodes that are verified, the most probable ones; None: all.
        min_expected_gain: of a chain: it ends with the first token whose path is no likelier than this.
        max_chain_length: of a chain: tokens at most if a planner ends it.
        threshold: of an OPT-Tree: tokens by which a level has to lengthen the expected acceptance for another one to
            follow; None: levels follow whatever they promise.
        is_user_defined: whether the user chose the tree, so that a planner leaves it as it is.
    """

    name: str
    branching: tuple[int, ...]
    prune_levels: bool = False
    top_k: int | None = None
    nodes: int | None = None
    min_expected_gain: float = 0.0
    max_chain_length: int = MAX_CHAIN_LENGTH
    threshold: float | None = None
    is_user_defined: bool = False

    @property
    def depth(self) -> int:
        """Levels at most, and so forwards of the draft."""
        return len(self.branching)

    @property
    def max_candidates(self) -> int:
        """Drafted nodes at most, before the most probable of them are chosen."""
        return sum(size for size, _ in self._sizes())

    @property
    def max_expanded_nodes(self) -> int:
        """Drafted nodes that the draft expands in a round at most: rows of KV that it needs for a tree."""
        return sum(expanded for _, expanded in list(self._sizes())[:-1])

    @property
    def max_nodes(self) -> int:
        """Drafted nodes of a tree at most."""
        return min(self.max_candidates, self.nodes or self.max_candidates)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """For each level its nodes, and those of them that may be expanded."""
        expanded = 1
        for branching in self.branching:
            size = branching if self.prune_levels else expanded * branching
            expanded = size if self.top_k is None else min(size, self.top_k)
            yield size, expanded

    def limit_depth(self, max_depth: int) -> TreeConfig:
        """Returns the same kind with at most ``max_depth`` levels."""
        return replace(
            self, branching=self.branching[:max_depth], max_chain_length=min(self.max_chain_length, max_depth)
        )

    def fit(self, limit: NodeLimit | None) -> TreeConfig:
        """Returns the tree to grow within a planner's limit: a chain, or in place of any other kind an OPT-Tree.

        Without a limit, or if the user chose it, it is this one.
        """
        if limit is None or self.is_user_defined:
            return self
        if self.name == "chain":
            return replace(
                self,
                branching=(1,) * max(1, min(self.max_chain_length, limit.max_nodes)),
                min_expected_gain=limit.min_expected_gain,
            )
        nodes = max(1, min(self.max_nodes, OPT[0], limit.max_nodes))
        return opt(nodes, self.depth, limit.min_expected_gain, self.top_k if self.name == "opt" else OPT_TOP_K)

    def grow(
        self,
        roots: Sequence[int],
        draft_logits: DraftLogits,
        max_depths: Sequence[int] | None = None,
        ids: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        *,
        likeliest: DraftTopk | None = None,
        coupled_logprobs: CoupledLogprobs | None = None,
        calibrate: Calibrate | None = None,
    ) -> list[TokenTree]:
        """Grows a tree for each sequence of a batch; none depends on the others.

        Args:
            roots: token id of each root.
            draft_logits: the draft. Called with the roots, then with the nodes of each level but the last that are expanded.
            max_depths: levels of each sequence's tree at most, 0 for a root alone; None: as many as the kind has.
            ids: (draft vocabulary,) target id of each draft id; None: they are the same.
            device: where the draft's logits are.
            likeliest: used in place of ``draft_logits`` by a draft that finds the likeliest tokens without computing logits.
            coupled_logprobs: used if tokens are sampled and the random numbers are known; None: the draft's probabilities count.
            calibrate: corrects the draft's probabilities by how they fared; None: they count as they are.
        """
        deepest = min(self.depth, self.max_nodes)  # a deeper node has more ancestors than there are nodes to keep
        max_depths = [deepest] * len(roots) if max_depths is None else [min(deepest, depth) for depth in max_depths]
        find = likeliest or (lambda level, count: likeliest_of(draft_logits(level), count))
        expanded, levels = root_level(roots, device), list[TreeLevel]()
        # (B', W): the places of the expanded nodes in their level, where they are only some of it.
        places: torch.Tensor | None = None
        promise = None if self.threshold is None else _Promise(self, self.threshold, expanded)
        going = [row for row in expanded.sequence_indices if max_depths[row]]
        while going:
            of, count = expanded.index_select, self.branching[len(levels)]
            level = children_of(expanded.select(going), count, find, ids, coupled_logprobs, calibrate)
            if self.prune_levels:
                level, _ = level.topk(count)
            # In the tree, parents are nodes of the whole level above, not only of those that were expanded.
            above = None if places is None else of(going, places).gather(1, level.parents)
            levels.append(level if above is None else replace(level, parents=above))
            going, width = [row for row in going if max_depths[row] > level.depth], self.top_k
            if self.min_expected_gain > 0 and going:
                likely = dict(zip(level.sequence_indices, level.path_logprobs[:, 0].tolist(), strict=True))
                going = [row for row in going if likely[row] > log(self.min_expected_gain)]
            elif promise is not None and going:
                going, width = promise.after(level, of, going)
            expanded, places = (level, None) if width is None else level.topk(width)
        return [tree.keep_best(self.max_nodes) for tree in to_trees(roots, levels)]


# Picks the rows of a tensor for these sequences.
Pick = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


class _Promise:
    """Whether another level of an OPT-Tree pays, and how many nodes of the last one may have children in the tree.

    A node is accepted with about the probability that the draft gives its path, so a tree's expected accepted length is
    the sum of its nodes' path probabilities, and the best tree of N nodes holds the N most probable paths. Drafting
    goes on while a level makes the expectation of the best N so far longer by more than the threshold: the price of a
    draft forward in tokens. A node that is not better than the N-th best candidate so far has no descendant among the
    best, and need not be expanded.

    The host decides this. A GPU does not wait for it: while it computes a level, the host reads what the level before
    it promised. So a tree there may have one level more than it would elsewhere, and expands as many nodes as it may.
    """

    def __init__(self, kind: TreeConfig, threshold: float, roots: TreeLevel) -> None:
        self._nodes, self._top_k, self._threshold = kind.max_nodes, kind.top_k or kind.max_nodes, threshold
        self._best = roots.path_logprobs[:, :0]  # (B', up to N) scores of the best candidates so far, the best first
        self._expected = [0.0] * len(roots.sequence_indices)
        self._late = roots.path_logprobs.device.type != "cpu"
        self._waiting: tuple[Sequence[int], AsyncHostCopy] | None = None

    def after(self, level: TreeLevel, of: Pick, deeper: list[int]) -> tuple[list[int], int]:
        """Takes a level.

        Args:
            of: picks from the rows of the level before.
            deeper: the sequences that may have another level.

        Returns:
            Those for which it pays, and the number of nodes to expand.
        """
        best = torch.cat([of(level.sequence_indices, self._best), level.path_logprobs], dim=1)
        self._best = best = best.topk(min(self._nodes, best.shape[1]), dim=-1).values
        # With fewer candidates than nodes, all of them may have children among the best.
        promising = level.path_logprobs > (best[:, -1:] if best.shape[1] == self._nodes else float("-inf"))
        promised = level.sequence_indices, AsyncHostCopy(torch.stack([best.exp().sum(1), promising.float().sum(1)]))
        read, self._waiting = (self._waiting, promised) if self._late else (promised, None)
        if read is None:  # the first level of a GPU
            return deeper, self._top_k
        results = dict(zip(read[0], zip(*read[1].tolist(), strict=True), strict=True))
        going, width = list[int](), self._top_k if self._late else 0
        for row in deeper:
            length, count = results[row]
            if count and length - self._expected[row] > self._threshold:
                going.append(row)
                width = max(width, min(self._top_k, int(count)))
            self._expected[row] = length
        return going, width


def beam(widths: Sequence[int] = BEAM, nodes: int | None = None) -> TreeConfig:
    """A beam tree. ``widths``: nodes of each level."""
    return TreeConfig(name="beam", branching=tuple(widths), prune_levels=True, nodes=nodes)


def static(widths: Sequence[int] = STATIC, nodes: int | None = None) -> TreeConfig:
    """A tree of a fixed shape. ``widths``: children of each node, level by level."""
    return TreeConfig(name="static", branching=tuple(widths), nodes=nodes)


def dynamic(depth: int = DYNAMIC[0], top_k: int = DYNAMIC[1], nodes: int | None = DYNAMIC[2]) -> TreeConfig:
    """A dynamic tree. ``top_k``: nodes of a level that are expanded, and children of each."""
    return TreeConfig(name="dynamic", branching=(top_k,) * depth, top_k=top_k, nodes=nodes)


def chain(depth: int = CHAIN_LENGTH, max_chain_length: int = MAX_CHAIN_LENGTH, nodes: int | None = None) -> TreeConfig:
    """The draft's first choices."""
    return TreeConfig(name="chain", branching=(1,) * depth, max_chain_length=max_chain_length, nodes=nodes)


def opt(
    nodes: int = OPT[0], depth: int = OPT[1], threshold: float = OPT[2], top_k: int | None = OPT_TOP_K
) -> TreeConfig:
    """An OPT-Tree. ``top_k``: nodes of a level that are expanded at most; with ``nodes``, nothing is missed."""
    return TreeConfig(
        name="opt", branching=(nodes,) * depth, prune_levels=True, top_k=top_k, nodes=nodes, threshold=threshold
    )
