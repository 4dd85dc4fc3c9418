"""Tunes the Triton prefix kernel: the tile sizes and number of splits that are fastest on this GPU.

The best sizes depend on the GPU, the head size, the rows that share a key tile and the dtype; the result does not
depend on them. The first attention of a kind tries a few choices on random keys, which takes some seconds to compile;
later processes read the best one from the cache folder. Without a GPU, in float32 and while a CUDA graph is recorded,
the defaults are used.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from longdraft.attention.measurement_cache import MeasurementCache

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_TUNE"


@dataclass(frozen=True)
class Choice:
    """Launch parameters of the prefix kernel.

    Attributes:
        block_n: keys of a tile.
        warps: warps of a program.
        stages: tiles that a program loads at once.
        waves: programs for each processor, if the prefix is long enough to split so often.
    """

    block_n: int
    warps: int = 4
    stages: int = 2
    waves: int = 2

    def __post_init__(self) -> None:
        powers = all(type(x) is int and x >= 1 and x & (x - 1) == 0 for x in (self.block_n, self.warps))
        if not powers or self.block_n < 16 or not all(type(x) is int and x >= 1 for x in (self.stages, self.waves)):
            raise ValueError(f"not a valid launch of the prefix kernel: {self}")


@dataclass(frozen=True)
class Kind:
    """Everything that the best choice depends on.

    Attributes:
        device: the GPU's name.
        rows: query rows of a tile, with the heads of a group folded into rows.
        triton: version of Triton.
    """

    device: str
    head_dim: int
    rows: int
    dtype: str
    triton: str


# Limits of a tile, found by compiling for sm_80, sm_90 and sm_100 (benchmarks/triton_compiled.py). More scores spill
# registers. More keys and values in flight would fill a processor's shared memory with one program, where two smaller
# programs load as much.
_MAX_SCORES, _MAX_UNDER_WAY = 4096, 16384


def candidates(kind: Kind, default: Choice) -> list[Choice]:
    """Tiles to try, the default first. There are few because each takes a second to compile."""
    tiles = [
        Choice(n, w, s, default.waves) for n, w, s in ((32, 4, 3), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 3))
    ]
    return [default, *(c for c in tiles if c != default and _fits(kind, c))]


def _fits(kind: Kind, choice: Choice) -> bool:
    """True if the prefix kernel neither spills registers nor exceeds the shared memory."""
    padded = 1 << (kind.head_dim - 1).bit_length()
    if (kind.rows, choice.block_n, choice.stages) == (32, 64, 3) and padded == 128:
        # For sm_90 ptxas plans four programs on a processor and spills, though shared memory has room for only two.
        return False
    under_way = (choice.stages - 1) * choice.block_n * padded
    return kind.rows * choice.block_n <= _MAX_SCORES and under_way <= _MAX_UNDER_WAY


class Tuning:
    """The best choices, kept in memory and on disk.

    Args:
        folder: where they are saved; None for the package's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._cache = MeasurementCache("triton", 1, folder)  # raise the version if a choice changes its meaning
        self._known: dict[Kind, Choice] = {}

    def known(self, kind: Kind) -> Choice | None:
        """The choice that this or an earlier process has found; None if there is none."""
        if kind not in self._known:
            try:
                self._known[kind] = Choice(**self._cache.load(kind))
            except (ValueError, TypeError):  # nothing was saved, or no valid choice
                return None
        return self._known[kind]

    def find(self, kind: Kind, default: Choice, seconds: Callable[[Choice], float]) -> Choice:
        """Measures the fastest choice and saves it.

        Args:
            seconds: returns the seconds of the kernel with a choice, or raises if the choice does not run here.
        """
        logger.info("Tuning attention for %s (rows %d, %s; once)", kind.device, kind.rows, kind.dtype)
        times = {choice: _time(seconds, choice) for choice in candidates(kind, default)}
        best = min(times, key=lambda c: times[c])
        if math.isinf(times[best]):  # nothing could be measured; a later process tries again
            self._known[kind] = default
            return default
        waves = [replace(best, waves=n) for n in (1, 2, 4)]
        times |= {choice: _time(seconds, choice) for choice in waves if choice not in times}
        best = min(waves, key=lambda c: times[c])
        self._known[kind] = best
        self._cache.save(kind, asdict(best))
        return best


def wanted() -> bool:
    """False if LONGDRAFT_TUNE=0 switches measurements off."""
    return os.environ.get(SWITCH, "1") != "0"


def _time(seconds: Callable[[Choice], float], choice: Choice) -> float:
    try:
        return seconds(choice)
    except Exception:  # too much shared memory, or any other failure of the compiler
        return math.inf
