"""Other processes on the cores of a run."""

from __future__ import annotations

import psutil
import pytest
import torch

from longdraft.cli.load import OtherProcesses, usage


@pytest.mark.parametrize(("others", "cores", "threads", "expected"), [
    (1.0, 2, 2, True), (0.1, 2, 2, False), (1.0, 2, 1, False), (1.5, 2, 1, True), (3.0, 8, 4, False),
])  # fmt: skip
def test_in_the_way(monkeypatch, others, cores, threads, expected):
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    used = [(0.0, 100.0, 50.0)]
    monkeypatch.setattr("longdraft.cli.load.usage", lambda: used[-1])
    seen = OtherProcesses()
    assert seen.cores == 0.0 and seen.advice is None
    used.append((2.0, 100.0 + 2 * (others + threads), 50.0 + 2 * threads))
    assert seen.cores == pytest.approx(others)
    assert (seen.advice is not None) is expected
    if expected:
        assert f"{others:.1f} of {cores} cores" in seen.advice and ("--threads 1" in seen.advice) is (threads == 2)


def test_clocks_of_this_machine():
    before = usage()
    sum(range(10**6))
    after = usage()
    assert after[0] > before[0] and after[1] >= before[1] > 0 and after[2] >= before[2] > 0
