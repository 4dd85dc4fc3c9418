"""Requests of another engine, followed by its names for them, and one of our drafters drafting for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree


@dataclass
class Followed:
    """A request that is drafted for.

    Attributes:
        row: in the engine's batch, this step.
        emitted: tokens that came with it.
        new: whether the drafter has not met it yet.
        queries: of this step, where the drafter wants any: see :class:`~longdraft.engine.event.Event`.
    """

    sequence: Sequence
    row: int = -1
    emitted: tuple[int, ...] = ()
    new: bool = True
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Tokens that have KV in the engine's cache: all but the newest."""
        return len(self.sequence.prompt) + len(self.sequence.output) - 1


class Requests:
    """Requests are known by the engine's ids. One that is not in the batch of a step (ended, aborted, preempted, put
    off) is forgotten; when it comes again, it is a new one, whose text so far is its prompt.

    Drafts are the most probable tokens, for sampled text too: both engines accept a drafted token with the probability
    that the target gives it, which is exact for drafts that nothing was sampled for.

    Args:
        slots: requests that are drafted for at a time; others are decoded without drafts.
        longest: tokens of a text, at most.
    """

    drafter: Drafter

    def __init__(self, slots: int, longest: int) -> None:
        self.longest = longest
        self._followed: dict[str, Followed] = {}
        self._free = list(range(slots))
        self._next = 0

    def prepare(self, followed: list[Followed]) -> None:
        """Before a step's texts are drafted for: brings along what the drafter reads of the target."""
        del followed

    def _keep(self, names: Collection[str]) -> None:
        """Forgets all other requests."""
        for gone in set(self._followed) - set(names):
            self._forget(gone)

    def _follow(
        self, name: str, row: int, length: int, emitted: int | None, last: Callable[[int], list[int]]
    ) -> Followed | None:
        """A request with its new tokens; None where no slot is free.

        Args:
            length: of its text, tokens. last: gives so many of them, from the end.
            emitted: how many of them are new; None: those that we do not know, the newest one alone of a new text.
        """
        followed = self._followed.get(name)
        new = 0 if followed is None else length - len(followed.sequence.prompt) - len(followed.sequence.output)
        if followed is not None and (new < 1 or emitted not in (None, new)):  # a step of it was not shown to us
            self._forget(name)
            followed = None
        if followed is None:
            if not self._free:
                return None
            text, new = last(length), emitted or 1
            followed = Followed(Sequence(self._next, text[:-new], self.longest - length + new))
            followed.sequence.slot, self._next = self._free.pop(0), self._next + 1
            self._followed[name] = followed
        came = last(new)
        for token in came:
            followed.sequence.append(int(token))
        followed.row, followed.emitted = row, tuple(came)
        return followed

    @torch.inference_mode()
    def _draft(self, going: list[Followed]) -> list[TokenTree]:
        """A tree for each of them, rooted at its newest token."""
        if not going:
            return []
        self.prepare(going)
        for followed in going:
            self._observe(followed)
        return self.drafter.propose([followed.sequence for followed in going])

    def _observe(self, followed: Followed) -> None:
        """Tells the drafter what came."""
        s, emitted = followed.sequence, followed.emitted
        root = TokenTree((s.tokens[-len(emitted) - 1],), (-1,))
        mode = "prefill" if followed.new else "full"
        self.drafter.observe(
            Event(
                s, root, len(emitted) - 1, emitted=emitted, target_tokens=emitted, mode=mode,  # type: ignore[arg-type]
                queries=followed.queries,
            )
        )  # fmt: skip
        followed.new = False

    def _forget(self, name: str) -> None:
        followed = self._followed.pop(name)
        self._free.append(followed.sequence.slot)
        if not followed.new:
            self.drafter.release(followed.sequence)
