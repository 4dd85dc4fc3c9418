"""Drafts for tests of trees, and every kind of tree grown from its definition, by looking at every candidate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from longdraft.trees.level import LevelExpander, TreeLevel, logits_or_topk
from longdraft.trees.tree import TokenTree
from longdraft.trees.tree_config import TreeConfig

VOCABULARY = 7
Path = tuple[int, ...]


def expander(draft_logits: Callable[[TreeLevel], torch.Tensor], ids: torch.Tensor | None = None) -> LevelExpander:
    """An expander of a draft that says the logits of all children; ids: of the draft's tokens in the target."""
    return LevelExpander(lambda level, k: logits_or_topk(draft_logits(level), k), draft_to_target_ids=ids)


class Table:
    """A draft whose logits depend on the path: a fixed random row for each sequence and path."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        self.seed, self.vocabulary = seed, vocabulary
        self.paths: dict[int, list[Path]] = {}
        self.calls: list[TreeLevel] = []

    def row(self, sequence: int, path: Path) -> torch.Tensor:
        g = torch.Generator().manual_seed(hash((self.seed, sequence, path)) % 2**31)
        return 2 * torch.randn(self.vocabulary, generator=g)

    def logprobs(self, sequence: int, path: Path) -> list[float]:
        return torch.log_softmax(self.row(sequence, path), -1).tolist()

    @property
    def expander(self) -> LevelExpander:
        return expander(self.draft_logits)

    def draft_logits(self, level: TreeLevel) -> torch.Tensor:
        self.calls.append(level)
        out = []
        for i, sequence in enumerate(level.sequence_indices):
            above = self.paths.get(sequence)
            tokens, parents = level.tokens[i].tolist(), level.parents[i].tolist()
            self.paths[sequence] = [(above[p] if above else ()) + (t,) for t, p in zip(tokens, parents, strict=True)]
            out.append(torch.stack([self.row(sequence, path) for path in self.paths[sequence]]))
        return torch.stack(out)


def certain(*chances: float):
    """A draft that gives token 1 this probability, whatever came before; for each sequence its own."""

    def expand(level: TreeLevel) -> torch.Tensor:
        rows = []
        for sequence in level.sequence_indices:
            p = chances[sequence % len(chances)]
            row = torch.full((VOCABULARY,), math.log((1 - p) / (VOCABULARY - 1)))
            row[1] = math.log(p)
            rows.append(row.expand(level.tokens.shape[1], -1))
        return torch.stack(rows)

    return expander(expand)


def scores(tree: TokenTree) -> dict[Path, float]:
    """Path -> cumulative log-probability, of all drafted nodes."""
    return {tuple(tree.tokens[i] for i in tree.path(n)): tree.path_logprobs[n] for n in range(1, tree.size)}


def best(paths: dict[Path, float], count: int | None) -> dict[Path, float]:
    return dict(sorted(paths.items(), key=lambda item: -item[1])[:count])


def by_definition(
    kind: TreeConfig, table: Table, sequence: int, root: int, depth: int, ids: list[int] | None = None
) -> tuple[dict[Path, float], int]:
    """The scores of the tree's nodes, and its levels.

    Args:
        depth: levels at most.
    """
    pool: dict[Path, float] = {}
    expanded = {(root,): 0.0}
    expected, levels = 0.0, 0
    while levels < depth:
        branching = {
            path: {(*path, ids[i] if ids else i): score + x for i, x in enumerate(table.logprobs(sequence, path))}
            for path, score in expanded.items()
        }
        width = kind.branching[levels]
        if kind.name in ("beam", "opt"):
            new = best({k: v for children in branching.values() for k, v in children.items()}, width)
        else:
            new = {k: v for children in branching.values() for k, v in best(children, width).items()}
        expanded = best(new, kind.top_k) if kind.name in ("dynamic", "opt") else new
        pool |= new
        levels += 1
        if (
            kind.name == "chain"
            and kind.min_expected_gain > 0
            and max(new.values()) <= math.log(kind.min_expected_gain)
        ):
            break
        if kind.name == "opt":
            before, expected = expected, sum(map(math.exp, best(pool, kind.nodes).values()))
            if expected - before <= kind.threshold:
                break
    return best(pool, kind.max_nodes), levels
