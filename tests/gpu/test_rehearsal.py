"""What a GPU session runs, rehearsed on a CPU with a tiny shape."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.slow
def test_the_timing_script(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--contexts", "96", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert not [row for row in rows if "failed" in row or "left_out" in row]
    kinds = {"machine", "steps", "bounds", "products", "transformers", "kernels", "rounds", "batches"}
    kinds |= {"kernels of rounds"}
    assert {row["what"] for row in rows} == kinds
    rounds = {row["method"]: row for row in rows if row["what"] == "rounds" and "by_levels" not in row}
    assert {"ar", "longspec", "eagle3", "self", "specpv"} <= set(rounds)
    assert rounds["ar"]["accepted"] == 0 < rounds["longspec"]["accepted"] < rounds["longspec"]["drafted"]


def test_without_a_gpu_the_script_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "none")])
    assert runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))["main"]() == 2
    assert "--tiny" in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_tests_for_a_gpu():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "tests/gpu/test_on_gpu.py"]
    rehearse = ENVIRONMENT | {"LONGDRAFT_TEST_GPU": "rehearse"}
    ended = subprocess.run(command, cwd=ROOT, env=rehearse, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:]
