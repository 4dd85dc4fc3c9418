"""A whole EAGLE-3 run: killed and resumed, on two processes, on disk, trained further; what it refuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.cli.main import main
from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafts import draft_folder
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rotary import yarn
from longdraft.training.config import DEPTH, Eagle3Config
from longdraft.training.eagle3 import Eagle3Trainee, default_layers, train_eagle3
from longdraft.training.session import begin, never, silent
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


KEPT = [i for i in range(61) if i % 3]
# A later run, whose draft brings these.
BROUGHT = {"feature_layers": (), "vocabulary": None, "intermediate_size": None, "window": None}


@pytest.fixture
def theirs(target, tmp_path) -> Callable[..., Path]:
    """Writes a folder as EAGLE-3's authors publish theirs, for the tiny target."""
    model = AutoModelForCausalLM.from_pretrained(target)

    def write(name: str = "theirs", pickled: bool = True, **over: object) -> Path:
        given = {
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "head_dim": 12,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        }  # fmt: skip
        folder = published_eagle3(tmp_path / name, model, KEPT, **(given | over))
        if pickled:
            torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        return folder

    return write


def loss_of(config: Eagle3Config, draft: Eagle3Draft) -> float:
    """A draft's loss on all that a run learns, per learned row, with the positions that it decodes with."""
    session = begin(config, DEPTH, silent, never)
    reader = session.reader(draft.feature_layers(session.runner))
    documents = [reader.read(d).on_host() for d in session.data.learned]
    trainee = Eagle3Trainee(
        draft.trainable(), session.runner.parts, draft.rotary(torch.float32, "cpu"), draft.ids, config.ttt
    ).train()
    rows = sum(trainee.learned(len(d.tokens), d.start, 0) for d in documents)
    with torch.no_grad():
        return float(trainee(documents).loss) / rows


def test_a_published_draft_is_adapted_to_long_text(config, theirs, target, tmp_path):
    """SpecPV's YaRN adaptation, two steps of it: all documents are one batch, so the first loss is the whole text's."""
    init = theirs()
    run = config(init=str(init), rope_factor=4.0, rope_factor_inference=8.0, max_length=192, rows=100_000, epochs=2.0,
                 lr=1e-3, ttt=4, **BROUGHT)  # fmt: skip
    reports = steps(run)
    assert len(reports) == 2
    before = Eagle3Draft.load(init, rope_factor=4.0)
    assert reports[0].loss == pytest.approx(loss_of(run, before), rel=1e-5)
    plain, other = Eagle3Draft.load(init), Eagle3Draft.load(init, rope_factor=4.0)
    other.weights = {name: t[torch.randperm(len(t))] for name, t in other.weights.items()}
    for wrong in (plain, other):  # unstretched, and other weights
        assert abs(loss_of(run, wrong) - reports[0].loss) > 2e-4 * reports[0].loss
    assert reports[1].loss < reports[0].loss

    found = Eagle3Draft.load(tmp_path / "run" / "last")
    assert (found.layout, found.layers, found.trained_length, found.reach) == ("longdraft", (0, 1, 2), 192, 8 * 64)
    assert found.shape == before.shape and found.ids.tolist() == KEPT == before.ids.tolist()
    given = found.config["rope_factor"], found.config["rope_factor_trained"], found.config["rope_original_length"]
    assert given == (8.0, 4.0, 64)
    moved = [(found.weights[n].float() - t.float()).abs().max() for n, t in before.weights.items()]
    assert 0 < max(moved) < 0.05
    model = AutoModelForCausalLM.from_pretrained(target)
    prompts = [[7, 8, 9] * 30, [11, 5]]
    one, two = (
        Speculator(method, target=model, **draft).generate(prompts, max_new_tokens=24)
        for method, draft in (("ar", {}), ("eagle3", {"draft": found, "plan": "fixed"}))
    )
    assert [r.token_ids for r in one] == [r.token_ids for r in two] and sum(r.accepted for r in two) > 0


def test_positions_that_a_published_draft_stretches_are_kept(config, theirs, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    init = theirs(rope_theta=5e5, rope_scaling=scaling)
    run = config(init=str(init), rows=100_000, epochs=1.0, **BROUGHT)
    (report,) = steps(run)
    before, found = Eagle3Draft.load(init), Eagle3Draft.load(tmp_path / "run" / "last")
    assert report.loss == pytest.approx(loss_of(run, before), rel=1e-5)
    assert found.rope == before.rope == scaling | {"rope_theta": 5e5}
    # A factor stands in for it; so does a base.
    again = replace(run, init=str(tmp_path / "run" / "last"), out=str(tmp_path / "b"), rope_factor=2.0, rope_theta=1e4)
    steps(again)
    found = Eagle3Draft.load(tmp_path / "b" / "last")
    assert found.rope == yarn(1e4, 2.0, 32) and "rope_parameters" not in found.config
    # Without one, a draft of ours keeps its own.
    steps(replace(again, init=str(tmp_path / "b" / "last"), out=str(tmp_path / "c"), rope_factor=None, rope_theta=None))
    assert Eagle3Draft.load(tmp_path / "c" / "last").rope == found.rope


def test_published_folders_that_cannot_be_trained_further(config, theirs, target, tmp_path):
    def refused(folder: Path, message: str, **over: object) -> None:
        held = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises((CheckpointError, ConfigError), match=message):
            steps(config(**({"init": str(folder)} | BROUGHT | over)))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == held
        assert not (tmp_path / "run").exists()

    short = theirs("short")
    path = short / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-5000])
    refused(short, "truncated or damaged", target=str(tmp_path / "not read"))
    refused(theirs("wrong", intermediate_size=97), r"\(96, 48\) where config.json asks for \(97, 48\)")
    refused(theirs("other", vocab_size=62), r"vocab_size 62 \(this target: 61\)")
    refused(theirs("deep", eagle_config=None), "must be there and increase")
    refused(theirs("unsaid", max_position_embeddings=None), "set rope_original_length", rope_factor=4.0)
    tensors = torch.load(theirs("first") / "pytorch_model.bin", weights_only=True)
    first = {n.replace("midlayer", "layers.0"): t for n, t in tensors.items() if "norm" not in n}
    torch.save(first, tmp_path / "first" / "pytorch_model.bin")
    refused(tmp_path / "first", "a draft for eagle, not for eagle3")


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
