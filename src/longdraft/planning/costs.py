"""The time of target forwards on this machine: a table measured once for each model, corrected by later rounds.

A forward of n tokens on a KV cache of length L costs much less than n forwards of one token. How much less depends on
machine, model and L. So it is measured at a few n and L, and cached on disk.
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

# The measured sizes. Two KV lengths suffice, because the time of attention is linear in the length. Measuring a model
# of 1.5B takes 3 seconds; more sizes and repeats gave the same predictions.
NUM_TOKENS = (1, 2, 4, 8, 16, 32)
KV_LENGTHS = (64, 4096)
# Number of repeats of each measurement. If the first repeat of all sizes takes longer than ENOUGH_SECONDS, there is no
# second one: long forwards vary less.
REPEATS, ENOUGH_SECONDS = 2, 1.0
# Measuring stops after this time with a smaller table, because the model may be large, or the machine busy.
LIMIT_SECONDS = 10.0
# Version of the tables on disk, to be raised when their meaning changes.
_FORMAT = 7
# Number of tokens of the forward that prepares weights if the table is on disk already.
_WARM_UP_TOKENS = 4
_random = random.Random(0)  # draws the tokens of made-up trees
_SMOOTHING = 0.15  # weight of a new round in running averages
OUTLIER_FACTOR = 2.0  # a new observation counts as at most this multiple of the running average


class ProgressLine(str):
    """A status line of a task that takes seconds. ``share``: the fraction of the task that is done."""

    share: float

    def __new__(cls, line: str, share: float) -> ProgressLine:
        progress_line = super().__new__(cls, line)
        progress_line.share = share
        return progress_line


def fraction_reporter(line: str, progress: Progress | None) -> Callable[[float], None]:
    """Returns a function that reports the fraction of a task that is done, with this status line."""
    return lambda share: None if progress is None else progress(ProgressLine(line, share))


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward, by its number of tokens and the KV length.

    Attributes:
        lengths: the measured KV lengths, ascending.
        rows: the measured numbers of tokens of a forward, ascending from 1.
        seconds: seconds[i][j] for lengths[i] and rows[j].
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        is_shaped = len(self.seconds) == len(self.lengths) and all(len(s) == len(self.rows) for s in self.seconds)
        is_sorted = all(x and x[0] >= 0 and list(x) == sorted({int(n) for n in x}) for x in (self.lengths, self.rows))
        is_timed = all(0 <= seconds < LIMIT_SECONDS * 1e3 for row in self.seconds for seconds in row)
        if not (is_shaped and is_sorted and is_timed) or self.rows[0] != 1:
            raise ValueError("a table of costs needs seconds for each KV length and number of tokens, ascending from 1")

    def seconds_at(self, num_tokens: float, kv_len: float) -> float:
        """Seconds of a forward, by linear interpolation between the measurements and extrapolation beyond them."""
        return _interpolate(self.lengths, [_interpolate(self.rows, s, num_tokens) for s in self.seconds], kv_len)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    # Noise in the measurements must not make a longer context cheaper when extrapolated.
    return ys[i] + max(slope, 0.0) * (x - xs[i]) if x > xs[-1] else max(ys[i - 1] + slope * (x - xs[i - 1]), 1e-9)


@dataclass
class CostModel:
    """Predicts the seconds of a target forward: the table's seconds, times the machine's pace and the table's bias."""

    table: CostTable
    _pace: float = 1.0  # ratio of measured and predicted seconds of all recent rounds
    # (column of the table, batch size) -> further ratio for such forwards, and how often it was observed.
    _bias: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def forward_seconds(self, num_tokens: int, kv_lens: Sequence[int]) -> float:
        """Seconds of a forward over ``num_tokens`` tokens of each sequence of a batch with these KV lengths."""
        return self._pace * self._bias_of(num_tokens, len(kv_lens))[0] * self._table_seconds(num_tokens, kv_lens)

    def observe(self, num_tokens: int, kv_lens: Sequence[int], seconds: float) -> None:
        """Learns from a round. Other work on the machine slows all rounds (pace), an error of the table some (bias)."""
        ratio = seconds / self._table_seconds(num_tokens, kv_lens)
        ratio = min(max(ratio, self._pace / OUTLIER_FACTOR), self._pace * OUTLIER_FACTOR)
        bias, count = self._bias_of(num_tokens, len(kv_lens))
        # A batch's seconds are not measured but computed from the table, so its first rounds outweigh the prediction.
        weight = _SMOOTHING if len(kv_lens) == 1 else max(_SMOOTHING, 1 / (count + 1))
        self._bias[self._column(num_tokens), len(kv_lens)] = (bias + weight * (ratio / self._pace - bias), count + 1)
        self._pace += _SMOOTHING * (ratio / bias - self._pace)

    def _bias_of(self, num_tokens: int, batch_size: int) -> tuple[float, int]:
        """The bias of a forward and how often it was observed; if never, the bias of the nearest batch size."""
        column = self._column(num_tokens)
        if (column, batch_size) in self._bias:
            return self._bias[column, batch_size]
        batch_sizes = [b for c, b in self._bias if c == column]
        if not batch_sizes:
            return 1.0, 0
        return self._bias[column, min(batch_sizes, key=lambda b: abs(b - batch_size))][0], 0

    def _table_seconds(self, num_tokens: int, kv_lens: Sequence[int]) -> float:
        # Weights are read once for the tokens of all sequences, a sequence's KV for its own tokens only.
        weights = self.table.seconds_at(num_tokens * len(kv_lens), 0)
        kv = sum(self.table.seconds_at(num_tokens, n) - self.table.seconds_at(num_tokens, 0) for n in kv_lens)
        return max(weights + kv, 1e-9)

    def _column(self, num_tokens: int) -> int:
        """Index of the table's interval that ``num_tokens`` falls into."""
        return bisect_right(self.table.rows, num_tokens)


