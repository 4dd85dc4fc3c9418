"""Runs work that takes long for large requests (parsing, tokenizing) in threads, to keep the event loop free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longdraft.serve.worker import QueueFull

T = TypeVar("T")
# Requests of more bytes share one thread, so that smaller requests do not wait for them.
_LARGE_BYTES = 1 << 18


class RequestExecutor:
    """Runs work in three threads for small requests and one for large requests.

    Args:
        max_pending: number of requests that may be queued or running.
        timeout: seconds for one request, waiting included.
    """

    def __init__(self, max_pending: int, timeout: float) -> None:
        self._max_pending, self._timeout = max_pending, timeout
        self._small, self._large = (ThreadPoolExecutor(n, "longdraft request") for n in (3, 1))
        self._num_pending = 0

    async def run(self, work: Callable[[], T], size: int = 0) -> T:
        """Runs ``work`` in a thread and returns its result.

        Args:
            size: bytes of the request. 0: work on a response, without the limits of pending requests and time.

        Raises:
            QueueFull: too many requests are pending.
            TimeoutError: the work took too long.
        """
        if size and self._num_pending >= self._max_pending:
            raise QueueFull(self._num_pending, retry_after=1.0)
        future = (self._large if size > _LARGE_BYTES else self._small).submit(work)
        self._num_pending += 1
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout if size else None)
        except asyncio.TimeoutError:
            raise TimeoutError from None
        finally:
            self._num_pending -= 1
