"""Requests that were submitted, and what their listeners hear."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from longdraft.engine.request import Request
from longdraft.engine.stats import Result, Step
from longdraft.serve.processors import Makers


@dataclass(frozen=True)
class Restarted:
    """The request begins again; its tokens so far will be repeated."""


# A listener hears steps and restarts, and at last the result or the error.
Update = Step | Restarted | Result | Exception


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    Attributes:
        listener: called from the engine thread; must return quickly.
        makers: make its processors anew each time that it begins, because they have a state.
        arrived, began, ended: ``time.monotonic()``; 0 if it has not happened yet.
    """

    request: Request
    method: str
    listener: Callable[[Update], None]
    makers: Makers = ()
    arrived: float = field(default_factory=time.monotonic)
    began: float = 0.0
    ended: float = 0.0
    cancelled: bool = False

    def made(self) -> Request:
        """The request with new processors."""
        return replace(self.request, processors=[*self.request.processors, *(make() for make in self.makers)])
