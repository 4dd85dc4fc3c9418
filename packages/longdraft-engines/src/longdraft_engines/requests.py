"""Another engine's requests as one of our drafters needs them: tracked by the engine's ids, a slot each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree


@dataclass
class Tracked:
    """A request that is drafted for.

    Attributes:
        row: its row in the engine's batch, in this step. emitted: its new tokens in this step.
        new: the drafter has not observed it yet.
        queries: of this step, if the drafter needs any: see :class:`~longdraft.engine.event.Event`.
    """

    sequence: Sequence
    row: int = -1
    emitted: tuple[int, ...] = ()
    new: bool = True
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Count of tokens with KV in the engine's cache: all but the newest."""
        return len(self.sequence.prompt) + len(self.sequence.output) - 1


class RequestTracker:
    """Tracks requests by the engine's ids. One that is missing from a step's batch (ended, aborted, preempted) is
    forgotten; if it comes back, it is a new one whose text so far is its prompt.

    Drafts are the most probable tokens, for sampled text too: the engine accepts a drafted token with the probability
    that the target gives it, which is exact for drafts that are not sampled.

    Args:
        slots: how many requests are drafted for at a time; others are decoded without drafts.
        longest: the most tokens of a text.
    """

    drafter: Drafter

    def __init__(self, slots: int, longest: int) -> None:
        self.longest = longest
        self.free_slots = list(range(slots))
        self._tracked: dict[str, Tracked] = {}
        self._next = 0

    def prepare(self, tracked: list[Tracked]) -> None:
        """Called before a step's drafts; copies what the drafter reads of the target."""
        del tracked

    def _forget_others(self, names: Collection[str]) -> None:
        for name in set(self._tracked) - set(names):
            self._forget(name)

    def _track(
        self, name: str, row: int, length: int, emitted: int | None, last: Callable[[int], list[int]]
    ) -> Tracked | None:
        """A request with its new tokens; None if no slot is free.

        Args:
            length: tokens of its text. last: gives the last n tokens of the text.
            emitted: how many tokens are new; None: those that are not known here, or one of a new request.
        """
        tracked = self._tracked.get(name)
        new = 0 if tracked is None else length - len(tracked.sequence.prompt) - len(tracked.sequence.output)
        if tracked is not None and (new < 1 or emitted not in (None, new)):  # a step was missed
            self._forget(name)
            tracked = None
        if tracked is None:
            if not self.free_slots:
                return None
            text, new = last(length), emitted or 1
            tracked = Tracked(Sequence(self._next, text[:-new], self.longest - length + new))
            tracked.sequence.slot, self._next = self.free_slots.pop(0), self._next + 1
            self._tracked[name] = tracked
        tokens = last(new)
        for token in tokens:
            tracked.sequence.append(int(token))
        tracked.row, tracked.emitted = row, tuple(tokens)
        return tracked

    @torch.inference_mode()
    def _draft(self, tracked: list[Tracked]) -> list[TokenTree]:
        """A tree for each request, rooted at its newest token."""
        if not tracked:
            return []
        self.prepare(tracked)
        for request in tracked:
            self._observe(request)
        return self.drafter.propose([request.sequence for request in tracked])

    def _observe(self, request: Tracked) -> None:
        s, emitted = request.sequence, request.emitted
        root = TokenTree((s.tokens[-len(emitted) - 1],), (-1,))
        mode = "prefill" if request.new else "full"
        self.drafter.observe(
            Event(
                s, root, len(emitted) - 1, emitted=emitted, mode=mode,  # type: ignore[arg-type]
                queries=request.queries,
            )
        )  # fmt: skip
        request.new = False

    def _forget(self, name: str) -> None:
        request = self._tracked.pop(name)
        self.free_slots.append(request.sequence.slot)
        if not request.new:
            self.drafter.release(request.sequence)
