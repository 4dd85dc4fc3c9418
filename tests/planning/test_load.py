"""Other processes on the cores of a run."""

from __future__ import annotations

import psutil
import pytest
import torch

from longdraft.planning import load
from longdraft.planning.load import OtherProcesses


@pytest.mark.parametrize(("others", "cores", "threads", "expected"), [
    (1.0, 2, 2, True), (0.1, 2, 2, False), (1.0, 2, 1, False), (1.5, 2, 1, True), (3.0, 8, 4, False),
])  # fmt: skip
def test_in_the_way(monkeypatch, others, cores, threads, expected):
    clock = {"now": 0.0, "busy": 100.0, "own": 50.0}
    monkeypatch.setattr(load.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(load, "_busy", lambda: clock["busy"])
    monkeypatch.setattr(load, "_own", lambda: clock["own"])
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen = OtherProcesses()
    assert seen.cores == 0.0 and not seen.in_the_way
    clock.update(now=2.0, busy=100.0 + 2 * (others + threads), own=50.0 + 2 * threads)
    assert seen.cores == pytest.approx(others) and seen.in_the_way is expected
    assert (seen.advice is not None) is expected
    if expected:
        assert f"{others:.1f} of {cores} cores" in seen.advice and ("--threads 1" in seen.advice) is (threads == 2)


def test_clocks_of_this_machine():
    before = load._busy(), load._own()
    sum(range(10**6))
    assert load._busy() >= before[0] > 0 and load._own() >= before[1] > 0
