"""Measures which attention path is the fastest on this GPU, once, when a target is first loaded.

All paths get the same random tensors: one row, a tree of 16 and a tree of 64 behind 16,384 keys, and a tree of 64
behind 61,440, which takes arithmetic more than reading. The geometric mean of the four times decides. A path that
raises, or whose output differs from torch's masked attention, is not used. All paths are run before the first is timed:
the first runs compile, load libraries and wake the GPU.
"""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from longdraft.attention import sdpa
from longdraft.attention.block import Block
from longdraft.attention.measurement_cache import MeasurementCache
from longdraft.attention.reference import Attend
from longdraft.errors import reason_of

logger = logging.getLogger("longdraft")

# Query and KV heads as in a model with 8B parameters.
HEADS = (32, 8)
# Rows of the tree, and of the prefix.
CASES = ((1, 16384), (16, 16384), (64, 16384), (64, 61440))
RUNS = 5
# The largest difference from masked attention, over its largest output. 16-bit rounding causes a tenth of it.
OFF = 0.05

# A path's name -> seconds of its attention in each of CASES. It raises if the path does not run here.
Measure = Callable[[str], Sequence[float]]


@dataclass(frozen=True)
class Kind:
    """Everything that the times depend on.

    Attributes:
        device: the GPU's name.
        paths: paths that can run here, in the order in which they are tried.
        versions: package -> version, for torch and the packages of the paths.
    """

    device: str
    head_dim: int
    dtype: str
    paths: tuple[str, ...]
    versions: dict[str, str]


class Fastest:
    """Times of the attention paths, kept in memory and on disk.

    Args:
        folder: where they are saved; None for the package's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # Raise the version when times mean something else than before, or a path has changed.
        self._cache = MeasurementCache("attention", 3, folder)
        self._known: dict[str, dict[str, float]] = {}

    def known(self, kind: Kind) -> dict[str, float] | None:
        """Seconds by path, infinite for a path that does not work; None if nothing was measured."""
        if repr(kind) not in self._known:
            seconds = self._cache.load(kind)
            if not isinstance(seconds, dict) or not seconds or set(seconds) != set(kind.paths):
                return None
            if not all(type(s) is float for s in seconds.values()):
                return None
            self._known[repr(kind)] = seconds
        return self._known[repr(kind)]

    def find(self, kind: Kind, measure: Measure) -> dict[str, float]:
        """Measures all paths, each after all have run once, and returns the same as :meth:`known`.

        Raises:
            torch.OutOfMemoryError: there is no memory to measure; nothing is saved.
        """
        seconds: dict[str, float] = {}
        for _ in ("warm-up", "measurement"):
            for path in kind.paths:
                if seconds.get(path) != math.inf:
                    seconds[path] = _mean_of(measure, path)
        times = ", ".join(f"{path} {1e6 * s:.0f} us" for path, s in seconds.items())
        logger.info("attention paths on %s (head size %d, %s): %s", kind.device, kind.head_dim, kind.dtype, times)
        self._known[repr(kind)] = seconds
        if not all(math.isinf(s) for s in seconds.values()):
            self._cache.save(kind, seconds)
        return seconds


def _mean_of(measure: Measure, path: str) -> float:
    """The geometric mean of a path's times; infinite if it does not work here."""
    try:
        return math.exp(statistics.fmean(math.log(s) for s in measure(path)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, a driver or a package may fail in any way
        logger.warning("The %s attention does not work on this machine (%s).", path, reason_of(error))
        return math.inf


def on_gpu(device: torch.device, dtype: torch.dtype, head_dim: int, modules: dict[str, str]) -> Measure:
    """Returns a function that measures a path on a GPU.

    Args:
        modules: a path's name -> its module.
    """
    cases = [_case(rows, keys, device, dtype, head_dim) for rows, keys in CASES]
    scale = head_dim**-0.5
    with torch.inference_mode():
        expected = [sdpa.attend(*case, scale).float() for case in cases]

    @torch.inference_mode()
    def measure(path: str) -> list[float]:
        attend: Attend = importlib.import_module(modules[path]).attend
        for case, right in zip(cases, expected, strict=True):  # also compiles
            off = float((attend(*case, scale).float() - right).abs().max() / right.abs().max())
            if not off <= OFF:
                raise ArithmeticError(f"with {case[-1].size} rows its output is off by {off:.1%}")
        return [_seconds(partial(attend, *case, scale), device) for case in cases]

    return measure


def _case(
    rows: int, length: int, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block]:
    """q, keys, values, and a block with a binary tree of so many rows behind a prefix of ``length``."""
    g = torch.Generator(device).manual_seed(rows)
    heads, kv_heads = HEADS
    q, keys, values = (
        torch.randn(1, h, n, head_dim, generator=g, device=device, dtype=dtype)
        for h, n in ((heads, rows), (kv_heads, length + rows), (kv_heads, length + rows))
    )
    mask = torch.eye(rows, dtype=torch.bool, device="cpu")
    for i in range(1, rows):
        mask[i] |= mask[(i - 1) // 2]
    return q, keys, values, Block.make([0], [length], rows, mask.unsqueeze(0), device)


def _seconds(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Median GPU time of a few runs, recorded as a graph as verifications are, without the host's time."""
    times = []
    with torch.cuda.device(device):
        run = _recorded(call)
        run()  # the first run of a graph loads it
        for _ in range(RUNS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph; the call itself if it cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        logger.info("attention is timed without a graph (%s)", reason_of(error))
        return call
    return graph.replay
