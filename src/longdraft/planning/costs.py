"""The costs of verifications on this machine: a table measured once a model, and the machine's present speed.

A forward of n rows on L tokens of text costs much less than n forwards of one row. How much less depends on machine,
model and L, and no formula gives it. So it is measured at a few n and L, and kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from longdraft import native
from longdraft.errors import CheckpointError, MemoryBudgetError, reason_of
from longdraft.files import atomic_write, read_json
from longdraft.folders import cache_folder
from longdraft.memory.store import KVStore
from longdraft.model.checkpoints import Progress
from longdraft.model.runner import TargetRunner
from longdraft.model.stored_model import has_stored_weights, is_repacked
from longdraft.trees.masks import make_tree_batch
from longdraft.trees.tree import TokenTree

logger = logging.getLogger(__name__)

# What is measured: rows of a forward, and tokens of text, with which attention's time grows evenly. On a model of 1.5B
# that is over after 3 seconds, and says what more rows, lengths and turns said.
NUM_TOKENS = (1, 2, 4, 8, 16, 32)
KV_LENGTHS = (64, 4096)
# How often; a turn through all sizes is repeated only if it took so many seconds at most, because long forwards differ
# less from each other. The first forward of all also prepares weights.
REPEATS, ENOUGH_SECONDS = 2, 1.0
# Measuring ends after this many seconds with what there is by then: the model may be large, or the machine busy.
LIMIT_SECONDS = 10.0
# Version of the tables on disk: raise it when one means something else than before.
_FORMAT = 7
# Rows of a forward that wakes a model up.
_WAKING = 4
# Of the made-up trees.
_tokens = random.Random(0)
# Weight of a new round in the estimate of the machine's present speed, and the factor by which one may seem off.
_FOLLOW, OUTLIER_FACTOR = 0.15, 2.0


class ProgressLine(str):
    """A line of text about something that takes seconds, with the share of it that is done."""

    share: float

    def __new__(cls, line: str, share: float) -> ProgressLine:
        made = super().__new__(cls, line)
        made.share = share
        return made


def fraction_reporter(line: str, progress: Progress | None) -> Callable[[float], None]:
    """Returns a function of the share of a work that is done, which reports it."""
    return lambda share: None if progress is None else progress(ProgressLine(line, share))


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward by rows and tokens of text.

    Attributes:
        lengths: tokens of text, ascending.
        rows: rows of a forward, ascending, the first of them 1.
        seconds: for each length, for each number of rows.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shaped = len(self.seconds) == len(self.lengths) and all(len(s) == len(self.rows) for s in self.seconds)
        sized = all(n and n[0] >= 0 and list(n) == sorted({int(each) for each in n}) for n in (self.lengths, self.rows))
        timed = all(0 <= seconds < LIMIT_SECONDS * 1e3 for row in self.seconds for seconds in row)
        if not (shaped and sized and timed) or self.rows[0] != 1:
            raise ValueError("a table of costs has seconds for each length, and for each number of rows from 1 on")

    def seconds_at(self, num_tokens: float, kv_len: float) -> float:
        """Seconds of a forward of ``num_tokens`` rows on ``kv_len`` tokens; linear between measurements, and beyond them."""
        return _between(self.lengths, [_between(self.rows, s, num_tokens) for s in self.seconds], kv_len)


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    # Noise must not make a long text cheaper than a short one further out.
    return ys[i] + max(slope, 0.0) * (x - xs[i]) if x > xs[-1] else max(ys[i - 1] + slope * (x - xs[i - 1]), 1e-9)


@dataclass
class CostModel:
    """Predicts the seconds of a verification: the table's, times the machine's present pace and the table's bias."""

    table: CostTable
    _pace: float = 1.0
    # (column of the table, sequences) -> factor by which the table is off, and how often that was seen.
    _bias: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def forward_seconds(self, num_tokens: int, kv_lens: Sequence[int]) -> float:
        """Seconds of one forward over ``num_tokens`` rows of each sequence of a batch with these tokens of text."""
        return self._pace * self._bias_of(num_tokens, len(kv_lens))[0] * self._expected(num_tokens, kv_lens)

    def observe(self, num_tokens: int, kv_lens: Sequence[int], seconds: float) -> None:
        """Learns from a round: other work on the machine slows all rounds (pace), a wrong table some (bias)."""
        ratio = seconds / self._expected(num_tokens, kv_lens)
        ratio = min(max(ratio, self._pace / OUTLIER_FACTOR), self._pace * OUTLIER_FACTOR)
        bias, times = self._bias_of(num_tokens, len(kv_lens))
        # A batch was never measured, only computed from the table: its first rounds say more than the table does.
        follow = _FOLLOW if len(kv_lens) == 1 else max(_FOLLOW, 1 / (times + 1))
        self._bias[self._column(num_tokens), len(kv_lens)] = (bias + follow * (ratio / self._pace - bias), times + 1)
        self._pace += _FOLLOW * (ratio / bias - self._pace)

    def _bias_of(self, rows: int, batch: int) -> tuple[float, int]:
        """The bias of a forward, and how often it was seen; if it never was, the bias of the nearest batch size."""
        column = self._column(rows)
        if (column, batch) in self._bias:
            return self._bias[column, batch]
        batches = [b for c, b in self._bias if c == column]
        if not batches:
            return 1.0, 0
        return self._bias[column, min(batches, key=lambda b: abs(b - batch))][0], 0

    def _expected(self, rows: int, lengths: Sequence[int]) -> float:
        # Weights are read once for the rows of all sequences, a sequence's text for its own rows alone.
        shared = self.table.seconds_at(rows * len(lengths), 0)
        texts = sum(self.table.seconds_at(rows, n) - self.table.seconds_at(rows, 0) for n in lengths)
        return max(shared + texts, 1e-9)

    def _column(self, rows: int) -> int:
        return bisect_right(self.table.rows, rows)


