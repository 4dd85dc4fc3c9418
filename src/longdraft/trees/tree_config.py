"""Shapes of draft trees: how a draft grows a tree level by level, and the size that a planner gives the tree.

To expand a node is to draft its most probable children. The children of a level's expanded nodes are the next level.
The last level is not expanded, so D levels cost D draft forwards. The nodes with the largest path log-probabilities are
verified. They form a tree, because path log-probabilities fall from parent to child. The presets:

* beam: each level keeps its best nodes, and expands all of them (LongSpec, appendix E);
* static: all nodes of a level have the same number of children (TokenSwift);
* dynamic: each level expands its ``top_k`` best nodes into ``top_k`` children each, so that the tree is wide where the
  draft is unsure, and deep where the draft is sure (EAGLE-2, section 4; also EAGLE-3);
* chain: the top-1 tokens; a planner ends the chain where the draft is unsure (as MagicDec's gamma, section 3);
* opt: OPT-Tree, the tree with the longest expected acceptance (Wang et al. 2025, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import torch

from longdraft.attention.transfer import AsyncHostCopy
from longdraft.trees.level import LevelExpander, TreeLevel, root_level, to_trees
from longdraft.trees.tree import NodeLimit, TokenTree

BEAM = (4, 16, 16, 16, 16)  # LongSpec, appendix E: nodes of each level
STATIC = (3, 3, 3)  # TokenSwift: children of each node, after a first level that the target itself drafts
# EAGLE-3's dynamic tree. The paper counts 60 nodes, with the root.
DYNAMIC_DEPTH, DYNAMIC_TOP_K, DYNAMIC_NODES = 8, 10, 59
# SpecExtend's OPT-Tree, appendix D. The paper expands all nodes of a level; expanding 10 of them costs less.
OPT_NODES, OPT_DEPTH, OPT_THRESHOLD, OPT_TOP_K = 50, 10, 0.7, 10
FIXED_NODES = (8, 16, 32)  # draft nodes of trees of a fixed shape, below the maximum
CHAIN_LENGTH, MAX_CHAIN_LENGTH = 4, 12  # tokens of a chain by default, and at most if a planner ends it


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The shape of a draft tree.

    Attributes:
        name: name of the preset.
        branching: for each level, the number of children of each expanded node of the level before.
        prune_levels: True: a level keeps only as many nodes as its entry of ``branching`` says, the best ones.
        top_k: maximum number of expanded nodes of a level, the best ones; None: all.
        nodes: maximum number of draft nodes to verify, the most probable ones; None: all.
        min_expected_gain: a chain ends at the first token that adds no more expected accepted tokens than this.
        max_chain_length: maximum number of tokens of a chain whose end a planner chooses.
        threshold: expected accepted tokens that a level must add. An OPT-Tree ends at a level that does not add more.
        is_user_defined: True: the user chose the shape, so a planner does not change it.
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
        """Maximum number of levels, which is the maximum number of draft forwards."""
        return len(self.branching)

    @property
    def max_candidates(self) -> int:
        """Maximum number of nodes that are drafted, before the most probable ones are selected."""
        return sum(size for size, _ in self._level_sizes())

    @property
    def max_expanded_nodes(self) -> int:
        """Maximum number of draft nodes that are expanded. The draft needs as many KV entries for a tree."""
        return sum(num_expanded for _, num_expanded in list(self._level_sizes())[:-1])

    @property
    def max_nodes(self) -> int:
        """Maximum number of draft nodes of a finished tree."""
        return min(self.max_candidates, self.nodes or self.max_candidates)

    @property
    def is_fixed(self) -> bool:
        """True if every tree has all levels, so that no log-probability decides when a tree ends."""
        return self.threshold is None and self.min_expected_gain == 0

    def _level_sizes(self) -> Iterator[tuple[int, int]]:
        """Yields for each level the number of nodes, and how many of these nodes may be expanded."""
        num_expanded = 1
        for children in self.branching:
            size = children if self.prune_levels else num_expanded * children
            num_expanded = size if self.top_k is None else min(size, self.top_k)
            yield size, num_expanded

    def limit_depth(self, max_depth: int) -> TreeConfig:
        """Returns the same shape with at most ``max_depth`` levels."""
        length = min(self.max_chain_length, max_depth)
        return replace(self, branching=self.branching[:max_depth], max_chain_length=length)

    def fit(self, limit: NodeLimit | None) -> TreeConfig:
        """Returns the shape to grow within a planner's limit: a chain stays a chain, other trees become an OPT-Tree.
        Returns this shape unchanged if there is no limit, or if the user chose the shape."""
        if limit is None or self.is_user_defined:
            return self
        if self.name == "chain":
            length = max(1, min(self.max_chain_length, limit.max_nodes))
            return replace(self, branching=(1,) * length, min_expected_gain=limit.min_expected_gain)
        nodes = max(1, min(self.max_nodes, OPT_NODES, limit.max_nodes))
        return opt(nodes, self.depth, limit.min_expected_gain, self.top_k if self.name == "opt" else OPT_TOP_K)

    def as_fixed(self, max_nodes: int) -> TreeConfig:
        """Returns a shape of which every tree has all levels, for about ``max_nodes`` draft nodes: this one if it
        :attr:`is_fixed`, or else an OPT-Tree without a threshold. Sizes are few, because each takes a CUDA graph."""
        if self.is_fixed:
            return self
        nodes = min(self.max_nodes, next((n for n in FIXED_NODES if n >= max_nodes), self.max_nodes))
        top_k = self.top_k if self.name == "opt" else OPT_TOP_K
        return replace(opt(nodes, min(self.depth, nodes), top_k=top_k), threshold=None)

    def grow(
        self, roots: Sequence[int], expander: LevelExpander, max_depths: Sequence[int] | None = None
    ) -> list[TokenTree]:
        """Grows a tree for each sequence of a batch. No tree depends on the other sequences.

        Args:
            roots: token id of each root.
            expander: drafts the children of the roots, then of the expanded nodes of each level but the last.
            max_depths: maximum number of levels of each sequence's tree, 0 for a root alone; None: ``depth``.
        """
        depth_limit = min(self.depth, self.max_nodes)  # a deeper path has more nodes than may be verified
        depths = [depth_limit] * len(roots) if max_depths is None else [min(depth_limit, n) for n in max_depths]
        levels = self.grow_levels(root_level(roots, expander.device), expander, depths)
        return [tree.keep_best(self.max_nodes) for tree in to_trees(roots, levels)]

    def grow_levels(self, roots: TreeLevel, expander: LevelExpander, depths: Sequence[int]) -> list[TreeLevel]:
        """Drafts the levels below the roots; ``depths``: number of levels of each sequence's tree. If the shape
        :attr:`is_fixed`, the host reads nothing of the device."""
        expanded, levels = roots, list[TreeLevel]()
        # (B, W) index of each expanded node in its level; None: all nodes of the level are expanded.
        expanded_indices: torch.Tensor | None = None
        stop_rule = None if self.threshold is None else _StopRule(self, self.threshold, roots)
        growing = [i for i in roots.sequence_indices if depths[i]]  # sequences whose trees get another level
        while growing:
            k = self.branching[len(levels)]
            level = expander.expand(expanded.select(growing), k)
            if self.prune_levels:
                level, _ = level.topk(k)
            # Converts ``parents`` from indices into the expanded nodes to indices into all nodes of the level above.
            selected = None if expanded_indices is None else expanded.index_select(growing, expanded_indices)
            levels.append(level if selected is None else replace(level, parents=selected.gather(1, level.parents)))
            growing, num_expanded = [i for i in growing if depths[i] > level.depth], self.top_k
            if self.min_expected_gain > 0 and growing:
                logprobs = dict(zip(level.sequence_indices, level.path_logprobs[:, 0].tolist(), strict=True))
                growing = [i for i in growing if logprobs[i] > log(self.min_expected_gain)]
            elif stop_rule is not None and growing:
                growing, num_expanded = stop_rule.update(level, growing)
            expanded, expanded_indices = (level, None) if num_expanded is None else level.topk(num_expanded)
        return levels


class _StopRule:
    """Decides for which sequences an OPT-Tree gets another level, and how many nodes of the last level are expanded.

    Of all drafted nodes, the best N = ``config.max_nodes`` will be verified. The sum of their path probabilities is the
    expected accepted length. Another level follows if the last level increased this sum by more than the threshold, the
    cost of a draft forward in tokens. A node is promising if it is among the best N. Only promising nodes are expanded,
    because descendants of other nodes cannot be among the best N.

    On a GPU, to avoid a wait, the host decides by the results of the level before the last. So a tree may get one level
    more than on a CPU, and ``top_k`` nodes of each level are expanded.
    """

    def __init__(self, config: TreeConfig, threshold: float, roots: TreeLevel) -> None:
        self._max_nodes, self._top_k, self._threshold = config.max_nodes, config.top_k or config.max_nodes, threshold
        self._last_level = roots
        self._best_logprobs = roots.path_logprobs[:, :0]  # (B, up to N) of the best nodes, sorted; none so far
        self._expected_lengths = [0.0] * len(roots.sequence_indices)
        self._is_delayed = roots.path_logprobs.device.type != "cpu"
        self._pending: tuple[Sequence[int], AsyncHostCopy] | None = None

    def update(self, level: TreeLevel, growing: list[int]) -> tuple[list[int], int]:
        """Adds a level. Returns the sequences that get another level, and the number of nodes to expand.
        ``growing``: the sequences that may get another level."""
        earlier_best = self._last_level.index_select(level.sequence_indices, self._best_logprobs)
        candidates = torch.cat([earlier_best, level.path_logprobs], dim=1)
        best = candidates.topk(min(self._max_nodes, candidates.shape[1]), dim=-1).values
        self._last_level, self._best_logprobs = level, best
        # With fewer than N nodes so far, all nodes are promising.
        is_promising = level.path_logprobs > (best[:, -1:] if best.shape[1] == self._max_nodes else float("-inf"))
        result = level.sequence_indices, AsyncHostCopy(torch.stack([best.exp().sum(1), is_promising.float().sum(1)]))
        ready, self._pending = (self._pending, result) if self._is_delayed else (result, None)
        if ready is None:  # the first level on a GPU
            return growing, self._top_k
        # {sequence index: (expected accepted length, number of promising nodes)}
        results = dict(zip(ready[0], zip(*ready[1].tolist(), strict=True), strict=True))
        continuing, num_expanded = list[int](), self._top_k if self._is_delayed else 0
        for i in growing:
            expected_length, num_promising = results[i]
            if num_promising and expected_length - self._expected_lengths[i] > self._threshold:
                continuing.append(i)
                num_expanded = max(num_expanded, min(self._top_k, int(num_promising)))
            self._expected_lengths[i] = expected_length
        return continuing, num_expanded


def beam(widths: Sequence[int] = BEAM, nodes: int | None = None) -> TreeConfig:
    """Returns a beam tree. ``widths``: number of nodes of each level."""
    return TreeConfig(name="beam", branching=tuple(widths), prune_levels=True, nodes=nodes)


def static(widths: Sequence[int] = STATIC, nodes: int | None = None) -> TreeConfig:
    """Returns a tree of a fixed shape. ``widths``: for each level, the number of children of each parent node."""
    return TreeConfig(name="static", branching=tuple(widths), nodes=nodes)


def dynamic(depth: int = DYNAMIC_DEPTH, top_k: int = DYNAMIC_TOP_K, nodes: int | None = DYNAMIC_NODES) -> TreeConfig:
    """Returns a dynamic tree. ``top_k``: number of expanded nodes of a level, and number of children of each."""
    return TreeConfig(name="dynamic", branching=(top_k,) * depth, top_k=top_k, nodes=nodes)


def chain(depth: int = CHAIN_LENGTH, max_chain_length: int = MAX_CHAIN_LENGTH, nodes: int | None = None) -> TreeConfig:
    """Returns a chain of the draft's top-1 tokens."""
    return TreeConfig(name="chain", branching=(1,) * depth, max_chain_length=max_chain_length, nodes=nodes)


def opt(
    nodes: int = OPT_NODES, depth: int = OPT_DEPTH, threshold: float = OPT_THRESHOLD, top_k: int | None = OPT_TOP_K
) -> TreeConfig:
    """Returns an OPT-Tree. ``top_k``: maximum number of expanded nodes of a level; None: all, as in the paper."""
    return TreeConfig(
        name="opt", branching=(nodes,) * depth, prune_levels=True, top_k=top_k, nodes=nodes, threshold=threshold
    )
