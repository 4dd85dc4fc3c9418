"""benchmarks/gpu.sh in its smallest setting: it runs to the end, finds nothing wrong, and writes what it promises."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
CELLS = {
    "attention": {"path", "dtype", "error", "right"},
    "methods": {"setup", "method", "context_tokens", "samples", "near_ties", "mismatches", "mean_accepted_length"},
    "kernels": {"context", "rows", "path", "ms", "of_bandwidth"},
    "steps": {"setup", "context", "nodes", "budget", "full_ms", "partial_ms"},
    "end_to_end": {"setup", "method", "context_tokens", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf"},
}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_smallest_setting(tmp_path):
    file = tmp_path / "gpu.json"
    ended = subprocess.run(
        ["sh", str(SCRIPT), "--smallest", "--json", str(file)],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-3000:]
    found = json.loads(file.read_text())
    assert set(found) >= {"format", "date", "device", "smallest", "hardware", "versions", "seconds", *CELLS}
    assert found["smallest"] and found["left_out"] == [] and found["skipped"] == {} and found["failed"] == {}
    assert found["hardware"]["cpu"] and found["versions"]["torch"] and found["date"][:2] == "20"
    for part, keys in CELLS.items():
        assert found[part] and all(keys <= set(row) for row in found[part]), part
        assert part in ended.stdout
    assert all(row["right"] for row in found["attention"])
    assert {row["path"] for row in found["attention"]} >= {"cpu", "sdpa"}
    assert {row["method"] for row in found["methods"]} >= {"ar", "prompt-lookup", "specpv-exact"}
    assert not any(row["mismatches"] for row in found["methods"])
    assert all(row["full_ms"] > 0 and row["partial_ms"] > 0 for row in found["steps"])
    assert {row["method"] for row in found["end_to_end"]} >= {"ar", "hf"}
    assert all(row["tokens_per_second"] > 0 for row in found["end_to_end"])
    assert "All right." in ended.stdout and "steps: cpu, 384 tokens" in ended.stderr


def main(tmp_path, monkeypatch, *options: str) -> tuple[int, dict]:
    """The program in this process."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(file), *options])
    code = importlib.import_module("gpu").main()
    return code, json.loads(file.read_text()) if file.exists() else {}


def test_without_time_everything_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    code, found = main(tmp_path, monkeypatch, "--smallest", "--minutes", "0")
    assert code == 0 and all(found[part] == [] for part in CELLS)
    assert {line.partition(":")[0] for line in found["left_out"]} == set(CELLS)
    assert "no time for steps" in capsys.readouterr().out


def test_what_is_wrong_ends_with_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    gpu = importlib.import_module("gpu")
    bad = {"path": "sdpa", "dtype": "float32", "error": 0.3, "right": False}
    monkeypatch.setattr(gpu, "check_attention", lambda *a: [bad])
    code, found = main(tmp_path, monkeypatch, "--smallest", "--minutes", "0")
    assert code == 1 and found["attention"] == [bad]
    assert "sdpa attention in float32: off by 3.0e-01" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(tmp_path, monkeypatch) == (2, {})
    assert "--smallest" in capsys.readouterr().err
