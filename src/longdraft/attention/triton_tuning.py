"""Which tiles and how many splits the Triton prefix kernel runs with on this GPU: measured once, and kept on disk.

The best sizes depend on the GPU, the head size, the rows that share a key tile and the dtype, and the result on none of
them. The first attention of a kind tries a few choices on made-up keys, which takes some seconds to compile; a later
process finds the best of them in the cache folder. In a recording, in float32 and where no GPU is, the defaults serve.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from longdraft.attention import kept

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_TUNE"
FOLDER = "triton"
# Raise it when a choice means something else than before.
_FORMAT = 1


@dataclass(frozen=True)
class Choice:
    """How the prefix kernel is launched.

    Attributes:
        block_n: keys of a tile.
        warps, stages: of a program; loads of so many tiles are under way at once.
        waves: programs a processor that the splits make, if the prefix is long enough for so many.
    """

    block_n: int
    warps: int = 4
    stages: int = 2
    waves: int = 2

    def __post_init__(self) -> None:
        powers = all(type(x) is int and x >= 1 and x & (x - 1) == 0 for x in (self.block_n, self.warps))
        if not powers or self.block_n < 16 or not all(type(x) is int and x >= 1 for x in (self.stages, self.waves)):
            raise ValueError(f"no launch of a kernel: {self}")


@dataclass(frozen=True)
class Kind:
    """What a choice is for.

    Attributes:
        device: the GPU's name.
        rows: of a tile of queries, the heads of a group folded into rows.
        triton: its version: another compiler, another choice.
    """

    device: str
    head_dim: int
    rows: int
    dtype: str
    triton: str


# What a tile may be, found by compiling all of them for sm_80, sm_90 and sm_100 (benchmarks/triton_compiled.py).
# More scores than these spill registers. More keys under way, and as many values, would fill a processor's shared
# memory with one program, where two smaller ones have as much under way.
_MAX_SCORES, _MAX_UNDER_WAY = 4096, 16384


def candidates(kind: Kind, default: Choice) -> list[Choice]:
    """Tiles to try, the default first; waves are tried with the best of them. Few: each takes a second to compile."""
    tiles = [
        Choice(n, w, s, default.waves) for n, w, s in ((32, 4, 3), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 3))
    ]
    return [default, *(c for c in tiles if c != default and _fits(kind, c))]


def _fits(kind: Kind, choice: Choice) -> bool:
    """Whether the prefix kernel runs with a choice without spilling registers, and within the shared memory."""
    padded = 1 << (kind.head_dim - 1).bit_length()
    if (kind.rows, choice.block_n, choice.stages) == (32, 64, 3) and padded == 128:
        # For sm_90 ptxas saves registers for four programs a processor and spills; shared memory has room for two.
        return False
    under_way = (choice.stages - 1) * choice.block_n * padded
    return kind.rows * choice.block_n <= _MAX_SCORES and under_way <= _MAX_UNDER_WAY


class Tuning:
    """Choices found so far.

    Args:
        folder: where they are kept; None: in the package's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[Kind, Choice] = {}

    def known(self, kind: Kind) -> Choice | None:
        """The choice that was found here or by an earlier process; None where none was."""
        if kind not in self._known:
            found = _read(kept.file_of(asdict(kind), FOLDER, self._folder), kind)
            if found is None:
                return None
            self._known[kind] = found
        return self._known[kind]

    def find(self, kind: Kind, default: Choice, seconds: Callable[[Choice], float]) -> Choice:
        """The fastest choice, measured now and kept.

        Args:
            seconds: how long the kernel takes with a choice. What it raises says that the choice does not run here.
        """
        logger.info("Tuning attention for %s (rows %d, %s; once)", kind.device, kind.rows, kind.dtype)
        times = {choice: _time(seconds, choice) for choice in candidates(kind, default)}
        best = min(times, key=lambda c: times[c])
        if math.isinf(times[best]):  # nothing could be measured: perhaps another time
            self._known[kind] = default
            return default
        waves = [replace(best, waves=n) for n in (1, 2, 4)]
        times |= {choice: _time(seconds, choice) for choice in waves if choice not in times}
        best = min(waves, key=lambda c: times[c])
        self._known[kind] = best
        file = kept.file_of(asdict(kind), FOLDER, self._folder)
        kept.write(file, asdict(kind), _FORMAT, asdict(best))
        return best


def wanted() -> bool:
    """Whether anything is to be measured: LONGDRAFT_TUNE=0 says no."""
    return os.environ.get(SWITCH, "1") != "0"


def _time(seconds: Callable[[Choice], float], choice: Choice) -> float:
    try:
        return seconds(choice)
    except Exception:  # too much shared memory, or whatever else a compiler does not like about a size
        return math.inf


def _read(file: Path, kind: Kind) -> Choice | None:
    """A kept choice; None where there is none, or one that cannot be read: it is found again."""
    try:
        return Choice(**kept.read(file, asdict(kind), _FORMAT))
    except (ValueError, TypeError):
        return None