def _filled_store(runner: TargetRunner, kv_len: int, num_tokens: int) -> KVStore:
    """Makes a store of one slot with ``kv_len`` zero entries, and space for ``num_tokens`` more."""
    store = runner.new_store(1, kv_len + num_tokens)
    for layer in range(store.shape.layers):
        for tensor in store.layer(layer):
            tensor.zero_()
    store.lengths[0] = kv_len
    return store


def _time_forward(runner: TargetRunner, store: KVStore, num_tokens: int) -> float:
    """Seconds of a forward over a made-up draft: a tree with a branch at every second node, or a chain.

    The tokens are random, because a mixture of experts reads more experts for different tokens."""
    tokens = tuple(_random.randrange(runner.vocab_size) for _ in range(num_tokens))
    parents = tuple(i - 1 if runner.branching_is_expensive or not i else (i - 1) // 2 * 2 for i in range(num_tokens))
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
    time_forward: Callable[[TargetRunner, KVStore, int], float] = _time_forward,
) -> CostTable | None:
    """Measures the seconds of forwards on a made-up KV cache: the minimum of some repeats for each size.

    Each KV length has an equal part of :data:`LIMIT_SECONDS`. If the time runs out, the table has fewer sizes, and
    costs beyond them are extrapolated.

    Args:
        kv_lens: KV lengths to measure, shortened to the model's context.
        num_tokens: numbers of tokens of a forward to measure.
        on_progress: called with the fraction of the work that is done.
        time_forward: (runner, store, number of tokens) -> seconds.

    Returns:
        The table, without KV lengths that do not fit the memory; None if not even the shortest fits.
    """
    kv_lens = sorted({max(1, min(length, runner.context_length - num_tokens[-1])) for length in kv_lens})
    start = time.perf_counter()
    table: list[dict[int, float]] = []  # for each KV length, {number of tokens: minimum of seconds}
    for i, length in enumerate(kv_lens):
        try:
            store = _filled_store(runner, length, num_tokens[-1])
        except MemoryBudgetError:
            break
        sizes = list(table[0] if table else num_tokens)  # later lengths have the sizes that the first one had time for
        length_start = time.perf_counter()
        deadline = start + LIMIT_SECONDS * (i + 1) / len(kv_lens)
        min_seconds: dict[int, float] = {}
        for step, n in enumerate(sizes * REPEATS):
            on_progress((i + step / len(sizes) / REPEATS) / len(kv_lens))
            if step == len(sizes) and time.perf_counter() - length_start > ENOUGH_SECONDS:
                break
            # Expects the time that this size took before, or twice the time of the next smaller size.
            expected = min_seconds.get(n) or (table[-1][n] if table else 2 * min_seconds.get(sizes[step - 1], 0.0))
            if time.perf_counter() + expected > deadline and (table or step > 1):
                break
            seconds = time_forward(runner, store, n)
            min_seconds[n] = min(seconds, min_seconds.get(n, seconds))
        if table and len(min_seconds) < len(sizes):
            break
        table.append(min_seconds)
    on_progress(1.0)
    if not table:
        return None
    # A forward with fewer tokens or a shorter context cannot cost more. If it did, other work on the machine slowed it.
    seconds_table = [
        tuple(min(longer[m] for longer in table[i:] for m in min_seconds if m >= n) for n in min_seconds)
        for i, min_seconds in enumerate(table)
    ]
    return CostTable(tuple(kv_lens[: len(table)]), tuple(table[0]), tuple(seconds_table))


def load_or_measure(
    runner: TargetRunner,
    folder: Path | None = None,
    progress: Progress | None = None,
    measure_with: Callable[..., CostTable | None] = measure,
) -> CostTable | None:
    """Returns a target's cost table on this machine: read from disk, or measured and written to disk.

    Args:
        folder: folder of the tables; None: a folder in the package's cache.
        progress: called with a :class:`ProgressLine` while measuring.
        measure_with: replaces :func:`measure`.

    Returns:
        The table; None if not even the shortest KV length fits the free memory.
    """
    key = _key(runner)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache_folder() / "costs" if folder is None else folder) / f"{digest}.json"
    cached_table = _read(file)
    if cached_table is not None:
        with suppress(MemoryBudgetError):  # the first forward packs weights, and this must not count as a round's cost
            _time_forward(runner, _filled_store(runner, 1, _WARM_UP_TOKENS), _WARM_UP_TOKENS)
        return cached_table
    line = f"Measuring what a verification costs on this machine (once a model, {LIMIT_SECONDS:.0f} seconds at most)"
    logger.info(line)
    table = measure_with(runner, on_progress=fraction_reporter(line, progress))
    if table is not None:
        try:
            with atomic_write(file) as partial_file:
                text = json.dumps({"key": key, "table": asdict(table)}, indent=1) + "\n"
                partial_file.write_text(text, encoding="utf-8")
        except CheckpointError as error:
            logger.info("The table of costs cannot be written, and will be measured again next time: %s", error)
    return table


def _key(runner: TargetRunner) -> dict[str, object]:
    """Everything that the measured times depend on. A changed word here would discard all tables on disk."""
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
    """Reads a table from disk; returns None if there is none, or if it cannot be read."""
    try:
        table = read_json(file)["table"]
        return CostTable(tuple(table["lengths"]), tuple(table["rows"]), tuple(map(tuple, table["seconds"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        logger.warning("The table of costs %s cannot be read, and is measured anew: %s.", file, reason_of(error))
        return None


def cpu_name() -> str:
    """Returns the processor's name from /proc/cpuinfo, or else from ``platform``."""
    with suppress(OSError, IndexError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or the CPU's name with torch's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
