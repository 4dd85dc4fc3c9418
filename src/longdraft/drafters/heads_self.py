"""TokenSwift's first step: a forward of the target on a part of its KV brings the state that the heads continue.

The forward reads the last token, the root, on a sparse view of the target's KV, and says what follows; the heads go on
from its hidden state (Wu et al. 2025, arXiv:2502.18890, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from longdraft.drafters.heads import States, StateSource
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.views.view import View


class ViewStates(StateSource):
    """The roots' own states, from the target on a view of its KV.

    Args:
        level: the view, and how it is kept; its own tree is not drafted.
    """

    ahead = True

    def __init__(self, level: SelfDrafter) -> None:
        self.level = level

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return self.level.forwards

    @property
    def views(self) -> tuple[View, ...]:  # type: ignore[override]
        return self.level.views

    @property
    def query_window(self) -> int:  # type: ignore[override]
        return self.level.query_window

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        return self.level.query_layers(runner)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Raises MemoryBudgetError when the views do not fit."""
        self.level.host(runner, store, (runner.kv_shape.layers - 1,))

    @torch.inference_mode()
    def states(self, sequences: SequenceOf[Sequence]) -> States:
        self.level.follow(sequences)
        logits = self.level.judge(sequences, [TokenTree((s.output[-1],), (-1,)) for s in sequences])
        store = self.level.cache.store
        assert store.features is not None
        # The root's row lies behind the view; nothing keeps it.
        hidden = torch.stack([store.features[s.slot, store.lengths[s.slot]] for s in sequences])
        return States(hidden, torch.stack([rows[0] for rows in logits]))

    def observe(self, event: Event) -> None:
        self.level.observe(event)

    def release(self, sequence: Sequence) -> None:
        self.level.release(sequence)
