"""Options that shape a draft tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longdraft.options import Options, option

if TYPE_CHECKING:
    from longdraft.trees.kind import TreeConfig

# The kinds of trees, and the options that shape each beside ``nodes``.
TREE_TYPES = {
    "chain": ("depth",),
    "static": ("widths",),
    "beam": ("widths",),
    "dynamic": ("depth", "top_k"),
    "opt": ("depth", "top_k", "threshold"),
}


@dataclass(frozen=True)
class TreeOptions(Options):
    """The shape of a draft tree. None: not given."""

    tree: str | None = option(
        choices=tuple(TREE_TYPES),
        help="the kind of tree",
        usual="beam (longspec), static (heads), chain (self), opt (with retrieval), else dynamic",
    )
    widths: tuple[int, ...] | None = option(
        min=1,
        help="a beam tree: drafted nodes of each level; a static tree: children of each node, level by level",
        usual="4,16,16,16,16 (longspec)",
    )
    nodes: int | None = option(
        min=1, help="verify only so many drafted nodes, the best", usual="all; 59 of a dynamic tree, 50 of an opt tree"
    )
    depth: int | None = option(
        min=1,
        help="a dynamic or opt tree: its levels, at most; a chain: its tokens",
        usual="8 (EAGLE-1 and 2: 6); 10 of an opt tree, 4 of a chain",
    )
    top_k: int | None = option(
        min=1,
        help="a dynamic or opt tree: nodes of a level that go on; of a dynamic one, children of each too",
        usual="10",
    )
    threshold: float | None = option(
        min=0,
        help="an opt tree: another level only if the last one promised so many more accepted tokens",
        usual="0.7",
    )

    def kind(self, default: str, depth: int | None = None) -> TreeConfig:
        """Returns the kind of tree that the options describe.

        Args:
            default: the kind of tree if neither ``tree`` nor an option that only one kind has says which.
            depth: levels of a dynamic tree by default.

        Raises:
            ValueError: options of two kinds together, or sizes that make no tree.
        """
        from longdraft.trees import kind  # here, because it imports torch

        given: dict[str, Any] = self.given()
        is_user_defined = bool(given)
        tree = given.pop("tree", None) or _implied(default, given)
        if wrong := [name for name in given if name not in ("nodes", *TREE_TYPES[tree])]:
            raise ValueError(
                f"{' and '.join(wrong)} do not shape a tree {tree!r}: it takes {', '.join(TREE_TYPES[tree])}"
            )
        if tree == "dynamic" and depth is not None:
            given.setdefault("depth", depth)
        made: kind.TreeConfig = getattr(kind, tree)(**given)
        return replace(made, is_user_defined=is_user_defined)


def _implied(default: str, given: Collection[str]) -> str:
    """The kind that options without ``tree`` describe."""
    if "widths" in given:
        return "static" if default == "static" else "beam"
    if "threshold" in given:
        return "opt"
    other = [name for name in ("depth", "top_k") if name in given and name not in TREE_TYPES[default]]
    return "dynamic" if other else default
