"""Options that shape a draft tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longdraft.options import Options, option

if TYPE_CHECKING:
    from longdraft.trees.kind import TreeKind

KINDS = ("chain", "static", "beam", "dynamic", "opt")
_WIDE = ("beam", "static")  # kinds with widths


@dataclass(frozen=True)
class TreeOptions(Options):
    """The shape of a draft tree. None: not given."""

    tree: str | None = option(
        choices=KINDS,
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

    def kind(self, default: str, depth: int | None = None) -> TreeKind:
        """Returns the kind of tree that the options describe.

        Args:
            default: the kind of tree if neither ``tree`` nor an option that only one kind has says which.
            depth: levels of a dynamic tree by default.

        Raises:
            ValueError: options of two kinds together, or sizes that make no tree.
        """
        from longdraft.trees import kind  # here, because it imports torch

        given: dict[str, Any] = self.given()
        chosen_by_user = bool(given)
        tree = given.pop("tree", None) or _implied(default, given)
        _check_of_one_kind(tree, given)
        if tree == "dynamic" and depth is not None:
            given.setdefault("depth", depth)
        made: kind.TreeKind = getattr(kind, tree)(**given)
        return replace(made, chosen_by_user=chosen_by_user)


def _implied(default: str, given: Collection[str]) -> str:
    if "widths" in given:
        return "static" if default == "static" else "beam"
    if "threshold" in given:
        return "opt"
    grown = ("depth" in given and default in _WIDE) or ("top_k" in given and default in (*_WIDE, "chain"))
    return "dynamic" if grown else default


def _check_of_one_kind(tree: str, given: Collection[str]) -> None:
    """Raises ValueError for an option that this kind of tree does not have."""
    if tree == "chain" and "top_k" in given:
        raise ValueError("top_k shapes a dynamic tree or an opt tree; a chain takes depth")
    if tree in _WIDE and (wrong := [name for name in ("depth", "top_k") if name in given]):
        raise ValueError(f"{' and '.join(wrong)} shape a dynamic tree or an opt tree; a {tree} tree takes widths")
    if tree not in _WIDE and "widths" in given:
        right = "depth" if tree == "chain" else "depth and top_k"
        raise ValueError(f"widths shape a beam tree; tree {tree!r} takes {right}")
    if tree != "opt" and "threshold" in given:
        raise ValueError(f"threshold shapes an opt tree, not a {tree} one: give tree='opt', or leave it out")
