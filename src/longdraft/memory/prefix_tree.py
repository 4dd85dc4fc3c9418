"""The prefix tree keeps KV of sequences that have lost their slot, in host memory. A common prefix is kept once.

A node has the KV of a block of tokens, and the children of the node have the blocks that followed. A lookup may match a
part of a block. A block with fewer than BLOCK_SIZE tokens has no children. Checkpoints of recurrent layers hang on the
block in which they are. They are evicted like leaves, so that those which nobody starts from go before the KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from longdraft.memory import memory_info
from longdraft.memory.kv_entries import KVEntries
from longdraft.memory.recurrent import SlotCheckpoint
from longdraft.memory.token_ids import common_prefix_len, to_array

# Number of tokens of a full block.
BLOCK_SIZE = 256


@dataclass(eq=False)
class _Node:
    """A block of tokens with its KV entries, or a checkpoint, which has no tokens.

    Attributes:
        last_used: the tree's clock at the last use.
        checkpoints: number of the block's tokens -> the states of recurrent layers after these tokens.
    """

    token_ids: array[int]
    entries: KVEntries | SlotCheckpoint | None = None
    parent: _Node | None = None
    last_used: int = 0
    children: list[_Node] = field(default_factory=list)
    checkpoints: dict[int, _Node] = field(default_factory=dict)


class PrefixTree:
    """Keeps KV entries of sequences up to a limit, and evicts the least recently used blocks beyond the limit.

    Token ids are arrays (:func:`to_array`). KV of different RoPE regimes (``TargetRunner.rope_regime``) is kept apart.

    Attributes:
        max_bytes: the limit of :attr:`nbytes`.
        nbytes: bytes that all entries take at present.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._clock = 0  # number of calls that used the tree
        self._roots: dict[str, _Node] = {}  # by RoPE regime
        self._nodes: set[_Node] = set()
        memory_info.reclaimables.add(self)

    def reclaim(self) -> bool:
        """Drops all entries. Returns True if there were entries."""
        had_nodes = bool(self._nodes)
        self._roots, self._nodes, self.nbytes = {}, set(), 0
        return had_nodes

    def match_prefix(self, token_ids: array[int], rope_regime: str = "") -> int:
        """Returns the number of leading tokens whose KV the tree has."""
        return sum(num_matching for _, num_matching in self._path(token_ids, rope_regime))

    def match_checkpoints(self, token_ids: array[int], rope_regime: str = "") -> dict[int, SlotCheckpoint]:
        """Returns the checkpoints of a sequence's prefixes, by the lengths of the prefixes."""
        checkpoints, position = dict[int, SlotCheckpoint](), 0
        for node, num_matching in self._path(token_ids, rope_regime):
            for length, checkpoint in node.checkpoints.items():
                if length <= num_matching and isinstance(checkpoint.entries, SlotCheckpoint):
                    checkpoints[position + length] = checkpoint.entries
            position += num_matching
        return checkpoints

    def read_entries(
        self, token_ids: array[int], start: int, end: int, rope_regime: str = ""
    ) -> Iterator[tuple[int, KVEntries]]:
        """Yields entries ``[start, end)`` of a sequence block by block, as pairs (first position, entries)."""
        position = 0
        self._clock += 1
        for node, num_matching in self._path(token_ids, rope_regime):
            node.last_used = self._clock
            part = slice(max(start, position) - position, min(end, position + num_matching) - position)
            if part.start < part.stop:
                kv = node.entries
                assert isinstance(kv, KVEntries)
                features = None if kv.features is None else kv.features[part]
                yield position + part.start, KVEntries(kv.keys[:, :, part], kv.values[:, :, part], features)
            if checkpoint := node.checkpoints.get(end - position):
                checkpoint.last_used = self._clock
            position += num_matching

    def insert(
        self,
        token_ids: array[int],
        read: Callable[[int, int], KVEntries],
        rope_regime: str = "",
        checkpoints: Mapping[int, SlotCheckpoint] | None = None,
    ) -> None:
        """Inserts the first blocks of a sequence, as many as the limit allows.

        Args:
            read: ``read(start, end)`` copies entries ``[start, end)`` of the sequence to the host.
            checkpoints: number of leading tokens -> the states of recurrent layers after them, in host memory.
        """
        self._clock += 1
        node = self._roots.setdefault(rope_regime, _Node(to_array(())))
        for start in range(0, len(token_ids), BLOCK_SIZE):
            block = token_ids[start : start + BLOCK_SIZE]
            child = next((c for c in node.children if common_prefix_len(c.token_ids, block) == len(block)), None)
            if child is None:
                child = self._add_child(node, block, partial(read, start, start + len(block)))
                if child is None:
                    return
            child.last_used = self._clock
            for length in sorted((checkpoints or {}).keys() & range(start + 1, start + len(block) + 1)):
                assert checkpoints is not None
                checkpoint = child.checkpoints.get(length - start) or _Node(to_array(()), checkpoints[length], child)
                if checkpoint in self._nodes or self._add(checkpoint):
                    child.checkpoints[length - start], checkpoint.last_used = checkpoint, self._clock
            if len(block) < BLOCK_SIZE:
                return
            node = child

    def _path(self, token_ids: array[int], rope_regime: str) -> Iterator[tuple[_Node, int]]:
        """Yields (node, number of leading tokens of the node that match) for the nodes that match a sequence."""
        node, position = self._roots.get(rope_regime), 0
        while node is not None and node.children:
            block = token_ids[position : position + BLOCK_SIZE]
            matches = ((common_prefix_len(child.token_ids, block), child) for child in node.children)
            num_matching, node = max(matches, key=lambda match: match[0])
            if num_matching:
                yield node, num_matching
            position += num_matching
            if num_matching < BLOCK_SIZE:
                return

    def _add_child(self, parent: _Node, token_ids: array[int], read_block: Callable[[], KVEntries]) -> _Node | None:
        """Adds a block as a child, and removes children whose tokens are a prefix of the block. Returns the new node;
        None if the limit leaves no space."""
        for child in [c for c in parent.children if common_prefix_len(c.token_ids, token_ids) == len(c.token_ids)]:
            self._remove(child)
        node = _Node(token_ids, read_block(), parent)
        if not self._add(node):
            return None
        parent.children.append(node)
        return node

    def _add(self, node: _Node) -> bool:
        """Evicts what was not used for longest until a node fits. Returns False if that is not possible."""
        assert node.entries is not None
        while self.nbytes + node.entries.nbytes > self.max_bytes:
            unused = (n for n in self._nodes if not n.children and not n.checkpoints and n.last_used < self._clock)
            oldest = min(unused, key=lambda n: n.last_used, default=None)
            if oldest is None:
                return False
            self._remove(oldest)
        self._nodes.add(node)
        self.nbytes += node.entries.nbytes
        return True

    def _remove(self, node: _Node) -> None:
        for checkpoint in list(node.checkpoints.values()):
            self._remove(checkpoint)
        assert node.parent is not None and node.entries is not None
        node.parent.children = [child for child in node.parent.children if child is not node]
        node.parent.checkpoints = {n: c for n, c in node.parent.checkpoints.items() if c is not node}
        self._nodes.remove(node)
        self.nbytes -= node.entries.nbytes
