"""One round's tree as an SVG: what was drafted, what of it was accepted, and the bonus token.

From left to right by depth. The accepted path runs straight along the top: a node stands level with its first child,
and the child that was accepted comes first. Colours are the page's (CSS classes ``node``, ``path``, ``bonus``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

LONGEST = 14  # characters of a token that are shown
CHARACTER, SMALL_CHARACTER = 7.3, 5.6  # width of one in the drawing's fonts, px
ROW, HEIGHT, GAP, PAD = 21, 17, 26, 5  # px: from row to row, of a node, between two depths, inside a node
CORNER = 6  # px: radius of a line's turn
# Blanks have to be seen: most tokens begin with one.
_SEEN = {" ": "·", "\n": "↵", "\t": "→", "\r": "↤"}


@dataclass
class _Node:
    text: str
    probability: float | None
    kind: str
    parent: int
    depth: int
    children: list[int] = field(default_factory=list)
    row: int = 0

    @property
    def shown_probability(self) -> str:
        return "" if self.probability is None else f"{self.probability:.2f}"

    @property
    def width(self) -> float:
        beside = SMALL_CHARACTER * len(self.shown_probability) + 4 if self.shown_probability else 0
        return 2 * PAD + CHARACTER * max(1, len(self.text)) + beside


def draw(tree: Mapping[str, Any]) -> str:
    """An SVG element of a tree as :class:`~longdraft.bench.profile.Profile` records it.

    Raises:
        ValueError: its lists do not make a tree.
    """
    nodes = _nodes(tree)
    rows = _place(nodes)
    columns = _columns(nodes)
    width = columns[-1] + max(n.width for n in nodes if n.depth == len(columns) - 1) + 1
    height = rows * ROW
    # The path is drawn last, over the others.
    children = sorted((n for n in nodes if n.parent >= 0), key=lambda n: n.kind != "node")
    lines = [_line(nodes[n.parent], n, columns) for n in children]
    accepted = sum(n.kind == "path" for n in nodes) - 1
    label = f"Tree of {len(nodes) - 2} drafted tokens, {accepted} of them accepted"
    return (
        f'<svg class="tree" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="{label}">' + "".join(lines) + "".join(_box(n, columns) for n in nodes) + "</svg>"
    )


def shown(token: str) -> str:
    """A token's text, its blanks visible, cut where it is long."""
    text = "".join(_SEEN.get(c, c if c.isprintable() else "\N{REPLACEMENT CHARACTER}") for c in token)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _nodes(tree: Mapping[str, Any]) -> list[_Node]:
    """The tree's nodes in its own order, and the bonus token as one more, under the last accepted node."""
    tokens, parents, path = tree["tokens"], tree["parents"], tree["path"]
    log_probs: Sequence[float] | None = tree.get("log_probs")
    if len(tokens) != len(parents) or not path or (log_probs is not None and len(log_probs) != len(tokens)):
        raise ValueError("the drawn tree's tokens, parents and probabilities do not belong together")
    accepted = set(path)
    nodes: list[_Node] = []
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not -1 <= parent < i or (parent < 0) != (i == 0):
            raise ValueError(f"node {i} of the drawn tree has the parent {parent}")
        probability = None if log_probs is None or parent < 0 else math.exp(min(0.0, log_probs[i]))
        kind = "path" if i in accepted else "node"
        nodes.append(_Node(shown(token), probability, kind, parent, 0 if parent < 0 else nodes[parent].depth + 1))
    if not all(0 <= node < len(nodes) for node in path):
        raise ValueError("the drawn tree's accepted path leaves the tree")
    nodes.append(_Node(shown(tree["bonus"]), None, "bonus", path[-1], nodes[path[-1]].depth + 1))
    for i, node in enumerate(nodes[1:], 1):
        nodes[node.parent].children.append(i)
    for node in nodes:
        node.children.sort(key=lambda child: nodes[child].kind == "node")
    return nodes


def _place(nodes: list[_Node]) -> int:
    """Gives every node its row and says how many there are. A leaf takes a new one."""
    rows = 0
    waiting = [0]
    while waiting:
        node = nodes[waiting.pop()]
        first = node.parent >= 0 and nodes[nodes[node.parent].children[0]] is node
        if first:
            node.row = nodes[node.parent].row
        else:
            node.row, rows = rows, rows + 1
        waiting += reversed(node.children)
    return rows


def _columns(nodes: list[_Node]) -> list[float]:
    """Left edge of each depth."""
    edges = [1.0]
    for depth in range(max(n.depth for n in nodes)):
        edges.append(edges[-1] + max(n.width for n in nodes if n.depth == depth) + GAP)
    return edges


def _line(parent: _Node, node: _Node, columns: list[float]) -> str:
    start, end = columns[parent.depth] + parent.width, columns[node.depth]
    y0, y1 = (n.row * ROW + ROW / 2 for n in (parent, node))
    kind = "line" if node.kind == "node" else f"line {node.kind} path"
    if y0 == y1:
        return f'<path class="{kind}" d="M{start:.1f} {y0:.1f} H{end:.1f}"/>'
    # Parents of one depth have unequal widths: all lines turn at the same place, just before the next depth.
    turn = end - GAP / 2
    down = f"H{turn:.1f} V{y1 - CORNER:.1f} Q{turn:.1f} {y1:.1f} {turn + CORNER:.1f} {y1:.1f} H{end:.1f}"
    return f'<path class="{kind}" d="M{start:.1f} {y0:.1f} {down}"/>'


def _box(node: _Node, columns: list[float]) -> str:
    x, y = columns[node.depth], node.row * ROW + (ROW - HEIGHT) / 2
    beside = ""
    if node.shown_probability:
        right = x + node.width - PAD
        beside = f'<text class="p" x="{right:.1f}" y="{y + 12.5:.1f}" text-anchor="end">{node.shown_probability}</text>'
    return (
        f'<g class="{node.kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{node.width:.1f}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{x + PAD:.1f}" y="{y + 12.5:.1f}">{escape(node.text)}</text>{beside}</g>'
    )
