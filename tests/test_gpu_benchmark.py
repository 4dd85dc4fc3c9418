"""benchmarks/gpu.sh: its smallest setting runs to the end; stages that break, hang or are cut off cost nothing else."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longdraft import Speculator
from longdraft.drafts import draft_folder
from longdraft.drafts.kinds import kind_of
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.shared_parts import describe
from tests.drafts import random_draft, random_eagle3
from tests.nominal import answer
from tests.quick import slow
from tests.tiny import tiny_model, tiny_tokenizer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
CELLS = {
    "environment": {"name", "value"},
    "race": {"context", "rows", "capacity", "fastest", "sdpa", "cpu"},
    "recorded": {"path", "context", "rows", "capacity", "recorded", "eager_ms", "right"},
    "profile": {"rows", "launches", "products", "attention", "small", "busy_ms", "wall_ms"},
    "rounds": {"model", "method", "context", "room", "step_ms", "round_ms", "tokens_a_round", "speedup_vs_ar"},
    "attention": {"path", "dtype", "lengths", "error", "right"},
    "graphs": {"path", "dtype", "recorded", "nodes", "error", "right"},
    "exact": {"setup", "method", "context_tokens", "samples", "near_ties", "mismatches", "mean_accepted_length"},
    "kernels": {"context", "rows", "path", "ms", "of_bandwidth"},
    "steps": {"setup", "context", "nodes", "budget", "full_ms", "partial_ms", "full_paper_ms", "full_ratio"},
    "texts": {"setup", "method", "context_tokens", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf"},
    "batches": {"setup", "method", "batch", "tokens_per_second"},
    "training": {"draft", "steps", "tokens_per_second"},
    "tables": {"method", "context_tokens", "tokens_per_second", "speedup_vs_ar", "mean_accepted_length"},
}


STAGES = (
    "environment", "probe", "rounds", "correctness", "kernels", "steps", "texts", "batches", "training", "tables",
)  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def result(out: Path, stage: str) -> dict:
    return json.loads((out / f"{stage}.json").read_text())


@pytest.mark.slow
def test_the_smallest_setting(tmp_path):
    out = tmp_path / "results"
    ended = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu.sh"), "--smallest", "--out", str(out)],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-3000:]
    found: dict[str, list[dict]] = {}
    for stage in STAGES:
        one = result(out, stage)
        assert one["state"] == "ended" and not (one["failed"] or one["skipped"] or one["left_out"]), stage
        assert one["header"]["device"] and "torch" in one["header"]["versions"] and one["header"]["date"][:2] == "20"
        for unit in one["units"].values():
            assert "failed" not in unit
            for row in unit.get("rows", []):
                found.setdefault(row["what"], []).append(row)
    for what, keys in CELLS.items():
        assert found[what] and all(keys <= set(row) for row in found[what]), what
    assert {row["path"] for row in found["attention"]} >= {"cpu", "sdpa"}
    assert {row["method"] for row in found["exact"]} >= {"ar", "prompt-lookup", "specpv-exact"}
    assert all(row["right"] for what in ("attention", "graphs", "exact") for row in found[what])
    assert all(row["full_ms"] > 0 and row["partial_ms"] > 0 for row in found["steps"])
    assert {row["method"] for row in found["texts"]} >= {"ar", "hf"}
    assert {row["batch"] for row in found["batches"]} == {1, 2}
    assert {row["method"] for row in found["rounds"]} >= {"longspec", "prompt-lookup"}
    assert {row["room"] for row in found["rounds"]} == {108, 384}
    assert {row["method"] for row in found["tables"]} >= {"ar", "longspec", "specpv:longspec", "magicdec"}
    page = (out / "summary.md").read_text()
    assert "All right." in ended.stdout and page in ended.stdout
    assert page.count("\n## ") == len(CELLS) + 1 and "figures mean nothing" in page


# --- stages that somebody made up, in place of those that measure ---

MADE = """
import os, subprocess, sys, time
from gpu_results import Skipped
from gpu_stages import Part

def part(work, weight=1):
    return Part(f"made:{work}", weight, ("model",), "made:header", "made:healthy")

def header(options):
    return {"device": "made up", "versions": "1", "commit": "abc"}

def healthy(options):
    return not (options.out / "lost").exists()

def rows(unit, options, wrong=False):
    with open(options.out / "log", "a") as file:
        file.write(unit + "\\n")
    return [{"what": "environment", "name": unit, "value": 1, "right": not wrong}]

def good(stage, options):
    stage.measure("good 1", lambda: rows("good 1", options))
    stage.measure("good 2", lambda: rows("good 2", options))

def wrong(stage, options):
    stage.measure("off", lambda: rows("off", options, wrong=True))

def skips(stage, options):
    raise Skipped("give --this")

