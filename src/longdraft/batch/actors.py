"""Rows through engines in Ray's actors, on this machine or on many.

Each row is a task of one actor. Ray starts an actor that has died again, and gives it the rows that it had; whoever
writes the file puts them in order, so it is the same file as one engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from longdraft.batch.local import Local
from longdraft.batch.rows import Defaults, Line, Row
from longdraft.batch.run import Answer
from longdraft.errors import CapabilityError, LongdraftError
from longdraft.model.checkpoints import Progress
from longdraft.serve.cluster import connected, require

# Actors that a row is given to, one after another, where they die.
_RETRIES = 3


class Actor:
    """An engine in a process of its own.

    Args:
        make: makes it, where the actor runs.
    """

    def __init__(self, make: Callable[[], Local]) -> None:
        self._local = make()
        self._local.prepare()
        self._local.worker.start()

    async def about(self) -> tuple[dict[str, Any], int]:
        """What its texts depend on, and how many rows it is worth giving it."""
        return self._local.decisive, self._local.ahead

    async def answer(self, line: Line) -> Answer:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Answer] = loop.create_future()

        def tell(answer: Answer) -> None:
            loop.call_soon_threadsafe(told.set_result, answer)

        self._local.ask(line, tell)
        return await told


class Pool:
    """A decoder of several actors.

    Args:
        make: makes the engine of each. defaults: as they have them. count: actors. cpus, gpus: of each.

    Raises:
        CapabilityError: Ray is not there, or has not got so many processors; an actor does not start; or their models
            are not the same.
    """

    def __init__(self, make: Callable[[], Local], defaults: Defaults, count: int, cpus: int, gpus: int) -> None:
        self._ray, self._defaults = connected(), defaults
        require(self._ray, count, cpus, gpus)
        kind = self._ray.remote(Actor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)
        self._actors = [kind.remote(make) for _ in range(count)]
        try:
            found = self._ray.get([actor.about.remote() for actor in self._actors])
        except self._ray.exceptions.RayError as error:
            self.close()
            raise CapabilityError(f"An actor does not start: {_reason(error)}") from error
        if any(decisive != found[0][0] for decisive, _ in found):
            self.close()
            raise CapabilityError("The actors have loaded different models: give all machines the same files.")
        self._decisive, each = found[0]
        self.ahead = each * count
        self._hands: dict[Any, tuple[Line, int]] = {}  # rows that actors have
        self._busy = [0] * count

    @property
    def decisive(self) -> dict[str, Any]:
        return dict(self._decisive)

    def prepare(self, progress: Progress | None = None) -> None:
        pass

    def submit(self, line: Line) -> None:
        least = min(range(len(self._actors)), key=self._busy.__getitem__)
        self._busy[least] += 1
        self._hands[self._actors[least].answer.remote(line)] = line, least

    def take(self, timeout: float) -> Answer | None:
        done, _ = self._ray.wait(list(self._hands), num_returns=1, timeout=timeout)
        if not done:
            return None
        line, actor = self._hands.pop(done[0])
        self._busy[actor] -= 1
        try:
            answer: Answer = self._ray.get(done[0])
        except self._ray.exceptions.RayError as error:
            failed = LongdraftError(f"Its actor died {_RETRIES + 1} times: {_reason(error)}")
            return Answer(line.number, Row(line, self._defaults).failed(failed), failed=True, unexpected=True)
        return answer

    def drive(self, feed: Callable[[], None]) -> None:
        try:
            feed()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the actors with what they are decoding, and says good-bye to Ray, which would print of it."""
        self._ray.shutdown()


def _reason(error: Exception) -> str:
    """The last line of what Ray says that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (named or lines or [type(error).__name__])[-1]
