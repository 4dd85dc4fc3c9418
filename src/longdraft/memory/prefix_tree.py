"""A tree of prefixes: rows of texts that have lost their slot, in the host's memory. Common beginnings are kept once.

A node has the rows of a block of tokens; its children are the blocks that followed. A text is found down to the token
at which it forks from all others. A shorter block ends a text and has no children.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from longdraft.memory import memory_info
from longdraft.memory.store import KVEntries
from longdraft.memory.token_ids import common_prefix_len, to_array

# Tokens of a node.
BLOCK_SIZE = 256


@dataclass(eq=False)
class _Node:
    tokens: array[int]
    rows: KVEntries | None = None
    parent: _Node | None = None
    used: int = 0
    children: list[_Node] = field(default_factory=list)


class PrefixTree:
    """Rows of texts' beginnings, each kept once, in blocks that lie behind one another.

    Args:
        max_bytes: limit of all rows. Blocks behind which no other comes are dropped first, the least recently used
            before others.

    Attributes:
        nbytes: of all rows now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._clock = 0  # counts uses
        self._roots: dict[str, _Node] = {}  # by the kind of rows
        self._nodes: set[_Node] = set()
        memory_info.reclaimables.add(self)

    def reclaim(self) -> bool:
        """Drops all rows, and returns whether there were any."""
        had = bool(self._nodes)
        self._roots, self._nodes, self.nbytes = {}, set(), 0
        return had

    def match_prefix(self, token_ids: array[int], rope_regime: str = "") -> int:
        """The number of leading tokens whose rows are there."""
        return sum(shared for _, shared in self._path(token_ids, rope_regime))

    def read_entries(
        self, token_ids: array[int], start: int, end: int, rope_regime: str = ""
    ) -> Iterator[tuple[int, KVEntries]]:
        """Yields rows ``[start, end)`` of a text in pieces, each with its first place. They must be there."""
        at = 0
        self._clock += 1
        for node, shared in self._path(token_ids, rope_regime):
            node.used = self._clock
            first, last = max(start, at) - at, min(end, at + shared) - at
            if first < last:
                rows = node.rows
                assert rows is not None
                features = None if rows.features is None else rows.features[first:last]
                yield at + first, KVEntries(rows.keys[:, :, first:last], rows.values[:, :, first:last], features)
            at += shared

    def insert(
        self, token_ids: array[int], read_entries: Callable[[int, int], KVEntries], rope_regime: str = ""
    ) -> None:
        """Keeps a text, from its beginning as far as the limit allows.

        Args:
            read: copies rows ``[start, end)`` of the text to the host.
        """
        self._clock += 1
        node = self._roots.setdefault(rope_regime, _Node(to_array(())))
        for at in range(0, len(token_ids), BLOCK_SIZE):
            part = token_ids[at : at + BLOCK_SIZE]
            known = next((x for x in node.children if common_prefix_len(x.tokens, part) == len(part)), None)
            if known is None:
                known = self._grown(node, part, partial(read_entries, at, at + len(part)))
                if known is None:
                    return
            known.used = self._clock
            if len(part) < BLOCK_SIZE:
                return
            node = known

    # --- nodes ---

    def _path(self, text: array[int], kind: str) -> Iterator[tuple[_Node, int]]:
        """The nodes that a text goes through, each with how many of its tokens are the text's."""
        node, at = self._roots.get(kind), 0
        while node is not None and node.children:
            part = text[at : at + BLOCK_SIZE]
            shared, node = max(
                ((common_prefix_len(x.tokens, part), x) for x in node.children), key=lambda found: found[0]
            )
            if shared:
                yield node, shared
            at += shared
            if shared < BLOCK_SIZE:
                return

    def _grown(self, parent: _Node, tokens: array[int], read: Callable[[], KVEntries]) -> _Node | None:
        """Adds a node, in place of those that have only its beginning; None if the limit leaves no room."""
        for child in [x for x in parent.children if common_prefix_len(x.tokens, tokens) == len(x.tokens)]:
            self._remove(child)
        rows = read()
        while self.nbytes + rows.nbytes > self.max_bytes:
            ends = [x for x in self._nodes if not x.children and x is not parent and x.used < self._clock]
            if not ends:
                return None
            self._remove(min(ends, key=lambda x: x.used))
        node = _Node(tokens, rows, parent)
        parent.children.append(node)
        self._nodes.add(node)
        self.nbytes += rows.nbytes
        return node

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None and node.rows is not None
        node.parent.children.remove(node)
        self._nodes.remove(node)
        self.nbytes -= node.rows.nbytes
