"""Work that grows with a request: done in a few threads beside the event loop, which answers everybody meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longdraft.serve.worker import QueueFull

T = TypeVar("T")
# Bytes of a request that counts as large: one of these is prepared at a time, and the others pass it.
_LARGE = 1 << 18


class RequestExecutor:
    """Does work that grows with a request in a few threads beside the event loop, which answers everybody meanwhile.

    Args:
        waiting: how many requests may wait for a thread. seconds: that the work of one may take, waiting included.
    """

    def __init__(self, max_waiting: int, timeout: float) -> None:
        self._waiting, self._seconds = max_waiting, timeout
        self._small, self._large = (ThreadPoolExecutor(n, "longdraft request") for n in (3, 1))
        self._asked = 0

    async def __call__(self, work: Callable[[], T], size: int = 0) -> T:
        """Returns what the work returns.

        Args:
            size: bytes of the request; 0: it is an answer's, which waits as long as it takes.

        Raises:
            QueueFull: too many wait. TimeoutError: it takes too long.
        """
        if size and self._asked >= self._waiting:
            raise QueueFull(self._asked, 1.0)
        future = (self._large if size > _LARGE else self._small).submit(work)
        self._asked += 1
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds if size else None)
        except asyncio.TimeoutError:
            raise TimeoutError from None
        finally:
            self._asked -= 1
