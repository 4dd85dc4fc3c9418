"""A whole run of a small language model: killed and resumed, on disk, trained further; what is learned; the command."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft.cli.main import main
from longdraft.drafts import draft_folder
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training.config import LmConfig
from longdraft.training.lm import train_lm
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import checkpoint_tensors, losses_of, run_elsewhere


@pytest.fixture
def config(target: Path, text: Path, tmp_path: Path) -> Callable[..., LmConfig]:
    """Settings of a run of a dozen steps in float32 on the CPU."""

    def make(**over: object) -> LmConfig:
        settings: dict[str, object] = {
            "data": (str(text),), "target": str(target), "out": str(tmp_path / "run"), "max_length": 64,
            "min_length": 16, "rows": 256, "epochs": 1.0, "lr": 3e-3, "layers": 2,
            "precision": "no", "held_out": 0.1, "save_every": 3,
            "measure_every": 5, "intermediate_size": 64, "device": "cpu", "threads": 1,
        }  # fmt: skip
        return LmConfig(**(settings | over))  # type: ignore[arg-type]

    return make


def steps(config):
    return list(train_lm(config))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_a_draft(config, target, tmp_path):
    reports = steps(config(epochs=2.0, precision="bf16", vocabulary=40, cache=str(tmp_path / "cache")))
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert set(reports[-1].agreement) == {1} and reports[-1].agreement[1] > reports[0].agreement[1]
    found = reports[-1].simulated
    assert found is not None and found.tree >= found.chain > 1
    weights = checkpoint_tensors(tmp_path / "run", reports[-1].step)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    for name in ("best", "last"):
        contents = draft_folder.load(tmp_path / "run" / name)
        assert contents.kind == "small-lm" and contents.config["model"]["num_hidden_layers"] == 2
        assert {t.dtype for n, t in contents.tensors.items() if n != "d2t"} == {torch.bfloat16}
        draft = SmallLMDraft.load(tmp_path / "run" / name)
        assert (draft.vocabulary, draft.trained_length) == (40, 64)
        model = TargetRunner(load(str(target)).model)
        assert draft.bound(model).runner.vocab_size == 40


def test_killed_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path):
    whole = config(out=str(tmp_path / "whole"), cache=str(tmp_path / "cache"))
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), cache=str(tmp_path / "cache2"))
    killed = run_elsewhere(cut, "checkpoint", "6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(cut)[0].step == 4
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    there, here = (draft_folder.load(tmp_path / run / "last").tensors for run in ("whole", "cut"))
    assert same(there, here) and "d2t" not in here
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


@pytest.fixture
def answers(tmp_path):
    """Prompts with an answer: two that are short enough to be learned whole, and two that are cut."""
    path = tmp_path / "answers.jsonl"
    rows = [{"tokens": [5 + (i + k) % 40 for k in range(n)], "start": s}
            for i, (n, s) in enumerate([(40, 25), (50, 10), (100, 80), (90, 9)])]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("prompts", "rows"), [(True, 39 + 49 + 20 + 63), (False, 15 + 40 + 20 + 63)])
def test_what_is_learned_of_answers(config, answers, tmp_path, prompts, rows):
    """Prompts are learned where they are whole; of what is too long, the end is kept."""
    seen = []
    run = config(data=(str(answers),), held_out=0.0, learn_prompts=prompts, rows=1000, cache=str(tmp_path / "cache"))
    for _ in train_lm(run, lambda what, done, total: seen.append(what)):
        pass
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert sorted(index["lengths"]) == [40, 50, 64, 64]
    assert sum(n - s for n, s in zip(index["lengths"], index["starts"], strict=True)) == rows
    assert seen[1] == "4 documents, 0 held out; left out: none"
    size = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors"))
    assert size < 218 * 4 + rows * 6 * 8 + 1000  # predictions and the text alone


def test_a_cache_of_another_kind_is_refused(config, tmp_path):
    steps(config(cache=str(tmp_path / "cache"), epochs=0.1))
    path = tmp_path / "cache" / "index.json"
    index = json.loads(path.read_text())
    assert index.pop("reads") == "text"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="holds features of other documents"):
        steps(config(cache=str(tmp_path / "cache"), out=str(tmp_path / "b"), epochs=0.1))


def test_trained_further_on_longer_text(config, tmp_path):
    steps(config(vocabulary=40))
    first = tmp_path / "run" / "last"
    further = config(init=str(first), out=str(tmp_path / "b"), max_length=128, layers=7, rope_theta=5.0, lr=1e-5)
    begun = next(train_lm(further))
    assert begun.loss < 1.2 * losses_of(tmp_path / "run")[-1]
    steps(further)
    there, here = (draft_folder.load(folder).config for folder in (first, tmp_path / "b" / "last"))
    assert here["model"] == there["model"] | {"max_position_embeddings": 128}
    assert (here["draft_vocab_size"], here["trained_length"]) == (40, 128)


def test_drafts_that_cannot_be_trained_further(config, tmp_path):
    steps(config(epochs=0.2))
    init = tmp_path / "run" / "last"
    wide = tmp_path / "wide"
    tiny_model(hidden=96).save_pretrained(wide)
    tiny_tokenizer(chat=True).save_pretrained(wide)
    with pytest.raises(CheckpointError, match="made for another target: hidden_size 48"):
        steps(config(target=str(wide), init=str(init), out=str(tmp_path / "b")))
    described = json.loads((init / "config.json").read_text())
    (init / "config.json").write_text(json.dumps(described | {"drafter": "longspec"}))
    with pytest.raises(CheckpointError, match="holds a draft for longspec"):
        steps(config(init=str(init), out=str(tmp_path / "b")))


def test_starting_from_layers_of_the_target(config):
    begun = next(train_lm(config(start_from=(0, 2), intermediate_size=None)))
    assert begun.step == 1
    with pytest.raises(ConfigError, match="Leave start_from out, or intermediate_size"):
        steps(config(start_from=(0, 2)))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"anchor_offset": 5}, "anchor_offset is for drafts that read the target"),
        ({"start_from": (0,)}, "names 1 layers for a draft of 2"),
        ({"start_from": (0, 1), "init": "x"}, "give one of the two"),
        ({"layers": 0}, "layers must be positive"),
    ],
)
def test_settings_that_do_not_go_together(config, over, said):
    with pytest.raises(ConfigError, match=said):
        config(**over)


def test_the_command(target, text, tmp_path, capsys):
    words = ["max_length=64", "min_length=16", "rows=256", "precision=no", "intermediate_size=64", "layers=1",
             "device=cpu", "threads=1", "held_out=0.2", "epochs=0.5"]  # fmt: skip
    out = tmp_path / "run"
    assert main(["train", "lm", *words, f"data={text}", f"target={target}", f"out={out}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["draft"] == str(out / "best")
    for said in ("documents", "loss", "agreement", "tokens/s", "simulated acceptance"):
        assert said in printed.err
    assert main(["train", "lm"]) == 2
    assert "No data" in capsys.readouterr().err
