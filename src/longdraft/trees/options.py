"""Options that shape a draft tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longdraft.options import Options, option

if TYPE_CHECKING:
    from longdraft.trees.tree_config import TreeConfig

# {type of tree: names of the options that shape it}. ``nodes`` applies to every type.
TREE_TYPES = {
    "chain": ("depth",),
    "static": ("widths",),
    "beam": ("widths",),
    "dynamic": ("depth", "top_k"),
    "opt": ("depth", "top_k", "threshold"),
}


@dataclass(frozen=True)
class TreeOptions(Options):
    """The shape of a draft tree. None: the default."""

    tree: str | None = option(
        choices=tuple(TREE_TYPES),
        help="the type of tree",
        usual="beam (longspec), static (tokenswift), chain (self), opt (with retrieval), else dynamic",
    )
    widths: tuple[int, ...] | None = option(
        min=1,
        help="beam: draft nodes of each level; static: children of each node, level by level",
        usual="4,16,16,16,16 (longspec)",
    )
    nodes: int | None = option(
        min=1, help="maximum number of draft nodes to verify, the most probable ones", usual="all; dynamic: 59; opt: 50"
    )
    depth: int | None = option(
        min=1,
        help="dynamic, opt: maximum number of levels; chain: number of tokens",
        usual="dynamic: 8 (EAGLE-1 and 2: 6); opt: 10; chain: 4",
    )
    top_k: int | None = option(
        min=1, help="dynamic, opt: nodes of a level that are expanded; dynamic: also the children of each", usual="10"
    )
    threshold: float | None = option(
        min=0,
        help="opt: minimum increase of the expected accepted tokens by a level, for another one to follow",
        usual="0.7",
    )

    def config(self, default: str, depth: int | None = None) -> TreeConfig:
        """Returns the shape of tree that the options describe.

        Args:
            default: type of tree if no option determines the type.
            depth: default number of levels of a dynamic tree; None: the preset's.

        Raises:
            ValueError: the options belong to different types of trees, or a size is out of range.
        """
        from longdraft.trees import tree_config as presets  # imported here, because it imports torch

        options: dict[str, Any] = self.non_none()
        is_user_defined = bool(options)
        tree = options.pop("tree", None) or _implied_type(default, options)
        if wrong := [name for name in options if name not in ("nodes", *TREE_TYPES[tree])]:
            raise ValueError(
                f"a tree of type {tree} takes {', '.join(TREE_TYPES[tree])} and nodes: leave {' and '.join(wrong)} out"
            )
        if tree == "dynamic" and depth is not None:
            options.setdefault("depth", depth)
        config: presets.TreeConfig = getattr(presets, tree)(**options)
        return replace(config, is_user_defined=is_user_defined)


def _implied_type(default: str, names: Collection[str]) -> str:
    """Returns the type of tree that the options describe, if the option ``tree`` is not among them."""
    if "widths" in names:
        return "static" if default == "static" else "beam"
    if "threshold" in names:
        return "opt"
    is_dynamic = any(name in names and name not in TREE_TYPES[default] for name in ("depth", "top_k"))
    return "dynamic" if is_dynamic else default