def _filled_store(runner: TargetRunner, length: int, rows: int) -> KVStore:
    """A store with a made-up text of zeros, and room for so many rows behind it."""
    store = runner.new_store(1, length + rows)
    for layer in range(store.shape.layers):
        for tensor in store.layer(layer):
            tensor.zero_()
    store.lengths[0] = length
    return store


def _time(runner: TargetRunner, store: KVStore, rows: int) -> float:
    """Seconds of a forward over a chain, or a tree with a branch at every second node, as what is drafted.
    Its tokens differ, as a draft's do: a mixture of experts reads more of them for more tokens."""
    tokens = tuple(_tokens.randrange(runner.vocab_size) for _ in range(rows))
    parents = tuple(i - 1 if runner.branching_is_expensive or not i else (i - 1) // 2 * 2 for i in range(rows))
    wait = partial(torch.cuda.synchronize, runner.device) if runner.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    runner.verify(make_tree_batch(store, [0], [TokenTree(tokens, parents)]), store)
    wait()
    return time.perf_counter() - start


def measure(
    runner: TargetRunner,
    kv_lens: Sequence[int] = KV_LENGTHS,
    num_tokens: Sequence[int] = NUM_TOKENS,
    on_progress: Callable[[float], None] = lambda share: None,
    time_forward: Callable[[TargetRunner, KVStore, int], float] = _time,
) -> CostTable | None:
    """Times forwards on a made-up text, all sizes in turn, and keeps the least times.

    Each length has its share of :data:`LIMIT_SECONDS`. If that is not enough, there are fewer rows or fewer lengths;
    costs beyond these are then extrapolated.

    Args:
        kv_lens: a longer one than the model reads becomes the longest that it does.
        on_progress: called with the share of the work that is over.
        time_forward: returns the seconds of a forward of so many rows on a store.

    Returns:
        None if memory does not even allow the shortest length; lengths that do not fit are left out.
    """
    kv_lens = sorted({max(1, min(length, runner.context_length - num_tokens[-1])) for length in kv_lens})
    start = time.perf_counter()
    table: list[dict[int, float]] = []  # for each length, the least seconds by rows
    for i, length in enumerate(kv_lens):
        try:
            store = _filled_store(runner, length, num_tokens[-1])
        except MemoryBudgetError:
            break
        sizes = list(table[0] if table else num_tokens)
        began = time.perf_counter()
        end = start + LIMIT_SECONDS * (i + 1) / len(kv_lens)
        least: dict[int, float] = {}
        for turn, n in enumerate(sizes * REPEATS):
            on_progress((i + turn / len(sizes) / REPEATS) / len(kv_lens))
            if turn == len(sizes) and time.perf_counter() - began > ENOUGH_SECONDS:
                break
            # The next forward takes what one of this size took, or twice what a smaller one did.
            known = least.get(n) or (table[-1][n] if table else 2 * least.get(sizes[turn - 1], 0.0))
            if time.perf_counter() + known > end and (table or turn > 1):
                break
            seconds = time_forward(runner, store, n)
            least[n] = min(seconds, least.get(n, seconds))
        if table and len(least) < len(sizes):
            break
        table.append(least)
    on_progress(1.0)
    if not table:
        return None
    # Other work on the machine only ever adds, and fewer rows or less text cannot cost more.
    lowest = [
        tuple(min(other[m] for other in table[i:] for m in least if m >= n) for n in least)
        for i, least in enumerate(table)
    ]
    return CostTable(tuple(kv_lens[: len(table)]), tuple(table[0]), tuple(lowest))


def load_or_measure(
    runner: TargetRunner,
    folder: Path | None = None,
    progress: Progress | None = None,
    measure_with: Callable[..., CostTable | None] = measure,
) -> CostTable | None:
    """Returns a target's costs on this machine: read from disk, or measured and kept.

    Args:
        folder: where tables are kept; None: in the package's cache.
        progress: called with a :class:`ProgressLine` now and then while measuring.
        measure_with: measures them as :func:`measure` does.

    Returns:
        None if not even the shortest text fits the free memory.
    """
    key = _key(runner)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache_folder() / "costs" if folder is None else folder) / f"{digest}.json"
    known = _read(file)
    if known is not None:
        with suppress(MemoryBudgetError):  # what the first forward does once (packing weights) is no round's cost
            _time(runner, _filled_store(runner, 1, _WAKING), _WAKING)
        return known
    line = f"Measuring what a verification costs on this machine (once a model, {LIMIT_SECONDS:.0f} seconds at most)"
    logger.info(line)
    table = measure_with(runner, on_progress=fraction_reporter(line, progress))
    if table is not None:
        try:
            with atomic_write(file) as part:
                part.write_text(json.dumps({"key": key, "table": asdict(table)}, indent=1) + "\n", encoding="utf-8")
        except CheckpointError as error:  # it is measured again the next time
            logger.info("The table of costs cannot be kept: %s", error)
    return table


def _key(runner: TargetRunner) -> dict[str, object]:
    """Everything that a table depends on."""
    return {
        "format": _FORMAT,
        "rows": "chain" if runner.branching_is_expensive else "tree",
        "bucket": str(runner.fixed_batch_rows),
        "target": runner.fingerprint,
        "kv": str(runner.kv_dtype),
        "weights": "woven" if is_repacked(runner.model) else "stored" if has_stored_weights(runner.model) else "floats",
        "attention": str(runner.attention_path),
        "kernels": native.unavailable_reason() or native.library_name(),
        "device": device_name(runner.device),
        "torch": torch.__version__,
    }


def _read(file: Path) -> CostTable | None:
    """Reads a kept table; returns None if there is none, or none that can be read."""
    try:
        kept = read_json(file)["table"]
        return CostTable(tuple(kept["lengths"]), tuple(kept["rows"]), tuple(map(tuple, kept["seconds"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        logger.warning("The costs in %s cannot be read, and are measured anew: %s.", file, reason_of(error))
        return None


def cpu_name() -> str:
    """Returns the processor's own name if Linux tells it, else what ``platform`` knows."""
    with suppress(OSError, IndexError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
