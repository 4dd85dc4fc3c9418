"""The cost of target forwards on this machine: a table of times, measured once for each model, corrected by each round.

A forward of n tokens on a KV cache of length L costs much less than n forwards of one token. How much less depends on
the machine, the model and L. So the time is measured at a few n and L, and cached on disk.
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
from longdraft.model.load.checkpoints import Progress
from longdraft.model.quant.stored_model import has_stored_weights, is_repacked
from longdraft.model.runner import TargetRunner
from longdraft.trees.masks import make_tree_batch
from longdraft.trees.tree import TokenTree

logger = logging.getLogger(__name__)

# The measured sizes. The time of attention is linear in the length, but noise grows with the distance from the measured
# lengths. With simulated times off by up to 15 percent, the relative cost of 8 tokens behind 16K and 28K was off by 37
# percent in the median without the third length, and by 12 with it. With these sizes a model of 1.5B takes 5 seconds to
# measure (2 CPU cores); more numbers of tokens and repeats gave the same predictions.
NUM_TOKENS = (1, 2, 4, 8, 16, 32)
KV_LENGTHS = (64, 4096, 12288)
# Each length takes CUDA graphs of its own, and whether a third one pays on a GPU was not measured.
_KV_LENGTHS_ON_GPU = KV_LENGTHS[:2]
# Number of measurements of each size. If the first measurement of all sizes takes longer than ENOUGH_SECONDS, there is
# no second one: long forwards vary less.
REPEATS, ENOUGH_SECONDS = 2, 1.0
# After this time measuring stops, and the table has fewer sizes: the model may be large, or the machine busy.
LIMIT_SECONDS = 10.0
# Version of the tables on disk, to be raised when their meaning changes.
_FORMAT = 8
# Number of tokens of the forward that prepares weights if nothing has to be measured.
_WARM_UP_TOKENS = 4
_random = random.Random(0)  # draws the tokens of made-up trees
_SMOOTHING = 0.15  # weight of a new round in running averages
OUTLIER_FACTOR = 2.0  # a new observation counts as at most this multiple of the running average


class ProgressLine(str):
    """A status line of a task that takes seconds. ``share`` is the fraction of the task that is done so far."""

    share: float

    def __new__(cls, line: str, share: float) -> ProgressLine:
        progress_line = super().__new__(cls, line)
        progress_line.share = share
        return progress_line


def fraction_reporter(line: str, progress: Progress | None) -> Callable[[float], None]:
    """Returns a function that reports the fraction of a task that is done, and the status line ``line``."""
    return lambda share: None if progress is None else progress(ProgressLine(line, share))


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward, by the number of its tokens and the KV length.

    Attributes:
        lengths: the measured KV lengths, ascending.
        rows: the measured numbers of tokens of a forward, ascending from 1.
        seconds: seconds[i][j] is the time of a forward of rows[j] tokens at KV length lengths[i].
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        is_shaped = len(self.seconds) == len(self.lengths) and all(len(s) == len(self.rows) for s in self.seconds)
        is_sorted = all(x and x[0] >= 0 and list(x) == sorted({int(n) for n in x}) for x in (self.lengths, self.rows))
        is_plausible = all(0 <= seconds < LIMIT_SECONDS * 1e3 for row in self.seconds for seconds in row)
        if not (is_shaped and is_sorted and is_plausible) or self.rows[0] != 1:
            raise ValueError("a table of costs needs seconds for each KV length and number of tokens, ascending from 1")

    def seconds_at(self, num_tokens: float, kv_len: float) -> float:
        """Returns the seconds of a forward, interpolated linearly between measurements, and extrapolated beyond."""
        return _interpolate(self.lengths, [_interpolate(self.rows, s, num_tokens) for s in self.seconds], kv_len)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    # Noise in the measurements must not let extrapolated costs fall with x, nor make a cost negative.
    return ys[i] + max(slope, 0.0) * (x - xs[i]) if x > xs[-1] else max(ys[i - 1] + slope * (x - xs[i - 1]), 1e-9)


@dataclass
class CostModel:
    """Predicts the seconds of a target forward: seconds of the table x pace of the machine x bias of the table."""

    table: CostTable
    _pace: float = 1.0  # measured seconds / predicted seconds, averaged over recent rounds
    # {(interval of the table, batch size): (the same ratio for such forwards, divided by the pace; times observed)}
    _bias: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def forward_seconds(self, num_tokens: int, kv_lens: Sequence[int]) -> float:
        """Returns the seconds of a forward over ``num_tokens`` tokens of each sequence of a batch."""
        return self._pace * self._bias_of(num_tokens, len(kv_lens))[0] * self._table_seconds(num_tokens, kv_lens)

    def observe(self, num_tokens: int, kv_lens: Sequence[int], seconds: float) -> None:
        """Learns from a round. Other work on the machine changes the pace; an error in the table changes a bias."""
        ratio = seconds / self._table_seconds(num_tokens, kv_lens)
        ratio = min(max(ratio, self._pace / OUTLIER_FACTOR), self._pace * OUTLIER_FACTOR)
        bias, num_observed = self._bias_of(num_tokens, len(kv_lens))
        # The table measures no batches, so the first rounds of a batch size count more than the bias before them.
        weight = _SMOOTHING if len(kv_lens) == 1 else max(_SMOOTHING, 1 / (num_observed + 1))
        new_bias = bias + weight * (ratio / self._pace - bias)
        self._bias[self._interval_index(num_tokens), len(kv_lens)] = (new_bias, num_observed + 1)
        self._pace += _SMOOTHING * (ratio / bias - self._pace)

    def _bias_of(self, num_tokens: int, batch_size: int) -> tuple[float, int]:
        """Returns the bias of a forward, and how often it was observed; or the nearest batch size's bias, and 0."""
        interval = self._interval_index(num_tokens)
        if (interval, batch_size) in self._bias:
            return self._bias[interval, batch_size]
        batch_sizes = [b for i, b in self._bias if i == interval]
        if not batch_sizes:
            return 1.0, 0
        return self._bias[interval, min(batch_sizes, key=lambda b: abs(b - batch_size))][0], 0

    def _table_seconds(self, num_tokens: int, kv_lens: Sequence[int]) -> float:
        # A forward reads the weights once for the tokens of all sequences, and the KV of each sequence separately.
        weights_seconds = self.table.seconds_at(num_tokens * len(kv_lens), 0)
        without_kv = self.table.seconds_at(num_tokens, 0)
        return max(weights_seconds + sum(self.table.seconds_at(num_tokens, n) - without_kv for n in kv_lens), 1e-9)

    def _interval_index(self, num_tokens: int) -> int:
        """Returns the index of the interval between two measured numbers of tokens that ``num_tokens`` falls into."""
        return bisect_right(self.table.rows, num_tokens)