def breaks(stage, options):
    stage.measure("first", lambda: rows("first", options) if (options.out / "repaired").exists() else 1 / 0)
    stage.measure("second", lambda: rows("second", options))

def dies(stage, options):
    stage.measure("death", lambda: rows("death", options) if (options.out / "repaired").exists() else os._exit(9))
    stage.measure("after death", lambda: rows("after death", options))

def stopped_early(stage, options):
    os._exit(3)

def hang(options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (options.out / "child").write_text(str(child.pid))
    (options.out / "hanging").write_text(str(os.getpid()))
    time.sleep(600)

def hangs(stage, options):
    stage.measure("before", lambda: rows("before", options))
    stage.measure("endless", lambda: hang(options))
    stage.measure("after", lambda: rows("after", options))

def loses(stage, options):
    def lose():
        (options.out / "lost").touch()
        raise RuntimeError("an illegal memory access")
    stage.measure("illegal", lose)
    (options.out / "lost").unlink(missing_ok=True)
    stage.measure("legal", lambda: rows("legal", options))

STAGES = {name: part(name) for name in os.environ["MADE"].split()}
"""


def start(tmp_path, stages: str, *words: str) -> subprocess.Popen:
    (tmp_path / "made.py").write_text(MADE)
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smallest", "--stages", "made", "--out", "out", *words]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": paths, "MADE": stages},
        cwd=tmp_path,
        # No pipe: what a killed run leaves behind could hold it open.
        stdout=(tmp_path / "said").open("w"),
        stderr=subprocess.STDOUT,
    )


def run(tmp_path, stages: str, *words: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    code = start(tmp_path, stages, *words).wait(timeout=60)
    return code, (tmp_path / "said").read_text()


def log(tmp_path) -> list[str]:
    """Units that measured something, in order."""
    return (tmp_path / "out" / "log").read_text().splitlines()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet is no more than a number."""
    for _ in range(100):
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_what_breaks_hangs_or_dies_is_named_and_the_rest_goes_on(tmp_path):
    stages = "breaks dies hangs stopped_early skips good"
    code, said = run(tmp_path, stages, "--patience", "1")
    out = tmp_path / "out"
    assert code == 1 and log(tmp_path) == ["second", "after death", "before", "after", "good 1", "good 2"]
    for line in ("ZeroDivisionError", "death: its process ended with code 9", "endless: ended: it hung", "give --this",
                 "stopped_early: its process ended with code 3"):  # fmt: skip
        assert line in said, said
    assert all(gone(int((out / name).read_text())) for name in ("child", "hanging"))
    # A second call tries again what broke, but not what hung; and nothing that has a result.
    (out / "log").unlink()
    (out / "repaired").touch()
    code, said = run(tmp_path, stages)
    assert code == 1 and log(tmp_path) == ["first", "death"]
    assert "endless" in said and "ZeroDivisionError" not in said
    (out / "log").unlink()
    code, _ = run(tmp_path, "hangs breaks", "--again", "hangs", "--patience", "1")
    assert code == 1 and log(tmp_path) == ["before", "after"]


@pytest.mark.parametrize("how", [slow(signal.SIGKILL), signal.SIGTERM])
def test_a_run_that_is_killed_leaves_what_it_has_and_nothing_running(tmp_path, how):
    process = start(tmp_path, "good hangs")
    hanging = tmp_path / "out" / "hanging"
    for _ in range(300):
        if hanging.exists():
            break
        time.sleep(0.05)
    process.send_signal(how)
    code, child = process.wait(timeout=30), int((tmp_path / "out" / "child").read_text())
    if how == signal.SIGTERM:
        assert code == 128 + how and "cut off during endless" in (tmp_path / "said").read_text()
    assert gone(child) and gone(int(hanging.read_text()))
    found = result(tmp_path / "out", "hangs")
    assert found["state"] == "running" and found["under_way"] == "endless" and list(found["units"]) == ["before"]
    code, said = run(tmp_path, "good hangs", "--patience", "1")
    assert code == 1 and "it hung" in said and log(tmp_path) == ["good 1", "good 2", "before", "after"]


@pytest.mark.slow
def test_time_that_is_up_is_no_fault_and_another_call_goes_on(tmp_path):
    code, said = run(tmp_path, "good hangs", "--minutes", "0.075")
    assert code == 3 and "no time for endless (ended: its time was up)" in said and "Left to measure: hangs" in said
    assert result(tmp_path / "out", "hangs")["units"]["before"]["rows"]
    assert run(tmp_path, "good", "--minutes", "0")[0] == 0  # it is all there
    code, said = run(tmp_path, "wrong", "--minutes", "0")
    assert code == 3 and "wrong: not measured" in said


def test_a_lost_gpu_takes_a_new_process(tmp_path):
    code, said = run(tmp_path, "loses")
    assert code == 1 and log(tmp_path) == ["legal"]
    assert "illegal memory access" in said and "answers no more" in said


def test_damaged_results_and_those_of_other_options_are_measured_again(tmp_path):
    assert run(tmp_path, "good")[0] == 0
    file = tmp_path / "out" / "good.json"
    file.write_text(file.read_text()[:100])
    code, said = run(tmp_path, "good")
    assert code == 0 and "put aside as good.json.damaged" in said and len(log(tmp_path)) == 4
    assert run(tmp_path, "good", "--model", "another")[0] == 0 and len(log(tmp_path)) == 6
    code, said = run(tmp_path, "good", "--summary")
    assert code == 0 and "good 2" in said and len(log(tmp_path)) == 6
    assert run(tmp_path, "good", "--again", "none")[0] == 2


def test_what_is_wrong_ends_with_code_1(tmp_path):
    code, said = run(tmp_path, "wrong")
    assert code == 1 and "WRONG: wrong, off:" in said
    assert run(tmp_path, "wrong")[0] == 1 and log(tmp_path) == ["off"]


def test_only_some_stages(tmp_path):
    code, said = run(tmp_path, "good wrong breaks", "--only", "good")
    assert code == 0 and log(tmp_path) == ["good 1", "good 2"] and "wrong: not measured" in said
    assert run(tmp_path, "good", "--only", "none")[0] == 2


def test_a_summary_of_part_of_the_results(module):
    page = module("gpu_summary").summary({"environment": None, "kernels": None})
    assert "kernels: not measured" in page and "nothing was measured" in page


def test_without_a_gpu_it_says_so(tmp_path, module, monkeypatch, capsys):
    answer(monkeypatch, is_available=False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert module("gpu").main(["--out", str(tmp_path / "out")]) == 2
    assert "--smallest" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_waits_are_counted_as_torch_warns_of_them(module, monkeypatch):
    own, switched = torch.Tensor.tolist, []

    def tolist(self):
        if switched[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return own(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    loaded = LoadedModel(tiny_model(), tiny_tokenizer())
    found = module("gpu_correctness").counted(loaded, "ar", 8, switched.append)
    assert found["rounds"] > 3 and found["waits"] == 1 and switched == ["warn", "default"]


@torch.inference_mode()
def test_a_padded_model_and_its_drafts_write_what_the_small_ones_write(module, tmp_path):
    widened, small = module("gpu_widened"), tiny_model(layers=6, vocab=61)
    large = widened.Shape(192, 320, 9, 16, 4, 32)
    device = torch.device("cpu")
    model = widened.widened_model(small, large, 256, device, torch.float32)
    assert widened.Shape.of(model) == large
    ids = torch.tensor([[5, 9, 2, 44, 17, 8, 3, 30]])
    expected, found = small(ids).logits, model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    prompt = [ids[0].tolist() * 3]
    random_draft(tmp_path / "longspec", small)
    random_eagle3(tmp_path / "eagle3", small, heads=6, kv_heads=2, head_dim=16)
    for kind in ("longspec", "eagle3"):
        folder = tmp_path / kind
        draft = kind_of(folder).load(folder)
        contents = widened.widened_draft(draft, 6, large, describe(model))
        draft_folder.save(tmp_path / "padded" / kind, contents)
        a, b = (
            Speculator(kind, target=target, draft=place, plan="fixed").generate(prompt, max_new_tokens=24)[0]
            for target, place in ((small, folder), (model, tmp_path / "padded" / kind))
        )
        assert (a.token_ids, a.rounds, a.drafted) == (b.token_ids, b.rounds, b.drafted)


@pytest.fixture
def h100(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132)
    answer(monkeypatch, get_device_name="NVIDIA H100 80GB HBM3", get_device_properties=properties)


@pytest.mark.usefixtures("h100")
def test_limits_on_paper_for_a_card_that_is_known(module):
    measures, common = module("gpu_measures"), module("gpu_common")
    # docs/gpu.md, "On paper": a plain step at 8,192 tokens takes 4.80 ms.
    assert measures.on_paper_ms(common.Sizes(), torch.device("cuda"), 1, 8192) == pytest.approx(4.80, abs=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("h100")
def test_the_bound_of_the_kernels_for_a_card_that_is_known(module):
    measures, common = module("gpu_measures"), module("gpu_common")
    found = measures.triton_bounds(common.Sizes(contexts=(32768,)), torch.device("cuda"))
    # docs/gpu.md, "Kernels, compiled": 64 nodes take 46.3 microseconds, a row 40.4.
    assert found[32768, 64] == pytest.approx(0.0463, abs=5e-5) and found[32768, 1] == pytest.approx(0.0404, abs=5e-5)
