"""Complete runs of all kinds: killed and resumed, stopped and resumed, on two processes; refusals."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from longdraft import Speculator, load
from longdraft.drafters.longspec import LongSpecDraft
from longdraft.drafts import draft_folder
from longdraft.errors import (
    CapabilityError,
    CheckpointError,
    NumericalError,
    PromptError,
)
from longdraft.training import dataset, loop
from longdraft.training.documents import SkipCounts, encode_documents
from longdraft.training.longspec import LongSpecTrainer
from longdraft.training.session import TrainingSession as Training
from longdraft.training.simulated_acceptance import SimulatedAcceptance
from tests.support.drafts import random_draft
from tests.support.slow_marks import slow
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import SMALL, begun, checkpoint_tensors, losses_of, run_elsewhere, same, steps


@pytest.mark.parametrize(
    ("kind", "method", "over", "less", "described"),
    [
        ("longspec", "longspec", {}, 0.8, {"trained_positions": 64, "window": 12}),
        slow(
            "eagle3", "eagle3", {"epochs": 2.0, "distill": 0.2}, 0.97,  # it starts small
            {"feature_layers": [0, 1, 2], "window": 12, "rope_theta": 10000.0, "rope_factor": None,
             "rope_factor_trained": None, "rope_original_length": None},
        ),
        slow("eagle3", "eagle3", {"epochs": 2.0, "distill": 0.2, "norm_output": True}, 0.97, {"norm_output": True}),
        slow("eagle", "eagle", {"epochs": 2.0, "vocabulary": None}, 0.9, {"feature_layers": [2]}),
        slow("mtp", "mtp", {"vocabulary": None, "distill": 0.2}, 0.9, {}),
        slow(
            "dflash", "dflash", {"epochs": 2.0, "distill": 0.2, "anchors": 20}, 0.97,
            {"feature_layers": [0, 2], "block_size": 4, "own_mask": True},
        ),
        slow("lm", "small-lm", {"epochs": 2.0}, 0.8, {}),
        slow("tokenswift", "tokenswift", {"epochs": 3.0, "lr": 2e-2, "heads": 2}, 0.8, {"heads": 2}),
    ],
)  # fmt: skip
def test_a_run_learns_and_leaves_a_draft(config, target, tmp_path, kind, method, over, less, described):
    given = {"precision": "bf16", "vocabulary": 40, "measure_every": 20, "cache": str(tmp_path / "cache")} | over
    reports = steps(config(kind, **given))
    assert [r.step for r in reports] == list(range(1, reports[-1].steps + 1))
    assert reports[-1].loss < less * reports[0].loss
    first, final = (sum(r.agreement.values()) / len(r.agreement) for r in (reports[0], reports[-1]))
    assert final > first or kind == "eagle"  # which learns features: so few steps lower the loss alone
    found = reports[-1].simulated
    assert found is not None and found.tree >= found.chain > 1
    assert len(found.agreement) == {"tokenswift": 2, "dflash": 3}.get(kind, 5)
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [r.step for r in reports]
    weights = checkpoint_tensors(tmp_path / "run", reports[-1].step)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    model = load(str(target)).model
    wanted = Speculator("ar", target=model).generate([[7, 8, 9]], max_new_tokens=20)[0]
    for name in ("best", "last"):
        draft = draft_folder.load(tmp_path / "run" / name)
        if kind not in ("eagle", "mtp"):  # which have the target's vocabulary
            ids = draft.tensors.pop("d2t") + torch.arange(40)
            assert ids.dtype == torch.int64 and (ids.diff() > 0).all() and ids[-1] < 61
            assert draft.config["draft_vocab_size"] == 40
        assert {t.dtype for t in draft.tensors.values()} == {torch.bfloat16}
        assert draft.config.items() >= {"trained_length": 64, **described}.items()
        spec = Speculator(method, target=model, draft=tmp_path / "run" / name)
        result = spec.generate([[7, 8, 9]], max_new_tokens=20)[0]
        assert result.token_ids == wanted.token_ids and result.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "manner", "cached"),
    [
        *(("longspec", manner, cached) for manner in ("step", "checkpoint") for cached in (False, True)),
        *((kind, "checkpoint", True) for kind in ("eagle3", "eagle", "mtp", "dflash", "lm", "tokenswift")),
    ],
)
def test_killed_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path, kind, manner, cached):
    over = {"anchor_offset": 100} if kind == "longspec" else {"vocabulary": None, "epochs": 0.5}
    whole = config(kind, out=tmp_path / "whole", cache=str(tmp_path / "cache") if cached else None, **over)
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), cache=str(tmp_path / "cache2") if cached else None)
    killed = run_elsewhere(cut, manner, "6" if manner == "checkpoint" else "5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [p.parent.name for p in (tmp_path / "cut" / "checkpoints").glob("step-*/state.json")] == ["step-00000003"]
    assert steps(cut)[0].step == 4
    assert len(list((tmp_path / "cut" / "checkpoints").iterdir())) == 2
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    for name in ("last", "best"):
        there, here = (draft_folder.load(tmp_path / run / name).tensors for run in ("whole", "cut"))
        assert same(there, here) and "d2t" not in here
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


def test_stopped_and_resumed(config, tmp_path):
    whole = config(out=tmp_path / "whole", max_steps=8)
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), save_every=0)
    seen = []
    for report in begun(cut, lambda *what: None, lambda: len(seen) == 4):
        seen.append(report.step)
    assert seen == [1, 2, 3, 4]
    assert steps(cut)[0].step == 5
    assert steps(cut) == []  # it is finished; asking again does no harm
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_two_processes_are_one_that_accumulates(config, tmp_path, kind):
    # A large eps: AdamW alone would not notice gradients of another scale.
    single = config(kind, out=tmp_path / "one", accumulate=2, cache=str(tmp_path / "cache1"), eps=1e-2, clip=1e3)
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
    assert draft_folder.load(tmp_path / "two" / "best").kind == kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_two_processes_killed_and_resumed(config, text, tmp_path, monkeypatch, kind):
    """LongSpec on tokens in shards."""
    over = {}
    if kind == "longspec":
        monkeypatch.setattr(dataset, "MIN_SHARD_TOKENS", 2000)
        tokenizer = tiny_tokenizer(chat=True)
        dataset.write_shards(tmp_path / "shards", encode_documents([text], tokenizer, SkipCounts(), 61), tokenizer)
        over = {"data": tmp_path / "shards"}
    whole = config(kind, out=tmp_path / "whole", epochs=0.7, **over)
    cut = replace(whole, out=str(tmp_path / "cut"))
    assert run_elsewhere(whole, processes=2).returncode == 0
    assert run_elsewhere(cut, "step", "4", processes=2).returncode
    last = len(losses_of(tmp_path / "whole"))
    assert sorted(p.name for p in (tmp_path / "cut" / "checkpoints").glob("step-*")) == ["step-00000003"] and last > 4
    resumed = run_elsewhere(cut, processes=2)
    assert resumed.returncode == 0, resumed.stderr
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


@pytest.mark.slow
def test_sharded_weights_are_whole_ones(config, tmp_path):
    """FSDP2 on gloo: stopped, resumed from sharded checkpoints, and saved as one draft."""
    single = config(out=tmp_path / "one", accumulate=2, anchor_offset=50, eps=1e-2, clip=0.2)
    steps(single)
    sharded = replace(single, out=str(tmp_path / "two"), accumulate=1)
    for arguments in (("fsdp", "4"), ("fsdp",)):
        done = run_elsewhere(sharded, *arguments, processes=2)
        assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    one, two = (LongSpecDraft.load(tmp_path / name / "last").weights for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-2, atol=1e-4)  # a bfloat16's last bit


# --- data and targets ---


def test_data_without_a_usable_row(config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty", "none"):
        with pytest.raises(PromptError):
            steps(config(data=tmp_path / f"{name}.jsonl"))


def test_broken_rows_are_skipped_counted_and_told(config, text, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": \n[1]\n{"tokens": [99999, 1]}\n{"text": ""}\n{"x": 1}\n' + text.read_text())
    told = []
    next(begun(config(data=broken), lambda what: told.append(what)))
    line = next(t for t in told if "left out" in t)
    assert "1 not JSON" in line and "1 not an object" in line and "1 with token ids outside" in line
    assert "1 that cannot be encoded (The prompt is empty" in line
    assert "1 with neither text, messages nor tokens (keys: x)" in line


# --- further training ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longspec", "lm", "tokenswift"])
def test_further_training_of_a_draft(config, tmp_path, kind):
    given = {"lm": {"layers": 7, "rope_theta": 5.0}, "tokenswift": {"heads": 7}, "longspec": {"window": 5}}[kind]
    steps(config(kind, vocabulary=40, epochs=0.5))
    first = tmp_path / "run" / "last"
    further = config(kind, out=tmp_path / "next", init=str(first), lr=1e-5, max_length=128, **given)
    assert next(begun(further)).loss < 1.2 * losses_of(tmp_path / "run")[-1]
    steps(further)
    there, here = (draft_folder.load(folder).config for folder in (first, tmp_path / "next" / "last"))
    changed = {"trained_length": 128, "training": here["training"]}
    if kind == "longspec":
        changed["trained_positions"] = 128
    if kind == "lm":
        changed["model"] = there["model"] | {"max_position_embeddings": 128}
    assert here == there | changed  # what the draft brings stays
    if kind == "longspec":  # unless it was said
        window = replace(further, out=str(tmp_path / "b"), fields_set=("window",), epochs=0.2)
        steps(window)
        assert draft_folder.load(tmp_path / "b" / "last").config["window"] == 5


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_drafts_that_do_not_fit_are_refused(config, wide, tmp_path, kind):
    steps(config(kind, epochs=0.1))
    brought = {"feature_layers": ()} if "feature_layers" in SMALL[kind] else {}
    with pytest.raises(CheckpointError):
        steps(config(kind, target=wide, init=str(tmp_path / "run" / "last"), out=tmp_path / "next", **brought))
    with pytest.raises(CheckpointError):
        steps(config(kind, init=str(tmp_path / "nothing"), out=tmp_path / "next"))
    if kind != "longspec":
        random_draft(tmp_path / "longspec", tiny_model())
        with pytest.raises(CheckpointError):
            steps(config(kind, init=str(tmp_path / "longspec"), out=tmp_path / "next"))


# --- language models ---


@pytest.mark.parametrize(("prompts", "rows"), [(True, 39 + 49 + 20 + 63), (False, 15 + 40 + 20 + 63)])
def test_what_a_language_model_learns_of_answers(config, tmp_path, prompts, rows):
    """Prompts are learned if they are whole; of what is too long, the end is kept. A cache holds the target's last
    states alone."""
    answers, cache = tmp_path / "answers.jsonl", tmp_path / "cache"
    made = [(40, 25), (50, 10), (100, 80), (90, 9)]
    lines = [json.dumps({"tokens": [5 + (i + k) % 40 for k in range(n)], "start": s}) for i, (n, s) in enumerate(made)]
    answers.write_text("\n".join(lines))
    run = config("lm", data=answers, held_out=0.0, learn_prompts=prompts, rows=1000, cache=str(cache))
    steps(run)
    kept = [load_file(path) for path in cache.rglob("*.safetensors")]
    assert sorted(len(each["last"]) for each in kept) == [40, 50, 64, 64]
    assert draft_folder.load(tmp_path / "run" / "last").config["training"]["tokens"] == rows
    assert {name for each in kept for name in each} == {"last"}


# --- checkpoints and logs ---


def test_resuming_with_other_settings_or_from_a_damaged_checkpoint(config, tmp_path, text):
    list(zip(range(4), begun(config()), strict=False))
    with pytest.raises(CheckpointError, match="lr"):
        steps(config(lr=0.1))
    with pytest.raises(CheckpointError):
        steps(config(accumulate=2))
    other = tmp_path / "other.jsonl"
    other.write_text(text.read_text().replace("rain", "hail"))
    with pytest.raises(CheckpointError):
        steps(config(data=other))
    weights = tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000003"):
        steps(config())


def test_trackers(config, tmp_path):
    """Trackers of accelerate; log.jsonl is written in any case."""
    with pytest.raises(CapabilityError, match="voodoo"):
        steps(config(track=("voodoo",)))
    pytest.importorskip("tensorboard")
    steps(config(track=("tensorboard",), max_steps=2))
    assert list((tmp_path / "run").rglob("events*"))


def test_the_best_draft_is_kept(config, tmp_path, monkeypatch):
    trees = iter([2.0, 1.5, 1.75])
    monkeypatch.setattr(loop, "simulate", lambda *given, **options: SimulatedAcceptance((0.5,), 1.0, next(trees)))
    reports = steps(config(max_steps=6, measure_every=2, save_every=0))
    assert [r.simulated and r.simulated.tree for r in reports] == [None, 2.0, None, 1.5, None, 1.75]
    best, last = (draft_folder.load(tmp_path / "run" / name).tensors for name in ("best", "last"))
    assert not same(best, last)


def test_a_full_disk(config, monkeypatch, tmp_path):
    from accelerate import Accelerator

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(CheckpointError):
        steps(config())
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_offsets_are_drawn_anew_in_each_epoch(config, tmp_path):
    """LongSpec, section 3.2: over a run, a text meets many positions."""
    for cache in (None, str(tmp_path / "cache")):
        run = config(anchor_offset=300, max_length=64, cache=cache, out=tmp_path / f"run{bool(cache)}")
        began = Training(run, 5)
        drawn = [[began.anchor_offset(i, epoch) for i in range(len(began.train_documents))] for epoch in range(3)]
        assert all(0 <= n <= 300 for each in drawn for n in each) and len({*drawn[0]}) > 5
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
        text, offset = began.train_documents[0], began.anchor_offset(0, 1)
        positions = began.feature_reader(()).read(text, offset).positions
        assert positions[-1] - offset + 1 == len(text.token_ids)


def test_the_targets_loss_with_offsets_is_told_once(config):
    told = []
    run = config(anchor_offset=300, max_steps=1)
    assert len(list(begun(run, told.append))) == 1
    (line,) = [text for text in told if "the target's loss" in text]
    assert re.search(r"held-out documents: \d\.\d{4} nats, with anchor-offsets [+-]\d\.\d{4}$", line)
    told.clear()
    assert list(begun(replace(run, max_steps=2), told.append))
    assert not [text for text in told if "the target's loss" in text]


@pytest.mark.parametrize("over", [{"lr": 1e9, "precision": "bf16"}, {"lr": 1e30}])
@pytest.mark.parametrize("kind", ["longspec", slow("eagle3"), slow("lm"), slow("tokenswift")])
def test_a_draft_that_diverged_is_no_success(config, tmp_path, kind, over):
    with pytest.raises(NumericalError, match="lr"):
        steps(config(kind, held_out=0.5, **over))
    assert not (tmp_path / "run" / "best").exists()


def test_a_dead_draft_is_never_right(config, tmp_path, monkeypatch):
    """All logits are equal, so no token is the first choice."""
    monkeypatch.setattr(LongSpecTrainer, "target_head", torch.zeros(61, 48))
    with pytest.raises(NumericalError, match="never right"):
        steps(config(held_out=0.5, max_steps=3, measure_every=1))
    assert not (tmp_path / "run" / "best").exists()
