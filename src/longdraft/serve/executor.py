"""Runs work whose time grows with a request in a few threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longdraft.serve.worker import QueueFull

T = TypeVar("T")
# Requests of more bytes run in a thread of their own, one at a time, so that smaller ones do not wait for them.
_LARGE_BYTES = 1 << 18


class RequestExecutor:
    """Three threads for small requests and one for large ones.

    Args:
        max_waiting: requests that may be queued or running. timeout: seconds for one request, waiting included.
    """

    def __init__(self, max_waiting: int, timeout: float) -> None:
        self._max_waiting, self._timeout = max_waiting, timeout
        self._small, self._large = (ThreadPoolExecutor(n, "longdraft request") for n in (3, 1))
        self._num_pending = 0

    async def run(self, work: Callable[[], T], size: int = 0) -> T:
        """Returns what the work returns.

        Args:
            size: bytes of the request; 0 for work on a response, which has no limits.

        Raises:
            QueueFull: too many requests wait. TimeoutError: the work took too long.
        """
        if size and self._num_pending >= self._max_waiting:
            raise QueueFull(self._num_pending, 1.0)
        future = (self._large if size > _LARGE_BYTES else self._small).submit(work)
        self._num_pending += 1
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout if size else None)
        except asyncio.TimeoutError:
            raise TimeoutError from None
        finally:
            self._num_pending -= 1
