"""benchmarks/real_models.py and arithmetic_quality.py: their cells, tables and files, with stand-ins for llama.cpp."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import longdraft
from longdraft import LoadedModel
from tests.support.tiny import tiny_model, tiny_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stand-ins are scripts with a first line")
# Prints the part of llama-bench's JSON that is read, and records its arguments.
LLAMA_BENCH = """#!{python}
import json, sys
words = sys.argv[1:]
with open({calls!r}, "a") as file:
    print(json.dumps(words), file=file)
print(json.dumps([{{"avg_ts": 50.0, "build_commit": "abc", "build_number": 7, "model_type": "tiny"}}]))
"""


@pytest.fixture
def module(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def loads(monkeypatch):
    """Loads a tiny model for every file, and records the arguments."""
    found = []

    def load(path, **how):
        found.append(how)
        return LoadedModel(stand_in(how.get("arithmetic")), tiny_tokenizer())

    monkeypatch.setattr(longdraft, "load", load)
    return found


def stand_in(arithmetic):
    """A model whose logits differ a little in int8 arithmetic."""
    model = tiny_model(context=768, layers=2)
    if arithmetic == "int8":
        model.lm_head.weight.data.mul_(0.8)[::3].mul_(1.2)
    return model


def script(path, text, **values):
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(0o755)
    return path


@pytest.fixture
def command(tmp_path):
    """Arguments for all rows of the table, with the smallest sizes."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF and so on")
    rows = [{"text": "a few words over and over. " * n} for n in (1, 4, 5, 99)]
    (tmp_path / "texts_1K.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench = script(tmp_path / "llama-bench", LLAMA_BENCH, calls=str(tmp_path / "calls"))
    words = f"--model tiny={tmp_path}/tiny.gguf --llama-bench {bench} --prompts {tmp_path} --json {tmp_path}/out.json"
    words += " --lengths 32 4096 --prompt-lengths 32 --verify-lengths 32 --verify-rows 2 4 --verify-turns 1 --steps 4"
    words += " --new-tokens 8 --data-rows 0 1 2 3 7 --prompt-tokens 64 512 --repeats 1"
    return [*words.split(), "--threads", str(torch.get_num_threads())]


def test_all_rows(module, loads, command, tmp_path, capsys):
    module("real_models").main(command)
    found = json.loads((tmp_path / "out.json").read_text())
    cells = found["cells"]
    assert found["engines"] == {"llama": {"build_commit": "abc", "build_number": 7, "model_type": "tiny"}}
    assert set(cells) == {
        "tiny/plain/32", "tiny/plain/4096", "tiny/prompt/32", "tiny/verify/32", "tiny/default/texts_1K",
    }  # fmt: skip
    for key in ("tiny/plain/32", "tiny/prompt/32"):
        assert cells[key]["ours"] > 0 and cells[key]["llama"] == 50.0
        assert cells[key]["ratio"] == pytest.approx(cells[key]["ours"] / 50)
    assert cells["tiny/plain/4096"]["skipped"] == "the model's context is 768"
    assert set(cells["tiny/verify/32"]["over_step"]) == {"2", "4"}
    text = cells["tiny/default/texts_1K"]
    assert len(text["prompts"]) == 2 and text["different"] == 0 and text["mean_accepted_length"] >= 1
    assert loads[0]["device"] == "cpu" and loads[0]["arithmetic"] is None
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    of = [call[call.index("-p") : call.index("-r")] for call in calls[:2]]
    assert of == [["-p", "0", "-n", "4", "-d", "32"], ["-p", "32", "-n", "0"]]
    shown = capsys.readouterr().out
    assert "the model's context is 768" in shown and "llama abc 7 tiny" in shown
    assert "bonus included" in shown and "threads of" in shown
    module("real_models").main(command)  # what is finished is kept
    assert len((tmp_path / "calls").read_text().splitlines()) == len(calls)
    assert "tiny/prompt/32: kept" in capsys.readouterr().out


def test_quality(module, loads, monkeypatch, tmp_path, capsys):
    quality = module("arithmetic_quality")
    monkeypatch.setattr(quality, "SCORED", 32)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF and so on")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a few words over and over. " * 20}) + "\n")
    ids = torch.tensor(tiny_tokenizer()("a few words over and over. " * 20)["input_ids"][:128]).view(2, 64)
    with torch.no_grad():
        p, q = (stand_in(kind)(ids).logits[:, 32:63].flatten(0, 1).double() for kind in (None, "int8"))
    apart = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    alike = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    expected = {"mean": float(apart.mean()), "p99": float(apart.quantile(0.99)), "top1": alike, "rows": 62}
    assert expected["mean"] > 0.01 and expected["top1"] < 1
    words = f"--model tiny={tmp_path}/tiny.gguf --texts {tmp_path}/texts.jsonl --rows 0 --windows 2 --window 64 "
    words += f"--json {tmp_path}/out.json"
    quality.main([*words.split(), "--threads", str(torch.get_num_threads())])
    found = json.loads((tmp_path / "out.json").read_text())["models"]["tiny"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert [how["arithmetic"] for how in loads if "arithmetic" in how] == ["float32", "int8"]
    assert "tiny: mean 0." in capsys.readouterr().out
