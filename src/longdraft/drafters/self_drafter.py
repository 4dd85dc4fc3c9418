"""The target as its own drafter: it drafts on a part of its KV and verifies on all of it.

A draft forward reads all of the weights, but a few hundred rows of KV instead of the text's. So it pays where the KV
is what a forward waits for: long texts, and batches, whose sequences share the weights and not the KV (Sadhukhan et
al. 2024, MagicDec). What part: see :mod:`longdraft.drafters.self_views`.

A round: the view takes in the exact rows that the last verification left in the full store, then the root and the tree
behind it are fed level by level, each level's rows behind those before. These rows are forgotten afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from longdraft.drafters.levels import feed_level
from longdraft.drafters.self_cache import SparseCache
from longdraft.drafters.self_views import sparse_view
from longdraft.drafters.tree_drafter import TreeDrafter
from longdraft.events import Event
from longdraft.host.runner import TargetRunner
from longdraft.kv.store import KVStore
from longdraft.sequence import Sequence
from longdraft.trees.budget import Budget
from longdraft.trees.level import Level
from longdraft.trees.masks import Ancestors
from longdraft.trees.options import tree_kind
from longdraft.trees.tree import TokenTree
from longdraft.verify.schedule import verify_trees

# New rows that a view takes in before it is chosen anew, as a share of its budget, and at least.
FRESH_SHARE, FRESH = 4, 64
# Verifications from one choice to the next.
REFRESH, USUAL_REFRESH = {"snapkv": 16}, 8
# Adaptive choice: the last verifications are few enough to follow a change of topic, and half their usual luck is
# clearly less (as in the retrieval of chunks).
LAST, CLEARLY = 2, 0.5


@dataclass(frozen=True)
class Mark:
    """Attributes:
    held: rows of a view. unverified: rows of the full store that are shown beside the committed ones.
    """

    held: int
    unverified: int


class SelfDrafter(TreeDrafter):
    """Drafts with the target on a sparse view of its own KV.

    Args:
        view: what it sees: "streaming" (the first and the last rows), "snapkv", "chunks" or "tokens" (these, and rows
            that its queries choose).
        budget: rows of each layer and KV head, sink and window among them; 512 by default.
        sink, window: first and last rows, always seen; 16 and 32 by default, with "streaming" a window of all that the
            budget leaves.
        chunk: with "chunks", rows that are chosen together; 8 by default.
        refresh: verifications from one choice to the next, 0: only when the view has no room for new rows; by default
            16 with "snapkv", whose choice costs several forwards on a CPU, and 8 with others.
        adaptive: choose earlier when acceptance falls: when the last two verifications accepted less than half of what
            was usual since the last choice.
        widths, nodes, tree, depth, top_k, threshold, acceptance: of the tree, as
            :func:`~longdraft.trees.options.tree_kind` takes them; by default a chain of 4, and with a planner one as
            long as pays.

    Attributes:
        cache: the views' KV; from :meth:`bind` on.

    Raises:
        ValueError: no such view, or sizes that make none, or no tree.
    """

    def __init__(
        self,
        view: str = "snapkv",
        budget: int | None = None,
        sink: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        refresh: int | None = None,
        adaptive: bool = False,
        widths: SequenceOf[int] | None = None,
        nodes: int | None = None,
        tree: str | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        acceptance: str = "draw",
    ) -> None:
        self.view = sparse_view(view, budget, sink, window, chunk)
        if refresh is None:
            refresh = REFRESH.get(view, USUAL_REFRESH)
        if type(refresh) is not int or refresh < 0:
            raise ValueError(f"refresh must be a whole number of at least 0, got {refresh!r}")
        if type(adaptive) is not bool:
            raise ValueError(f"adaptive must be True or False, got {adaptive!r}")
        self.refresh, self.adaptive = refresh, adaptive
        self.tree = tree_kind("chain", widths, nodes, tree, depth, top_k, threshold, acceptance)
        # Rows that trees fill which another one drafted and this one judges.
        self.judged = 0

    @property
    def query_window(self) -> int:  # type: ignore[override]
        return max(1, self.view.looks)

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """All, where rows are chosen: each layer for itself."""
        return tuple(range(runner.kv_shape.layers)) if self.view.looks else ()

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Takes memory for the views.

        Raises:
            MemoryBudgetError: they do not fit the memory that is free.
        """
        self.host(runner, store, store.feature_layers)

    def host(self, runner: TargetRunner, full: KVStore, feature_layers: tuple[int, ...] = ()) -> None:
        """Drafts with this model, whose KV of the texts is kept in ``full``."""
        self.runner, self.full = runner, full

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(slots, capacity, feature_layers, resident=True)

        fresh = max(FRESH, self.view.budget // FRESH_SHARE)
        self.cache = SparseCache(full, new_store, self.view, fresh, self.rows)
        # (layers, Hq, M, d) the last queries of each slot's text, the newest last; None: not asked for, or none yet.
        self._queries: list[torch.Tensor | None] = [None] * full.slots
        # Drafted tokens that each verification since the last choice accepted.
        self._accepted: list[list[int]] = [[] for _ in range(full.slots)]

    @property
    def rows(self) -> int:
        """Rows behind a view that a round fills at most, the root's included."""
        return max(self.tree.max_expanded, self.judged) + 1

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], budget: Budget | None = None) -> list[TokenTree]:
        self.follow(sequences)
        return self.grow(sequences, _Round(self, sequences).expand, self.ids, self.runner.device, budget)

    @property
    def ids(self) -> torch.Tensor | None:
        """(draft vocabulary,) the target's id of each id that it proposes; None: they are the same."""
        return None

    def follow(self, sequences: SequenceOf[Sequence]) -> None:
        """Brings the views up to the rows that can be read of each text, chosen anew where that is due."""
        for s in sequences:
            if self.cache.follow(s.slot, self._chooses_by(s.slot), self._due(s.slot)):
                self._accepted[s.slot] = []

    def observe(self, event: Event) -> None:
        """Keeps the queries that rows are chosen by, and how drafts fared; forgets copies of rows that have changed."""
        slot = event.sequence.slot
        if event.begins:  # nothing is kept of the last text in the slot
            self._begin(slot)
        if self.view.looks and event.queries:
            self.keep_queries(slot, event.queries)
        if event.replaced is not None:
            self.cache.forget(slot, event.replaced)
        if event.taken_back:
            self.cache.forget(slot, self.full.readable(slot))
        elif event.tree.drafted:  # a plain round says nothing of the view
            self._accepted[slot].append(event.accepted)

    def keep_queries(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries (layer -> (Hq, n, d)) to the last ones of a slot's text, as many as rows are chosen by."""
        new, before = torch.stack(list(queries.values())), self._queries[slot]
        whole = new if before is None else torch.cat([before, new], dim=2)
        self._queries[slot] = whole[:, :, -self.view.looks :]

    def release(self, sequence: Sequence) -> None:
        self._begin(sequence.slot)

    # --- as a verifier of what another one drafts ---

    @torch.inference_mode()
    def judge(self, sequences: SequenceOf[Sequence], trees: list[TokenTree]) -> list[torch.Tensor]:
        """Its logits (at least tree.size, vocabulary) on a tree of each sequence, rooted at its last token.

        The views hold all before the roots: :meth:`follow`, and since then :meth:`keep`.
        """
        self.forwards += 1
        slots, bases = [s.slot for s in sequences], [_root(s) for s in sequences]
        out = verify_trees(self.runner, self.cache.store, slots, trees, bases)
        assert out.logits is not None
        return list(out.logits)

    def mark(self, sequence: Sequence) -> Mark:
        """Where the view of a text ends, to come back to."""
        slot = sequence.slot
        return Mark(self.cache.store.lengths[slot], self.full.unverified[slot])

    def keep(self, sequence: Sequence, path: list[int]) -> None:
        """Takes in what was accepted of a judged tree, until :meth:`drop`; drafters can read it in the full store."""
        slot, store = sequence.slot, self.cache.store
        own = slice(store.lengths[slot], store.lengths[slot] + len(path))
        store.commit(slot, path)
        features = None if store.features is None else store.features[slot, own]
        keys, values = store.keys[:, slot, :, own], store.values[:, slot, :, own]
        # Behind the committed rows, where the next verification writes.
        self.full.put_rows(slot, self.full.readable(slot), keys, values, features)
        self.full.unverified[slot] += len(path)

    def drop(self, sequence: Sequence, mark: Mark) -> None:
        """Forgets what was taken in since a mark."""
        self.cache.store.truncate(sequence.slot, mark.held)
        self.full.unverified[sequence.slot] = mark.unverified

    def _chooses_by(self, slot: int) -> list[torch.Tensor] | None:
        queries = self._queries[slot]
        return None if queries is None else list(queries)

    def _due(self, slot: int) -> bool:
        """Whether it is time to choose."""
        found = self._accepted[slot]
        if not self.view.looks:
            return False
        if self.refresh and len(found) >= self.refresh:
            return True
        if not self.adaptive or len(found) <= LAST:
            return False
        return sum(found[-LAST:]) / LAST < CLEARLY * sum(found) / len(found)

    def _begin(self, slot: int) -> None:
        self.cache.forget(slot)
        self._queries[slot], self._accepted[slot] = None, []


def _root(sequence: Sequence) -> int:
    """Position of a sequence's last token."""
    return len(sequence.prompt) + len(sequence.output) - 1


class _Round:
    """One round of a batch, whose forwards take all sequences together."""

    def __init__(self, drafter: SelfDrafter, sequences: list[Sequence]) -> None:
        self._drafter, self._sequences = drafter, sequences
        self._ancestors = Ancestors()

    def expand(self, level: Level) -> torch.Tensor:
        """Logits (B', W, vocabulary) of what follows each node; feeds them behind the levels before."""
        drafter, sequences = self._drafter, [self._sequences[row] for row in level.rows]
        drafter.forwards += 1
        slots, bases = [s.slot for s in sequences], [_root(s) for s in sequences]
        return feed_level(drafter.runner, drafter.cache.store, slots, bases, level, self._ancestors.add(level))
