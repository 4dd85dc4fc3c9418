"""Other processes on the cores of a run."""

from __future__ import annotations

import pytest

from longdraft.cli.load import OtherProcesses, Usage


@pytest.mark.parametrize(("others", "cores", "threads", "expected"), [
    (1.0, 2, 2, True), (0.1, 2, 2, False), (1.0, 2, 1, False), (1.5, 2, 1, True), (3.0, 8, 4, False),
])  # fmt: skip
def test_in_the_way(others, cores, threads, expected):
    usage = [Usage(0.0, 100.0, 50.0, cores, threads)]
    seen = OtherProcesses(lambda: usage[-1])
    assert seen.cores == 0.0 and seen.advice is None
    usage.append(Usage(2.0, 100.0 + 2 * (others + threads), 50.0 + 2 * threads, cores, threads))
    assert seen.cores == pytest.approx(others)
    assert (seen.advice is not None) is expected
    if expected:
        assert f"{others:.1f} of {cores} cores" in seen.advice and ("--threads 1" in seen.advice) is (threads == 2)


def test_clocks_of_this_machine():
    before = Usage.read()
    sum(range(10**6))
    after = Usage.read()
    assert after.now > before.now and after.busy >= before.busy > 0 and after.own >= before.own > 0
