"""Which attention path is the fastest on this GPU: measured once, when a target is first loaded, and kept on disk.

All paths get the same made-up tensors: a row, and trees of 16 and 64, behind 16,384 keys. What counts is the geometric
mean of the three times. A path that raises, or whose output is not that of the masked attention of torch, is not taken.
"""

from __future__ import annotations

import importlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from longdraft.attention import kept, sdpa
from longdraft.attention.block import Block
from longdraft.errors import reason_of

logger = logging.getLogger("longdraft")

FOLDER = "attention"
# Raise it when figures mean something else than before, or a path has become another.
_FORMAT = 1
# Query and KV heads, keys of the prefix, and rows of the trees that are measured: those of a model with 8B parameters.
HEADS, KEYS, ROWS = (32, 8), 16384, (1, 16, 64)
RUNS = 5
# Seconds after which no further path is tried. Compiling may take one beyond it.
SECONDS = 1.0
# The largest difference from masked attention, as a share of its largest output: 16-bit rounding is a tenth of it.
OFF = 0.05

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Block, float], torch.Tensor]
# A path's name -> seconds of its attention with each of ROWS. What it raises says that the path does not run here.
Measure = Callable[[str], Sequence[float]]


@dataclass(frozen=True)
class Kind:
    """What a choice is for.

    Attributes:
        device: the GPU's name.
        paths: those that can run here, in the order in which they are tried.
        versions: of torch and of the packages that paths are made of.
    """

    device: str
    head_dim: int
    dtype: str
    paths: tuple[str, ...]
    versions: dict[str, str]


@dataclass
class Fastest:
    """What was measured so far.

    Attributes:
        folder: where it is kept; None: in the package's cache.
    """

    folder: Path | None = None
    _known: dict[str, dict[str, float]] = field(default_factory=dict)

    def known(self, kind: Kind) -> dict[str, float] | None:
        """Seconds by path, infinite for one that is not to be taken; None where nothing was measured."""
        file = kept.file_of(_as_json(kind), FOLDER, self.folder)
        if file.name not in self._known:
            found = kept.read(file, _as_json(kind), _FORMAT)
            if not isinstance(found, dict) or not all(type(s) is float for s in found.values()) or not found:
                return None
            if not set(found) <= set(kind.paths):
                return None
            self._known[file.name] = found
        return self._known[file.name]

    def find(self, kind: Kind, measure: Measure, clock: Callable[[], float] = time.monotonic) -> dict[str, float]:
        """Measures the paths, as many as there is time for; as :meth:`known`. Kept where one of them works.

        Raises:
            torch.OutOfMemoryError: that says nothing of a path, and nothing is kept.
        """
        found: dict[str, float] = {}
        start = clock()
        for path in kind.paths:
            if found and clock() - start > SECONDS:
                logger.info("attention paths on %s: no time to try %s", kind.device, path)
                break
            try:
                found[path] = math.exp(statistics.fmean(math.log(s) for s in measure(path)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler, a driver or a package may not like about this GPU
                logger.warning("The %s attention does not work on this machine (%s).", path, reason_of(error))
                found[path] = math.inf
        said = ", ".join(f"{path} {1e6 * s:.0f} us" for path, s in found.items())
        logger.info("attention paths on %s (head size %d, %s): %s", kind.device, kind.head_dim, kind.dtype, said)
        file = kept.file_of(_as_json(kind), FOLDER, self.folder)
        self._known[file.name] = found
        if not all(math.isinf(s) for s in found.values()):
            kept.write(file, _as_json(kind), _FORMAT, found)
        return found


def on_gpu(device: torch.device, dtype: torch.dtype, head_dim: int, modules: dict[str, str]) -> Measure:
    """Measures paths on a GPU.

    Args:
        modules: of the paths' names.
    """
    cases = [_case(rows, device, dtype, head_dim) for rows in ROWS]
    scale = head_dim**-0.5
    with torch.inference_mode():
        expected = [sdpa.attend(q, k, v, block, scale).float() for q, k, v, block in cases]

    @torch.inference_mode()
    def measure(path: str) -> list[float]:
        attend: Attend = importlib.import_module(modules[path]).attend
        for (q, k, v, block), right in zip(cases, expected, strict=True):  # compiles, too
            off = float((attend(q, k, v, block, scale).float() - right).abs().max() / right.abs().max())
            if not off <= OFF:
                raise ArithmeticError(f"with {block.size} rows its output is off by {off:.1%}")
        return [_seconds(partial(attend, *case, scale), device) for case in cases]

    return measure


def _case(
    rows: int, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block]:
    """q, keys, values and a block: a binary tree of so many rows."""
    g = torch.Generator(device).manual_seed(rows)
    heads, kv_heads = HEADS
    q, keys, values = (
        torch.randn(1, h, n, head_dim, generator=g, device=device, dtype=dtype)
        for h, n in ((heads, rows), (kv_heads, KEYS + rows), (kv_heads, KEYS + rows))
    )
    mask = torch.eye(rows, dtype=torch.bool)
    for i in range(1, rows):
        mask[i] |= mask[(i - 1) // 2]
    return q, keys, values, Block.make([0], [KEYS], rows, mask.unsqueeze(0), device)


def _seconds(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """GPU time, median of a few runs; recorded, as verifications are: the host's part is no part of it."""
    times = []
    with torch.cuda.device(device):
        run = _recorded(call)
        for _ in range(RUNS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph; as it is where it cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        logger.info("attention is timed without a graph (%s)", reason_of(error))
        return call
    return graph.replay


def _as_json(kind: Kind) -> dict[str, object]:
    return asdict(kind) | {"paths": list(kind.paths)}
