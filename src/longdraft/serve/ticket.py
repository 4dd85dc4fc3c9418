"""Requests that were submitted, and the other changes that the engine thread takes in between two rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from longdraft.engine.request import Request
from longdraft.engine.stats import Result, Step


@dataclass(frozen=True)
class Restarted:
    """The request begins again; its tokens so far will be repeated."""


# A listener hears steps and restarts, and at last the result or the error.
Update = Step | Restarted | Result | Exception


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    Attributes:
        request: makes the request, each time that it begins, because processors have a state.
        listener: called from the engine thread; must return quickly.
        arrived, began, ended: ``time.monotonic()``; 0 if it has not happened yet.
    """

    request: Callable[[], Request]
    method: str
    listener: Callable[[Update], None]
    arrived: float = field(default_factory=time.monotonic)
    began: float = 0.0
    ended: float = 0.0
    cancelled: bool = False


Kind = Literal["submit", "cancel", "close", "stop"]


@dataclass(frozen=True)
class Change:
    """A change to what the engine thread decodes, which it takes in between two rounds.

    Attributes:
        kind: a request was submitted or cancelled; or the worker ends, when all requests have ended ("close") or now.
        ticket: the request's.
    """

    kind: Kind
    ticket: Ticket | None = None
