"""A whole run: killed and resumed, stopped and resumed, on two processes; what it refuses."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft.drafters.longspec import LongSpecDraft
from longdraft.errors import CapabilityError, CheckpointError, NumericalError, PromptError, UnsupportedModelError
from longdraft.training.longspec import train_longspec
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import checkpoint_tensors, losses_of, run_elsewhere


def steps(config):
    return list(train_longspec(config))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_a_draft(config, tmp_path):
    reports = steps(config(epochs=3.0, vocabulary=40))
    assert [r.step for r in reports] == list(range(1, reports[-1].steps + 1))
    assert reports[-1].loss < 0.8 * reports[0].loss
    first, final = (sum(r.agreement.values()) / len(r.agreement) for r in (reports[0], reports[-1]))
    assert final > first
    assert reports[-1].simulated is not None and reports[-1].simulated.tree >= reports[-1].simulated.chain > 1
    for name in ("best", "last"):
        draft = LongSpecDraft.load(tmp_path / "run" / name)
        assert draft.vocabulary == 40 and draft.trained_length == 64
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [r.step for r in reports]


@pytest.mark.parametrize("features", ["live", "cached"])
def test_bfloat16_products_and_float32_weights(config, tmp_path, features):
    cache = {"live": None, "cached": str(tmp_path / "cache")}[features]
    reports = steps(config(precision="bf16", distill=0.5, cache=cache))
    assert reports[-1].loss < reports[0].loss
    weights = checkpoint_tensors(tmp_path / "run", reports[-1].step)
    assert {t.dtype for t in weights.values()} == {torch.float32}


@pytest.mark.parametrize("features", ["live", "cached"])
@pytest.mark.parametrize("manner", ["step", "checkpoint"])
def test_killed_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path, manner, features):
    cache = {"live": None, "cached": str(tmp_path / "cache")}[features]
    whole = config(out=str(tmp_path / "whole"), cache=cache, anchor_offset=100)
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), cache=cache and cache + "2")
    killed = run_elsewhere(cut, manner, "6" if manner == "checkpoint" else "5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(p.name for p in (tmp_path / "cut" / "checkpoints").glob("step-*")) == ["step-00000003"]
    resumed = steps(cut)
    assert resumed[0].step == 4
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))
    for name in ("last", "best"):
        there, here = (LongSpecDraft.load(tmp_path / run / name).weights for run in ("whole", "cut"))
        assert same(there, here)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


def test_stopped_and_resumed(config, tmp_path):
    whole = config(out=str(tmp_path / "whole"))
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), save_every=0)
    seen = []
    for report in train_longspec(cut, stop=lambda: len(seen) == 4):
        seen.append(report.step)
    assert seen == [1, 2, 3, 4]
    assert steps(cut)[0].step == 5
    assert steps(cut) == []  # it is finished; asking again does no harm
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))


def test_two_processes_are_one_that_accumulates(config, tmp_path):
    # A large eps: AdamW alone would not notice gradients of another scale.
    single = config(out=str(tmp_path / "one"), accumulate=2, cache=str(tmp_path / "cache1"), eps=1e-2, clip=1e3)
    last = steps(single)[-1].step
    double = replace(single, out=str(tmp_path / "two"), accumulate=1, cache=str(tmp_path / "cache2"))
    done = run_elsewhere(double, processes=2)
    assert done.returncode == 0, done.stderr
    one, two = (checkpoint_tensors(tmp_path / name, last) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=2e-4, atol=2e-6)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    first = [json.loads((tmp_path / r / "log.jsonl").read_text().splitlines()[0])["agreement"] for r in ("one", "two")]
    assert first[0] == pytest.approx(first[1])
    LongSpecDraft.load(tmp_path / "two" / "best")


def test_sharded_weights_are_whole_ones(config, tmp_path):
    """FSDP2 on gloo: stopped, resumed from sharded checkpoints, and saved as one draft."""
    single = config(out=str(tmp_path / "one"), accumulate=2, anchor_offset=50, eps=1e-2, clip=0.2)
    steps(single)
    sharded = replace(single, out=str(tmp_path / "two"), accumulate=1)
    for arguments in (("fsdp", "4"), ("fsdp",)):
        done = run_elsewhere(sharded, *arguments, processes=2)
        assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    one, two = (LongSpecDraft.load(tmp_path / name / "last").weights for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-2, atol=1e-4)  # a bfloat16's last bit


def test_data_without_a_usable_row(config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PromptError, match="Nothing to train on"):
        steps(config(data=(str(tmp_path / "empty.jsonl"),)))
    with pytest.raises(PromptError, match="There is no file"):
        steps(config(data=(str(tmp_path / "none.jsonl"),)))


def test_broken_rows_are_skipped_counted_and_told(config, text, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": \n[1]\n{"tokens": [99999, 1]}\n{"text": ""}\n{"x": 1}\n' + text.read_text())
    told = []
    next(train_longspec(config(data=(str(broken),)), lambda what, done, total: told.append(what)))
    line = next(t for t in told if "left out" in t)
    assert "1 not JSON" in line and "1 not an object" in line and "1 with token ids outside" in line
    assert "2 without usable text" in line


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: tiny_model("llama"), None),
        (lambda: _biased(), "head with a bias"),
        (lambda: _gpt2(), "rotary"),
    ],
)
def test_targets_that_take_no_draft(config, tmp_path, made, said):
    folder = tmp_path / "other"
    made().save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    if said is None:
        assert next(train_longspec(config(target=str(folder)))).step == 1
        return
    with pytest.raises(UnsupportedModelError, match=said):
        steps(config(target=str(folder)))


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=128, n_inner=64, eos_token_id=None,
                   bos_token_id=None)
    )  # fmt: skip


def _biased():
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(
        PhiConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                  max_position_embeddings=128, eos_token_id=None, bos_token_id=None)
    )  # fmt: skip


def test_further_training_of_a_draft(config, tmp_path):
    steps(config(vocabulary=40))
    further = config(out=str(tmp_path / "next"), init=str(tmp_path / "run" / "last"), lr=1e-4, max_length=128)
    first = next(train_longspec(further))
    begun = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])["loss"]
    assert first.loss < begun


def test_a_draft_of_another_target(config, tmp_path):
    steps(config())
    folder = tmp_path / "wide"
    tiny_model(hidden=96).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    with pytest.raises(CheckpointError, match="made for another target: hidden_size 48"):
        steps(config(target=str(folder), init=str(tmp_path / "run" / "last"), out=str(tmp_path / "next")))
    with pytest.raises(CheckpointError, match="There is no draft folder"):
        steps(config(init=str(tmp_path / "nothing"), out=str(tmp_path / "next")))


def test_resuming_with_other_settings(config, tmp_path, text):
    list(zip(range(4), train_longspec(config()), strict=False))
    with pytest.raises(CheckpointError, match=r"other settings.*lr: 0\.003 there, 0\.1 here"):
        steps(config(lr=0.1))
    longer = tmp_path / "longer.jsonl"
    longer.write_text(text.read_text().replace("rain", "snow"))
    before = config(data=(str(longer),), out=str(tmp_path / "b"))
    list(zip(range(4), train_longspec(before), strict=False))
    longer.write_text(text.read_text().replace("rain", "hail"))
    with pytest.raises(CheckpointError, match="the documents"):
        steps(before)
    with pytest.raises(CheckpointError, match=r"processes times accumulate|the documents"):
        steps(config(accumulate=2))


def test_a_damaged_checkpoint(config, tmp_path):
    list(zip(range(4), train_longspec(config()), strict=False))
    weights = tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"step-00000003 cannot be read.*Delete it"):
        steps(config())


def test_a_loss_that_is_no_number(config, tmp_path):
    with pytest.raises(NumericalError, match="The loss is nan at step"):
        steps(config(lr=1e30, clip=1e30, save_every=1))
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_tensorboard(config, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(CapabilityError, match="pip install tensorboard"):
        steps(config(tensorboard=True))


def test_tensorboard_where_it_is_installed(config, tmp_path):
    pytest.importorskip("tensorboard")
    next(train_longspec(config(tensorboard=True)))
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_full_disk(config, monkeypatch, tmp_path):
    from accelerate import Accelerator

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Earlier ones are kept"):
        steps(config())
    assert not list(Path(tmp_path / "run" / "checkpoints").iterdir())
