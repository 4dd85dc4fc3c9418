"""Costs of verifications: measured once, kept, and followed as the machine's speed changes."""

from __future__ import annotations

import random
from math import log
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from longdraft.model.runner import TargetRunner
from longdraft.native import library
from longdraft.native.build import load_library, supported_levels
from longdraft.planning import costs
from longdraft.planning.costs import CostModel, CostTable, load_or_measure, measure
from tests.support.tiny import tiny_model

TABLE = CostTable((0, 1000), (1, 2, 8), ((1.0, 1.5, 3.0), (2.0, 3.0, 9.0)))


@example([0.1] * 3 + [10.0] * 3, 1.0, 0.0)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6), st.floats(1, 100), st.floats(0, 10_000))
def test_it_is_linear_between_what_was_measured_and_beyond_and_nothing_is_free(seconds, rows, length):
    assert TABLE.seconds_at(1, 0) == 1.0 and TABLE.seconds_at(8, 1000) == 9.0
    assert TABLE.seconds_at(5, 0) == pytest.approx(2.25)
    assert TABLE.seconds_at(1, 500) == pytest.approx(1.5) and TABLE.seconds_at(2, 2000) == pytest.approx(4.5)
    assert TABLE.seconds_at(14, 0) == pytest.approx(4.5)
    table = CostTable((64, 2048), (1, 2, 8), (tuple(seconds[:3]), tuple(seconds[3:])))
    assert table.seconds_at(rows, length) > 0


def test_a_batch_reads_the_weights_once_and_each_text_once():
    """Three sequences, two rows each: weights for six rows; each text's own share."""
    own = sum(TABLE.seconds_at(2, length) - TABLE.seconds_at(2, 0) for length in (1000, 500))
    assert CostModel(TABLE).forward_seconds(2, [1000, 0, 500]) == pytest.approx(TABLE.seconds_at(6, 0) + own)


def test_it_follows_a_machine_that_slows_down_and_one_odd_round_moves_little():
    seen = CostModel(TABLE)
    seen.observe(1, [0], 1000.0)
    assert seen.forward_seconds(1, [0]) < 1.5
    for _ in range(60):
        seen.observe(1, [0], 3.0)
    assert seen.forward_seconds(1, [0]) == pytest.approx(3.0, rel=0.02)
    # Rounds of other sizes are expected to be slower too, though less surely.
    assert seen.forward_seconds(2, [0]) > 2.0
    for _ in range(200):  # a table that is off for one size is put right there
        seen.observe(1, [0], 1.0)
        seen.observe(2, [0], 3.0)
    assert [seen.forward_seconds(n, [0]) for n in (1, 2)] == pytest.approx([1.0, 3.0], rel=0.05)


def test_a_batch_is_reckoned_until_it_was_seen():
    seen = CostModel(TABLE)
    reckoned = seen.forward_seconds(2, [0] * 4)
    for _ in range(3):
        seen.observe(2, [0] * 4, 1.5 * reckoned)
    assert seen.forward_seconds(2, [0] * 4) == pytest.approx(1.5 * reckoned, rel=0.25)
    # What is known of four is the best guess for three; one sequence was measured.
    assert seen.forward_seconds(2, [0] * 3) > 1.2 * CostModel(TABLE).forward_seconds(2, [0] * 3)
    alone = CostModel(TABLE)
    alone.observe(2, [0], 1.5 * TABLE.seconds_at(2, 0))
    assert alone.forward_seconds(2, [0]) < 1.3 * TABLE.seconds_at(2, 0)


# --- measuring ---


@pytest.fixture
def runner():
    return TargetRunner(tiny_model(context=256))


def test_a_table_rises_with_rows_and_with_text(runner):
    """Of a model, and whatever other work does to single forwards."""
    table = measure(runner, kv_lens=(16, 64, 4096), num_tokens=(1, 2, 4))
    assert table is not None and table.lengths == (16, 64, 252) and table.rows == (1, 2, 4)
    assert all(s[0] > 0 for s in table.seconds)
    times = iter(random.Random(0).choices([1.0, 5.0, 20.0], k=1000))
    table = measure(runner, kv_lens=(16, 32, 64), num_tokens=(1, 2, 4), time_forward=lambda *_: next(times))
    assert all(list(s) == sorted(s) for s in (*table.seconds, *zip(*table.seconds, strict=True)))


def test_noise_moves_the_costs_of_long_texts_little(monkeypatch):
    """Costs are measured on shorter texts than people read. Times of a 1.5B on a CPU, each off by up to 15 percent."""
    runner, errors = TargetRunner(tiny_model(context=32_768)), []
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # a slow machine measures as much

    def seconds(rows: float, length: float) -> float:
        return 0.055 + 0.015 * rows + length * (1.5e-6 + 1.2e-6 * rows)

    for seed in range(20):
        noise = random.Random(seed)

        def noisy(runner, store, rows, noise=noise):
            return noise.uniform(0.85, 1.15) * seconds(rows, store.lengths[0])

        table = measure(runner, time_forward=noisy)
        for length in (16_000, 28_000):
            found = table.seconds_at(8, length) / table.seconds_at(1, length)
            errors.append(abs(log(found * seconds(1, length) / seconds(8, length))))
    assert median(errors) < log(1.2)


@pytest.mark.parametrize("each", [0.5, 3.0])
def test_measuring_ends_in_time(runner, each, monkeypatch):
    """A forward takes half a second, or three seconds: what there is after ten is the table."""
    now = [0.0]

    def slow(runner, store, rows):
        now[0] += each * (1 + rows / 4)
        return each * (1 + rows / 4)

    shares: list[float] = []
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    table = measure(runner, (16, 32), (1, 2, 4, 8, 16), shares.append, slow)
    assert table is not None and len(table.rows) >= 2 and now[0] <= 10.0
    assert all(0.0 <= share <= 1.0 for share in shares) and shares == sorted(shares)
    assert table.seconds_at(8, 16) == pytest.approx(each * 3)  # also where eight rows were not measured


def test_without_memory_there_is_no_table(runner, tmp_path, free_memory):
    free_memory(0)
    assert measure(runner) is None
    assert load_or_measure(runner, tmp_path) is None


def measurements(runner, folder) -> int:
    """How often a table is measured when it is asked for."""
    measured: list[CostTable] = []
    load_or_measure(runner, folder, measure_with=lambda *_, **__: measured.append(TABLE) or TABLE)
    return len(measured)


def test_it_is_measured_once(runner, tmp_path, monkeypatch):
    told: list[str] = []
    table = load_or_measure(runner, tmp_path, told.append)
    assert {*told} and all("Measuring" in line for line in told)
    again = TargetRunner(runner.model)
    assert measurements(again, tmp_path) == 0 and load_or_measure(again, tmp_path) == table
    assert measurements(TargetRunner(tiny_model(context=256, seed=1)), tmp_path) == 1
    monkeypatch.setenv("LONGDRAFT_FUSION", "off")  # the control of a forced path costs more than a user's steps
    assert measurements(TargetRunner(runner.model), tmp_path) == 1
    torch.set_num_threads(2)  # which is as another machine
    assert measurements(again, tmp_path) == 1


@pytest.mark.skipif(len(supported_levels()) < 2, reason="a processor of one instruction set")
def test_other_kernels_are_measured_anew(runner, tmp_path, monkeypatch):
    for level in supported_levels()[-2:]:
        monkeypatch.setattr(library, "load_result", [(library.Kernels(load_library(level), level), None)])
        measurements(runner, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
