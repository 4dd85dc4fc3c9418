"""The target as its own drafter, on the part of its KV that it retrieves (Sun et al. 2024, TriForce, section 4.1).

Too slow to draft with, since every drafted token costs a pass through all of its weights: it says how well the
retrieved context could be used by a draft that knows the language as the target does (SpecExtend, table 1).
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.partial import partial_view
from longdraft.engine.schedule import verify_trees
from longdraft.engine.sequence import Sequence
from longdraft.errors import ContextError
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree
from longdraft.views.cache import TrueCache

# Logits (V,) of the next token, and (V,) the target's ids that they are of; None: the target's vocabulary.
Heard = tuple[torch.Tensor, torch.Tensor | None]


class SelfDrafter(Drafter):
    """Asks the target what comes next, on sink, retrieved blocks and recent window, each layer and KV head its own.

    It proposes nothing, for the verification's own answer would be as dear. :attr:`heard` is what it is for.

    Args:
        budget, block, sink, recent: tokens; see :func:`~longdraft.engine.partial.partial_view`. The budget is that of
            32 chunks of 32.
        every: verifications from one retrieval to the next; 0: only after the prompt, as TriForce does.
        selector: what ranks the blocks; mean-key as in TriForce.
        _tokens: emitted after the prompt at most.

    Attributes:
        heard: what the target says on its retrieved KV about the token after each root.

    Raises:
        ValueError: sizes that make no partial cache.
    """

    max_nodes = 0

    def __init__(
        self,
        budget: int = 1024,
        block: int = 8,
        sink: int = 32,
        recent: int = 128,
        every: int = 4,
        selector: str = "mean-key",
        _tokens: int = 64,
    ) -> None:
        sizes: dict[str, Any] = {"budget": budget, "block": block, "sink": sink, "recent": recent, "every": every}
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, got {size!r}")
        self.view = partial_view(budget, sink, recent, block, _tokens, selector, "last")
        self.every = every
        self.heard: list[Heard] = []

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """All: each retrieves for itself."""
        return tuple(range(runner.kv_shape.layers))

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Takes memory for the partial cache.

        Raises:
            MemoryBudgetError: it does not fit.
        """
        self._runner, self._store = runner, store

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(slots, capacity, resident=True)

        self.partial = TrueCache(store, new_store, self.view, 2)
        self._verified = [0] * store.slots

    def observe(self, event: Event) -> None:
        """Retrieves, when it is time to; else the row that was verified joins the others.

        Raises:
            ContextError: the text is no longer than what is always kept of it.
        """
        slot, partial = event.sequence.slot, self.partial
        length = self._store.lengths[slot]
        if length <= self.view.sink:
            raise ContextError(
                f"The text has {length} tokens and the sink holds {self.view.sink}: lower sink, or give a longer one."
            )
        self._verified[slot] += 1
        due = self.every > 0 and self._verified[slot] >= self.every
        if due or not partial.in_use(slot):
            partial.choose(slot, {layer: q[:, -1:] for layer, q in event.queries.items()})
            self._verified[slot] = 0
        else:
            partial.update(slot)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        roots = [TokenTree((s.output[-1],), (-1,)) for s in sequences]
        slots = [s.slot for s in sequences]
        bases = [self._store.lengths[slot] for slot in slots]
        out = verify_trees(self._runner, self.partial.store, slots, roots, bases)
        assert out.logits is not None
        self.heard += [(row, None) for row in out.logits[:, 0]]
        return roots

    def release(self, sequence: Sequence) -> None:
        self.partial.forget(sequence.slot)
