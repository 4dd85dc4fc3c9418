"""Every file in ``examples/`` that does something by itself runs to its end, at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "tests" / "golden" / f"{name}.txt" for name in ("alice", "minutes", "shelf")]
# By file: its words, and what it says at the end.
RUN: dict[str, tuple[list[object], str]] = {
    "summarise_book.py": ([TEXTS[0], "--part", 120, "--tokens", 16], "were drafted and found right"),
    "acceptance_by_length.py": ([TEXTS[0], "--lengths", "100,200", "--tokens", 16], "prompt-lookup"),
    "partial_verification.py": ([TEXTS[0], "--budgets", "160,192", "--tokens", 24], "Budget 192"),
    "last_seen.py": ([], "The same tokens: True"),
    "train_a_draft.py": ([*TEXTS, "--answers", 2, "--epochs", 1], "eagle3:draft=my-draft/eagle3/best"),
    "transformers_generate.py": ([], "Same tokens as generate alone: True"),
    "temperature_zero.py": ([], "custom_generate the same tokens: True"),
    "recurrent_drafter.py": ([], "the same tokens as without a draft"),
}
# These are loaded by longdraft, or started by servers and clusters: tests/exact/test_own_methods.py, docs.
OTHERS = {"everything.py", "fastapi_app.py", "ray_train.py"}


def test_each_is_known():
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == RUN.keys() | OTHERS


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_it_runs(name, tmp_path):
    words, said = RUN[name]
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "the same tokens: False" not in done.stdout


@pytest.mark.model
@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "examples" / "three_lines.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The same tokens: True" in done.stdout
