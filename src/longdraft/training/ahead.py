"""Features read ahead: a thread reads the next batches while the draft learns from one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import torch

from longdraft.training.features import FeatureReader, Features


class FeatureSource(Protocol):
    """The features of a list of documents, from disk or computed when asked for.

    Attributes:
        from_disk: reading does not run the target.
    """

    reader: FeatureReader
    from_disk: bool

    def __getitem__(self, i: int) -> Features: ...

    def batch(self, documents: Sequence[int]) -> list[Features]: ...


class Ahead:
    """Reads features in one thread, in the order of the requests. The order changes nothing of what is read.

    On a GPU the thread has a stream of its own, so the target's forwards run beside the draft's.

    Args:
        batches: how many are read ahead; 0 reads in the calling thread.
    """

    def __init__(self, device: torch.device, batches: int) -> None:
        self.batches = batches
        # The target computes in its own dtype. The thread never leaves this block: leaving the outermost one empties
        # autocast's store of cast weights, which threads share, and the draft's gradients would be summed otherwise.
        self._plain = torch.autocast(device.type, enabled=False)
        self._pool = ThreadPoolExecutor(1, "features", self._plain.__enter__) if batches else None
        self._stream = torch.cuda.Stream(device) if batches and device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def read(self, source: FeatureSource, requests: Iterable[Sequence[int]]) -> Iterator[list[Features]]:
        """The features of each request's documents, in order."""
        if self._pool is None:
            for request in requests:
                with self._plain:
                    features = self._batch(source, request)
                    source.reader.finish()
                yield features
            return
        waiting: deque[Future[list[Features]]] = deque()
        for request in requests:
            waiting.append(self._pool.submit(self._batch, source, request))
            if len(waiting) > self.batches:
                yield self._taken(waiting.popleft())
        while waiting:
            yield self._taken(waiting.popleft())

    def _batch(self, source: FeatureSource, request: Sequence[int]) -> list[Features]:
        if self._stream is None:
            return source.batch(request)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            features = source.batch(request)
            self._stream.synchronize()  # only this thread waits
            return features

    def _taken(self, future: Future[list[Features]]) -> list[Features]:
        features = future.result()
        if self._stream is not None:
            # Or the thread would reuse their memory while the draft's last kernels still read it.
            stream = torch.cuda.current_stream(self._stream.device)
            for tensor in (t for each in features for t in each.tensors):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return features