def _filled_store(runner: TargetRunner, kv_len: int, num_tokens: int) -> KVStore:
    """Makes a store of one slot with ``kv_len`` entries, all zeros, and space for ``num_tokens`` more."""
    store = runner.new_store(1, kv_len + num_tokens)
    for layer in range(store.shape.layers):
        for tensor in store.layer(layer):
            tensor.zero_()
    store.lengths[0] = kv_len
    return store


def _time_forward(runner: TargetRunner, store: KVStore, num_tokens: int) -> float:
    """Measures the seconds of a forward over a made-up tree: a chain if the target verifies branches slowly, else a
    tree in which every second node has two children. Tokens are random, as different tokens use different experts."""
    tokens = tuple(_random.randrange(runner.vocab_size) for _ in range(num_tokens))
    parents = tuple(i - 1 if runner.has_recurrent_layers or not i else (i - 1) // 2 * 2 for i in range(num_tokens))
    wait = partial(torch.cuda.synchronize, runner.device) if runner.device.type == "cuda" else lambda: None
    trees = [TokenTree(tokens, parents)]
    for _ in range(runner.graphs.num_warm_up_uses):
        runner.verify(make_tree_batch(store, [0], trees), store)
    wait()
    start = time.perf_counter()
    runner.verify(make_tree_batch(store, [0], trees), store)
    wait()
    return time.perf_counter() - start


def measure(
    runner: TargetRunner,
    kv_lens: Sequence[int] | None = None,
    num_tokens: Sequence[int] = NUM_TOKENS,
    on_progress: Callable[[float], None] = lambda share: None,
    time_forward: Callable[[TargetRunner, KVStore, int], float] = _time_forward,
) -> CostTable | None:
    """Measures the seconds of forwards on a made-up KV cache: for each size the minimum of :data:`REPEATS` forwards.

    Each KV length has an equal part of :data:`LIMIT_SECONDS`. If the time runs out, the table has fewer sizes, and
    costs beyond them are extrapolated.

    Args:
        kv_lens: KV lengths to measure, shortened to the model's context; None: those of this device.
        num_tokens: numbers of tokens of a forward to measure.
        on_progress: called with the fraction of the work that is done.
        time_forward: (runner, store, number of tokens) -> seconds.

    Returns:
        The table, without KV lengths that do not fit the memory; None if not even the shortest fits.
    """
    if kv_lens is None:
        kv_lens = KV_LENGTHS if runner.device.type == "cpu" else _KV_LENGTHS_ON_GPU
    kv_lens = sorted({max(1, min(length, runner.context_length - num_tokens[-1])) for length in kv_lens})
    start = time.perf_counter()
    measured: list[dict[int, float]] = []  # for each KV length, {number of tokens: minimum of seconds}
    for i, length in enumerate(kv_lens):
        try:
            store = _filled_store(runner, length, num_tokens[-1])
        except MemoryBudgetError:
            break
        sizes = list(measured[0] if measured else num_tokens)  # later lengths have the first length's sizes
        length_start = time.perf_counter()
        deadline = start + LIMIT_SECONDS * (i + 1) / len(kv_lens)
        min_seconds: dict[int, float] = {}
        for j, n in enumerate(sizes * REPEATS):
            on_progress((i + j / len(sizes) / REPEATS) / len(kv_lens))
            if j == len(sizes) and time.perf_counter() - length_start > ENOUGH_SECONDS:
                break
            # Expects the time that this size took before, or twice the time of the next smaller size.
            expected = min_seconds.get(n) or (measured[-1][n] if measured else 2 * min_seconds.get(sizes[j - 1], 0.0))
            if time.perf_counter() + expected > deadline and (measured or j > 1):
                break
            seconds = time_forward(runner, store, n)
            min_seconds[n] = min(seconds, min_seconds.get(n, seconds))
        if measured and len(min_seconds) < len(sizes):
            break
        measured.append(min_seconds)
    on_progress(1.0)
    if not measured:
        return None
    # A forward with fewer tokens or a shorter context cannot cost more. If it did, other work on the machine slowed it.
    monotone_seconds = tuple(
        tuple(min(longer[m] for longer in measured[i:] for m in min_seconds if m >= n) for n in min_seconds)
        for i, min_seconds in enumerate(measured)
    )
    return CostTable(tuple(kv_lens[: len(measured)]), tuple(measured[0]), monotone_seconds)


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
        measure_with: function that measures, with the arguments of :func:`measure`.

    Returns:
        The table; None if not even the shortest KV length fits the free memory.
    """
    key = _table_key(runner)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache_folder() / "costs" if folder is None else folder) / f"{digest}.json"
    cached_table = _read(file)
    if cached_table is not None:
        with suppress(MemoryBudgetError):  # the first forward packs weights, which no round's time should include
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


def _table_key(runner: TargetRunner) -> dict[str, object]:
    """Returns everything that measured times depend on. A changed word here would discard all tables on disk."""
    return {
        "format": _FORMAT,
        "rows": "chain" if runner.has_recurrent_layers else "tree",
        "bucket": str(runner.fixed_batch_rows),
        "target": runner.fingerprint,
        "kv": str(runner.kv_dtype),
        "weights": "woven" if is_repacked(runner.model) else "stored" if has_stored_weights(runner.model) else "floats",
        "attention": str(runner.attention_path),
        **({} if runner.allows_fusion else {"fusion": "off"}),
        **({"graphs": "captured"} if runner.graphs.enabled else {}),
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
    """Returns the processor's name from /proc/cpuinfo, or, if that has none, from ``platform``."""
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
