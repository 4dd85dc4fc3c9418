"""Prefix tree: KV entries of sequences that have lost their slot, in host memory. Common prefixes are stored once.

A node holds the KV of a block of tokens, and its children are the blocks that followed. A lookup may match a part of a
block. A block that is not full has no children.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from longdraft.memory import memory_info
from longdraft.memory.store import KVEntries
from longdraft.memory.token_ids import common_prefix_len, to_array

# Tokens of a full node.
BLOCK_SIZE = 256


@dataclass(eq=False)
class _Node:
    token_ids: array[int]
    entries: KVEntries | None = None
    parent: _Node | None = None
    last_used: int = 0
    children: list[_Node] = field(default_factory=list)


class PrefixTree:
    """KV entries of sequences' prefixes, each stored once, with an LRU limit.

    Args:
        max_bytes: limit of :attr:`nbytes`. Beyond it, the least recently used leaf is evicted.

    Attributes:
        nbytes: bytes that all entries take at present.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._clock = 0  # counts uses
        self._roots: dict[str, _Node] = {}  # by RoPE regime
        self._nodes: set[_Node] = set()
        memory_info.reclaimables.add(self)

    def reclaim(self) -> bool:
        """Drops all entries. Returns whether there were any."""
        had_nodes = bool(self._nodes)
        self._roots, self._nodes, self.nbytes = {}, set(), 0
        return had_nodes

    def match_prefix(self, token_ids: array[int], rope_regime: str = "") -> int:
        """The number of leading tokens whose KV the tree holds."""
        return sum(shared for _, shared in self._path(token_ids, rope_regime))

    def read_entries(
        self, token_ids: array[int], start: int, end: int, rope_regime: str = ""
    ) -> Iterator[tuple[int, KVEntries]]:
        """Yields entries ``[start, end)`` of a sequence in the tree, block by block with their first position."""
        position = 0
        self._clock += 1
        for node, shared in self._path(token_ids, rope_regime):
            node.last_used = self._clock
            first, last = max(start, position) - position, min(end, position + shared) - position
            if first < last:
                kv = node.entries
                assert kv is not None
                features = None if kv.features is None else kv.features[first:last]
                yield position + first, KVEntries(kv.keys[:, :, first:last], kv.values[:, :, first:last], features)
            position += shared

    def insert(self, token_ids: array[int], read: Callable[[int, int], KVEntries], rope_regime: str = "") -> None:
        """Stores a sequence from its beginning, as many tokens as the limit allows.

        Args:
            read: copies entries ``[start, end)`` of the sequence to the host.
        """
        self._clock += 1
        node = self._roots.setdefault(rope_regime, _Node(to_array(())))
        for start in range(0, len(token_ids), BLOCK_SIZE):
            block = token_ids[start : start + BLOCK_SIZE]
            child = next((x for x in node.children if common_prefix_len(x.token_ids, block) == len(block)), None)
            if child is None:
                child = self._add_child(node, block, partial(read, start, start + len(block)))
                if child is None:
                    return
            child.last_used = self._clock
            if len(block) < BLOCK_SIZE:
                return
            node = child

    def _path(self, token_ids: array[int], rope_regime: str) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes along a sequence, each with the number of its leading tokens that match."""
        node, position = self._roots.get(rope_regime), 0
        while node is not None and node.children:
            block = token_ids[position : position + BLOCK_SIZE]
            matches = ((common_prefix_len(x.token_ids, block), x) for x in node.children)
            shared, node = max(matches, key=lambda match: match[0])
            if shared:
                yield node, shared
            position += shared
            if shared < BLOCK_SIZE:
                return

    def _add_child(self, parent: _Node, token_ids: array[int], read: Callable[[], KVEntries]) -> _Node | None:
        """Adds a node, and removes siblings that hold only a prefix of it. None if the limit leaves no space."""
        for child in [x for x in parent.children if common_prefix_len(x.token_ids, token_ids) == len(x.token_ids)]:
            self._remove(child)
        entries = read()
        while self.nbytes + entries.nbytes > self.max_bytes:
            leaves = [x for x in self._nodes if not x.children and x is not parent and x.last_used < self._clock]
            if not leaves:
                return None
            self._remove(min(leaves, key=lambda x: x.last_used))
        node = _Node(token_ids, entries, parent)
        parent.children.append(node)
        self._nodes.add(node)
        self.nbytes += entries.nbytes
        return node

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None and node.entries is not None
        node.parent.children.remove(node)
        self._nodes.remove(node)
        self.nbytes -= node.entries.nbytes
