"""The kind of tree that a method's options say, checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from longdraft.trees.beam import SAMPLED_WIDTHS, Beam
from longdraft.trees.chain import Chain
from longdraft.trees.dynamic import Dynamic
from longdraft.trees.kind import TreeKind
from longdraft.trees.opt import Opt
from longdraft.trees.static import Static

KINDS: dict[str, type[TreeKind]] = {"chain": Chain, "static": Static, "beam": Beam, "dynamic": Dynamic, "opt": Opt}
_WIDE = ("beam", "static")  # take widths


def tree_kind(
    default: str,
    widths: Sequence[int] | None = None,
    nodes: int | None = None,
    tree: str | None = None,
    depth: int | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> TreeKind:
    """The kind of tree from a method's options, None for those that were not given.

    Args:
        default: kind of tree where neither ``tree`` nor an option of one kind says which.
        widths: nodes of each level of a beam tree; None: the paper's, and others of the same number for sampled text.
            Of a static tree, the children of each node, level by level.
        nodes: verify only this many drafted nodes, the root not counted; None: all of a beam tree or a chain, 59 of a
            dynamic tree, 50 of an OPT-Tree.
        tree: "chain", "beam", "dynamic", "opt" or "static"; None: what the options given are of, else ``default``.
        depth, top_k: of a dynamic tree or an OPT-Tree; ``depth`` of a chain too.
        threshold: of an OPT-Tree: tokens by which a level has to make the expected accepted length longer.

    Raises:
        ValueError: sizes that make no tree, or options of two kinds together.
    """
    options = {"widths": widths, "nodes": nodes, "depth": depth, "top_k": top_k, "threshold": threshold}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    asked = bool(given) or tree is not None
    if tree is None:
        tree = _meant(default, given)
    if tree not in KINDS:
        *others, last = KINDS
        raise ValueError(f"tree must be {', '.join(others)} or {last}, got {tree!r}")
    if tree == "chain" and top_k is not None:
        raise ValueError("top_k shapes a dynamic tree or an opt tree; a chain takes depth")
    if tree in _WIDE and (wrong := [name for name in ("depth", "top_k") if name in given]):
        raise ValueError(f"{' and '.join(wrong)} shape a dynamic tree or an opt tree; a {tree} tree takes widths")
    if tree not in _WIDE and widths is not None:
        right = "depth" if tree == "chain" else "depth and top_k"
        raise ValueError(f"widths shape a beam tree; tree {tree!r} takes {right}")
    if tree != "opt" and threshold is not None:
        raise ValueError(f"threshold shapes an opt tree, not a {tree} one: give tree='opt', or leave it out")
    given = _checked(given)
    if tree == "beam" and widths is None:
        given["sampled_widths"] = SAMPLED_WIDTHS
    return KINDS[tree](**given, chosen_by_user=asked)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    for name in ("depth", "top_k", "nodes"):
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {given[name]!r}")
    threshold = given.get("threshold", 0)
    if type(threshold) not in (int, float) or not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold must be a number of at least 0, got {threshold!r}")
    if "widths" not in given:
        return given
    levels = tuple(given["widths"])
    if not levels or min(levels) < 1:
        raise ValueError(f"widths must be numbers of nodes, one or more for each level, got {levels}")
    return given | {"widths": levels}


def _meant(default: str, given: Collection[str]) -> str:
    """The kind of tree whose options were given."""
    if "widths" in given:
        return "static" if default == "static" else "beam"
    if "threshold" in given:
        return "opt"
    grown = ("depth" in given and default in _WIDE) or ("top_k" in given and default in (*_WIDE, "chain"))
    return "dynamic" if grown else default
