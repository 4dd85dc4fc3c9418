"""Decodes rows with engines in Ray's actors, on this machine or on many.

Each row is a task of one actor. Ray restarts an actor that has died and gives it its rows again. The answers are
written in order, so the file is the same as one engine's.
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
from longdraft.serve.cluster import connected, reason, require

# How often a row is decoded again after its actor has died.
_RETRIES = 3


class Actor:
    """An engine in a process of its own. ``make`` makes it there."""

    def __init__(self, make: Callable[[], Local]) -> None:
        self._local = make()
        self._local.prepare()
        self._local.worker.start()

    async def about(self) -> tuple[dict[str, Any], int]:
        """The settings its texts depend on, and the number of rows to submit ahead."""
        return self._local.decisive, self._local.ahead

    async def answer(self, line: Line) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def receive(answer: Answer) -> None:
            loop.call_soon_threadsafe(future.set_result, answer)

        self._local.answer(line, receive)
        return await future


class Pool:
    """A decoder of several actors.

    Args:
        make: makes the engine of each. defaults: the same as the engines'. count: actors.
        cpus, gpus: how many each actor has.

    Raises:
        CapabilityError: Ray is not installed or has too few processors; an actor does not start; the models differ.
    """

    def __init__(self, make: Callable[[], Local], defaults: Defaults, count: int, cpus: int, gpus: int) -> None:
        self._ray, self._defaults = connected(), defaults
        require(self._ray, count, cpus, gpus)
        kind = self._ray.remote(Actor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)
        self._actors = [kind.remote(make) for _ in range(count)]
        try:
            about = self._ray.get([actor.about.remote() for actor in self._actors])
        except self._ray.exceptions.RayError as error:
            self._close()
            raise CapabilityError(f"An actor does not start: {reason(str(error))}") from error
        self.decisive, ahead = about[0]
        if any(decisive != self.decisive for decisive, _ in about):
            self._close()
            raise CapabilityError("The actors have loaded different models: give all machines the same files.")
        self.ahead = ahead * count
        self._tasks: dict[Any, tuple[Line, int]] = {}  # Ray's reference -> row, index of its actor
        self._busy = [0] * count

    def prepare(self, progress: Progress | None = None) -> None:
        """Each actor has prepared itself."""

    def submit(self, line: Line) -> None:
        actor = min(range(len(self._actors)), key=self._busy.__getitem__)
        self._busy[actor] += 1
        self._tasks[self._actors[actor].answer.remote(line)] = line, actor

    def take(self, timeout: float) -> Answer | None:
        done, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=timeout)
        if not done:
            return None
        line, actor = self._tasks.pop(done[0])
        self._busy[actor] -= 1
        try:
            answer: Answer = self._ray.get(done[0])
        except self._ray.exceptions.RayError as error:
            failure = LongdraftError(f"Its actor died {_RETRIES + 1} times: {reason(str(error))}")
            return Answer(line.number, Row(line, self._defaults).failed(failure), failed=True, unexpected=True)
        return answer

    def drive(self, feed: Callable[[], None]) -> None:
        try:
            feed()
        finally:
            self._close()

    def _close(self) -> None:
        """Ends the actors and the connection; without this Ray prints messages at exit."""
        self._ray.shutdown()
