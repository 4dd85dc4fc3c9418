"""One round's tree as text: accepted tokens are marked, and the token that the target added."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

LONGEST = 14  # characters of a token that are shown
ACCEPTED, ADDED = "✓", "+"
# Blanks are made visible: most tokens begin with one.
_VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "\r": "↤"}


def draw(tree: Mapping[str, Any]) -> str:
    """The text of a tree as :class:`~longdraft.bench.profile.Profile` records it.

    Raises:
        ValueError: its lists do not make a tree.
    """
    _check(tree)
    log_probs, accepted = tree.get("log_probs"), set(tree["path"])
    branches: list[Tree] = []
    for i, (token, parent) in enumerate(zip(tree["tokens"], tree["parents"], strict=True)):
        label = shown(token)
        if log_probs is not None and parent >= 0:
            label += f" {math.exp(min(0.0, log_probs[i])):.2f}"
        if i in accepted:
            label += f" {ACCEPTED}"
        branches.append(Tree(Text(label)) if parent < 0 else branches[parent].add(Text(label)))
    branches[tree["path"][-1]].add(Text(f"{shown(tree['bonus'])} {ADDED}"))
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(branches[0])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def shown(token: str) -> str:
    """A token's text with visible blanks, cut if it is long."""
    text = "".join(_VISIBLE.get(c, c if c.isprintable() else "\N{REPLACEMENT CHARACTER}") for c in token)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _check(tree: Mapping[str, Any]) -> None:
    tokens, parents, path = tree["tokens"], tree["parents"], tree["path"]
    log_probs = tree.get("log_probs")
    if len(tokens) != len(parents) or not path or (log_probs is not None and len(log_probs) != len(tokens)):
        raise ValueError("the drawn tree's tokens, parents and probabilities do not belong together")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i or (parent < 0) != (i == 0):
            raise ValueError(f"node {i} of the drawn tree has the parent {parent}")
    if not all(0 <= node < len(tokens) for node in path):
        raise ValueError("the drawn tree's accepted path leaves the tree")
