"""EAGLE-3 runs from other drafts: adapting to long text, published drafts, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rope import make_rope_parameters
from longdraft.training.config import EVAL_DEPTH, Eagle3Config
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.session import TrainingSession as Training
from tests.support.drafts import published_eagle3
from tests.training.helpers import steps

KEPT = [i for i in range(61) if i % 3]
# A later run, whose draft brings these.
BROUGHT = {"feature_layers": (), "vocabulary": None, "intermediate_size": None, "window": None}


@pytest.fixture
def eagle3(config, tmp_path):
    def make(**over: object) -> Eagle3Config:
        return config("eagle3", **({"epochs": 0.8, "warmup": 0.1} | over))

    return make


@pytest.fixture
def theirs(target, tmp_path) -> Callable[..., Path]:
    """Writes a folder as EAGLE-3's authors publish theirs, for the tiny target."""
    model = AutoModelForCausalLM.from_pretrained(target)

    def write(name: str = "theirs", **over: object) -> Path:
        given = {
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "head_dim": 12,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }  # fmt: skip
        folder = published_eagle3(tmp_path / name, model, KEPT, **(given | over))
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    return write


def loss_of(config: Eagle3Config, draft: Eagle3Draft) -> float:
    """A draft's mean loss on all documents of a run, with the positions of decoding."""
    session = Training(config, EVAL_DEPTH)
    reader = session.feature_reader(draft.feature_layers(session.runner))
    documents = [reader.read(document) for document in session.train_documents]
    rotary = draft.rotary(torch.float32, "cpu")
    trainer = Eagle3Trainer(
        draft.trainable_module(), session.runner.shared_parts, rotary, draft.draft_to_target_ids, config
    ).train()
    rows = sum(trainer.count_labels(len(d.token_ids), d.start, 0) for d in documents)
    with torch.no_grad():
        return float(trainer(documents).loss) / rows


def stretched(folder: Path) -> Eagle3Draft:
    """A draft of texts of 64 tokens, stretched four times by YaRN."""
    draft = Eagle3Draft.load(folder)
    draft.rope = make_rope_parameters(draft.rope["rope_theta"], 4.0, 64)
    return draft


@pytest.mark.slow
def test_a_published_draft_is_adapted_to_long_text(eagle3, theirs, target, tmp_path):
    """Two steps of SpecPV's YaRN adaptation. All documents are one batch, so the first loss is that of all."""
    init = theirs()
    run = eagle3(init=str(init), rope_factor=4.0, rope_factor_inference=8.0, max_length=192, rows=100_000, epochs=2.0,
                 lr=1e-3, ttt=4, **BROUGHT)  # fmt: skip
    reports = steps(run)
    assert len(reports) == 2
    before = stretched(init)
    assert reports[0].loss == pytest.approx(loss_of(run, before), rel=1e-5)
    plain, other = Eagle3Draft.load(init), stretched(init)
    other.weights = {name: t[torch.randperm(len(t))] for name, t in other.weights.items()}
    for wrong in (plain, other):  # unstretched, and other weights
        assert abs(loss_of(run, wrong) - reports[0].loss) > 2e-4 * reports[0].loss
    assert reports[1].loss < reports[0].loss

    found = Eagle3Draft.load(tmp_path / "run" / "last")
    assert (found.layout, found.configured_layers, found.trained_length, found.max_context) == (
        "longdraft",
        (0, 1, 2),
        192,
        8 * 64,
    )
    assert (
        found.shape == before.shape
        and found.draft_to_target_ids.tolist() == KEPT == before.draft_to_target_ids.tolist()
    )
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


@pytest.mark.slow
def test_positions_that_a_published_draft_stretches_are_kept(eagle3, theirs, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    init = theirs(rope_theta=5e5, rope_scaling=scaling)
    run = eagle3(init=str(init), rows=100_000, epochs=1.0, **BROUGHT)
    (report,) = steps(run)
    before, found = Eagle3Draft.load(init), Eagle3Draft.load(tmp_path / "run" / "last")
    assert report.loss == pytest.approx(loss_of(run, before), rel=1e-5)
    assert found.rope == before.rope == scaling | {"rope_theta": 5e5}
    # A factor stands in for it; so does a base.
    again = replace(run, init=str(tmp_path / "run" / "last"), out=str(tmp_path / "b"), rope_factor=2.0, rope_theta=1e4)
    steps(again)
    found = Eagle3Draft.load(tmp_path / "b" / "last")
    assert found.rope == make_rope_parameters(1e4, 2.0, 32) and "rope_parameters" not in found.config
    # Without one, a draft of ours keeps its own.
    steps(replace(again, init=str(tmp_path / "b" / "last"), out=str(tmp_path / "c"), rope_factor=None, rope_theta=None))
    assert Eagle3Draft.load(tmp_path / "c" / "last").rope == found.rope


def test_what_cannot_be_trained_further(eagle3, theirs, tmp_path):
    def refused(key: str, folder: Path | None = None, **over: object) -> None:
        held = {path.name: path.read_bytes() for path in folder.iterdir()} if folder else {}
        given = {"init": str(folder)} | BROUGHT if folder else {}
        with pytest.raises((CheckpointError, ConfigError), match=key):
            steps(eagle3(**(given | over)))
        assert not folder or {path.name: path.read_bytes() for path in folder.iterdir()} == held
        assert not (tmp_path / "run").exists()

    short = theirs("short")
    path = short / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-5000])
    refused("pytorch_model.bin", short, target=str(tmp_path / "not read"))
    refused(r"\(96, 48\) where config.json asks for \(97, 48\)", theirs("wrong", intermediate_size=97))
    refused(r"vocab_size 62 \(this target: 61\)", theirs("other", vocab_size=62))
    path = (headless := theirs("headless", draft_vocab_size=61)) / "pytorch_model.bin"
    torch.save({n: x for n, x in torch.load(path).items() if n not in ("lm_head.weight", "d2t", "t2d")}, path)
    refused("no head", headless)
    refused("must increase", theirs("deep", eagle_config=None))
    refused("in tokens: set both", theirs("unsaid", max_position_embeddings=None), rope_factor=4.0)
    refused("feature_layers", theirs("others"), feature_layers=(0, 2))
    tensors = torch.load(theirs("first") / "pytorch_model.bin", weights_only=True)
    first = {n.replace("midlayer", "layers.0"): t for n, t in tensors.items() if "norm" not in n}
    torch.save(first, tmp_path / "first" / "pytorch_model.bin")
    refused("a draft for eagle, not for eagle3", tmp_path / "first")
    # Settings that do not fit the target.
    refused("Set feature_layers", feature_layers=())
    refused(r"Set feature_layers .* 3 layers, not \[1, 3\]", feature_layers=(1, 3))
    refused("needs rope_original_length", rope_factor=4.0)
