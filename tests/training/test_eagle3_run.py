"""A whole EAGLE-3 run: killed and resumed, on two processes, on disk, trained further; what it refuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft.cli.main import main
from longdraft.drafters import draft_folder
from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.drafters.eagle3_draft import Eagle3Draft
from longdraft.errors import CheckpointError, ConfigError
from longdraft.training.config import Eagle3Config
from longdraft.training.eagle3 import default_layers, train_eagle3
from tests.drafts import published_eagle3
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import checkpoint_tensors, losses_of, run_elsewhere


@pytest.fixture
def config(target: Path, text: Path, tmp_path: Path) -> Callable[..., Eagle3Config]:
    """Settings of a run of a dozen steps in float32 on the CPU."""

    def make(**over: object) -> Eagle3Config:
        settings: dict[str, object] = {
            "data": (str(text),), "target": str(target), "out": str(tmp_path / "run"), "max_length": 64,
            "min_length": 16, "rows": 256, "epochs": 0.8, "lr": 3e-3, "ttt": 3, "feature_layers": (0, 1, 2),
            "precision": "no", "held_out": 0.1, "save_every": 3, "vocabulary": 40, "warmup": 0.1,
            "measure_every": 5, "window": 12, "intermediate_size": 64, "device": "cpu", "threads": 1,
        }  # fmt: skip
        return Eagle3Config(**(settings | over))  # type: ignore[arg-type]

    return make


def steps(config):
    return list(train_eagle3(config))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_a_draft(config, tmp_path):
    reports = steps(config(epochs=2.0, precision="bf16", distill=0.2, cache=str(tmp_path / "cache")))
    assert reports[-1].loss < 0.97 * reports[0].loss  # it starts small
    assert set(reports[-1].agreement) == {1, 2, 3}
    assert sum(reports[-1].agreement.values()) > sum(reports[0].agreement.values())
    found = reports[-1].simulated
    assert found is not None and len(found.agreement) == 5 and found.tree >= found.chain > 1
    weights = checkpoint_tensors(tmp_path / "run", reports[-1].step)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    for name in ("best", "last"):
        draft = draft_folder.load(tmp_path / "run" / name)
        assert draft.kind == "eagle3"
        given = draft.config
        block = Eagle3Block(Eagle3Shape(**{n: given[n] for n in Eagle3Shape.__dataclass_fields__}))
        offsets = draft.tensors.pop("d2t")
        block.load_state_dict(draft.tensors)
        assert {t.dtype for t in draft.tensors.values()} == {torch.bfloat16}
        ids = offsets + torch.arange(40)
        assert offsets.dtype == torch.int64 and (ids.diff() > 0).all() and ids[-1] < 61
        assert given["feature_layers"] == [0, 1, 2] and given["draft_vocab_size"] == 40 and given["window"] == 12
        assert given["rope_theta"] == 10000.0 and given["trained_length"] == 64
        assert all(given[n] is None for n in ("rope_factor", "rope_factor_trained", "rope_original_length"))


def test_killed_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path):
    whole = config(out=str(tmp_path / "whole"), cache=str(tmp_path / "cache"), vocabulary=None, epochs=0.4)
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), cache=str(tmp_path / "cache2"))
    killed = run_elsewhere(cut, "checkpoint", "6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(cut)[0].step == 4
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    there, here = (draft_folder.load(tmp_path / run / "last").tensors for run in ("whole", "cut"))
    assert same(there, here) and "d2t" not in here
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


def test_two_processes_are_one_that_accumulates(config, tmp_path):
    # A large eps: AdamW alone would not notice gradients of another scale.
    single = config(out=str(tmp_path / "one"), accumulate=2, epochs=0.6, eps=1e-2, clip=1e3)
    last = steps(single)[-1].step
    double = replace(single, out=str(tmp_path / "two"), accumulate=1)
    done = run_elsewhere(double, processes=2)
    assert done.returncode == 0, done.stderr
    one, two = (checkpoint_tensors(tmp_path / name, last) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=2e-4, atol=2e-6)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)


def test_adapting_to_long_text(config, tmp_path):
    steps(config())
    first = str(tmp_path / "run" / "last")
    long = config(
        out=str(tmp_path / "long"), init=first, max_length=256, rope_factor=4.0, rope_factor_inference=8.0, ttt=4,
        lr=1e-4, window=None, fields_set=("window",), feature_layers=(), vocabulary=None, intermediate_size=None,
    )  # fmt: skip
    begun = next(train_eagle3(long))
    assert begun.loss / 4 < 1.2 * losses_of(tmp_path / "run")[0] / 3
    steps(long)
    given = draft_folder.load(tmp_path / "long" / "last").config
    assert (given["rope_factor"], given["rope_factor_trained"], given["rope_original_length"]) == (8.0, 4.0, 64)
    assert (given["window"], given["trained_length"], given["draft_vocab_size"]) == (None, 256, 40)
    # Once more: the length that is stretched stays that of the first draft.
    again = replace(long, init=str(tmp_path / "long" / "last"), out=str(tmp_path / "again"), epochs=0.2)
    steps(again)
    assert draft_folder.load(tmp_path / "again" / "last").config["rope_original_length"] == 64


def test_drafts_that_cannot_be_trained_further(config, tmp_path):
    steps(config(epochs=0.2))
    init = tmp_path / "run" / "last"
    with pytest.raises(ConfigError, match="reads \\(0, 1, 2\\); leave it out"):
        steps(config(init=str(init), out=str(tmp_path / "b"), feature_layers=(0, 2)))
    wide = tmp_path / "wide"
    tiny_model(hidden=96).save_pretrained(wide)
    tiny_tokenizer(chat=True).save_pretrained(wide)
    with pytest.raises(CheckpointError, match="made for another target: hidden_size 48"):
        steps(config(target=str(wide), init=str(init), out=str(tmp_path / "b")))
    described = json.loads((init / "config.json").read_text())
    (init / "config.json").write_text(json.dumps(described | {"intermediate_size": 65}))
    with pytest.raises(CheckpointError, match="is no EAGLE-3 draft as its config"):
        steps(config(init=str(init), out=str(tmp_path / "b")))
    (init / "config.json").write_text(json.dumps(described | {"drafter": "longspec"}))
    with pytest.raises(CheckpointError, match="holds a draft for longspec, not for eagle3"):
        steps(config(init=str(init), out=str(tmp_path / "b")))


def test_a_published_draft_is_adapted_to_long_text(config, target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    theirs = published_eagle3(tmp_path / "theirs", model, max_position_embeddings=64, **layers)
    more = {"feature_layers": (), "vocabulary": None, "intermediate_size": None, "max_length": 128, "epochs": 0.3}
    steps(config(init=str(theirs), rope_factor=2.0, **more))
    found = Eagle3Draft.load(tmp_path / "run" / "last")
    assert (found.layout, found.layers, found.trained_length, found.reach) == ("longdraft", (0, 1, 2), 128, 128)
    before = Eagle3Draft.load(theirs)
    assert found.shape == before.shape and found.ids is None
    changed = [not torch.equal(found.weights[n], t.bfloat16()) for n, t in before.weights.items()]
    assert any(changed)
    stretched = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    theirs = published_eagle3(tmp_path / "stretched", model, **layers, **stretched)
    with pytest.raises(ConfigError, match=r"stretches its positions \(linear\)"):
        steps(config(init=str(theirs), out=str(tmp_path / "b"), **more))


def test_settings_that_do_not_fit_the_target(config):
    with pytest.raises(ConfigError, match=r"no layers .*set feature_layers"):
        steps(config(feature_layers=()))
    with pytest.raises(ConfigError, match=r"\[1, 3\] are not increasing indices of the target's 3 layers"):
        steps(config(feature_layers=(1, 3)))
    with pytest.raises(ConfigError, match="needs rope_original_length"):
        steps(config(rope_factor=4.0))
    assert default_layers(30) == (1, 14, 26)


def test_the_command(target, text, tmp_path, capsys):
    words = ["max_length=64", "min_length=16", "rows=256", "precision=no", "window=12", "intermediate_size=64",
             "device=cpu", "threads=1", "held_out=0.2", "ttt=2", "feature_layers=[0,1,2]", "epochs=0.5"]  # fmt: skip
    out = tmp_path / "run"
    assert main(["train", "eagle3", *words, f"data={text}", f"target={target}", f"out={out}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["draft"] == str(out / "best")
    for said in ("documents", "loss", "agreement", "tokens/s", "simulated acceptance"):
        assert said in printed.err
    assert main(["train", "eagle3"]) == 2
    assert "No data" in capsys.readouterr().err
