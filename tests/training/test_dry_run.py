"""Dry runs: the formula against steps under fake tensors and a real run, and the output."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from longdraft.cli.main import app
from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafters.longspec import LongSpecBlock, LongSpecShape
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.errors import ConfigError
from longdraft.model import shared_parts
from longdraft.model.rope import RotaryEmbedding, make_rope_parameters
from longdraft.training.config import read_config
from longdraft.training.dry_run import GPUS, estimate
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.features import Features
from longdraft.training.longspec import LongSpecTrainer
from tests.support.slow_marks import slow_except
from tests.support.tiny import tiny_model
from tests.training.helpers import SMALL, TRAININGS, settings, steps

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 3072, "vocab_size": 16000, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("longspec", False), ("longspec", True), ("eagle3", False), ("eagle3", True)],
)
def test_the_formula_is_a_step_under_fake_tensors(tmp_path, kind, recompute):
    """Weights are equal; operations and activation memory are within a fifth."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    words = [f"target={tmp_path}", "max_length=2048", "rows=4096", f"recompute={recompute}", "distill=0", "ttt=3"]
    config = read_config(None, words[: 5 + (kind == "eagle3")], TRAININGS[kind].load_settings())
    found = estimate(kind, config)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16)
        parts = shared_parts.shared_parts(model, shared_parts.describe_config(model))
        if kind == "longspec":
            shape = LongSpecShape(1024, 3072, 16, 4, 64, 1e-6, 512, True)
            trainer = LongSpecTrainer(LongSpecBlock(shape), parts, None, config)
            rows = {name: torch.empty(2048, 4, 64, dtype=torch.bfloat16) for name in ("keys", "values")}
        else:
            block = Eagle3Block(Eagle3Shape(1024, 3072, 16, 4, 64, 3072, 16000, 1e-6, False, False))
            trainer = Eagle3Trainer(block, parts, RotaryEmbedding(64, make_rope_parameters(1e4)), None, config)
            rows = {"hidden": torch.empty(2048, 3072, dtype=torch.bfloat16)}
        tokens = torch.zeros(2048, dtype=torch.long)
        tracker, counter = MemTracker(), FlopCounterMode(display=False)
        tracker.track_external(trainer)
        with tracker, counter:
            with torch.autocast("cpu", torch.bfloat16):
                loss = trainer.train()([Features(tokens, 1, 0, rows, tokens[1:])] * 2, [1, 1]).loss
            loss.backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    sizes = {getattr(part, "value", part): size for part, size in peak.items()}
    between = sizes["Total"] - sizes["Parameter"] - sizes["Gradient"]
    assert found["draft_weights"] == pytest.approx(sum(p.numel() for p in trainer.parameters()), rel=1e-3)
    assert found["memory_bytes"]["draft: between forward and backward"] == pytest.approx(between, rel=0.2)
    assert found["draft_operations"] * 4096 == pytest.approx(counter.get_total_flops(), rel=0.2)


@pytest.mark.parametrize("kind", slow_except(sorted(SMALL), ("eagle3", "lm")))
def test_the_draft_of_every_kind_has_the_weights_of_a_real_run(kind, target, text, tmp_path):
    config = settings(kind, target, text, tmp_path / "run", max_steps=1, held_out=0.0)
    found = estimate(kind, config)
    steps(config)
    state = torch.load(next((tmp_path / "run").rglob("optimizer.bin")), weights_only=True)["state"]
    assert found["draft_weights"] == pytest.approx(sum(each["exp_avg"].numel() for each in state.values()), rel=0.05)
    assert found["memory_bytes"]["target: weights"] == 2 * sum(p.numel() for p in tiny_model().parameters())
    with pytest.raises(ConfigError, match="max_steps"):
        estimate("mine", config)


def test_the_command_prints_what_a_run_would_take(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)  # no weights
    words = ["train", "longspec", f"target={tmp_path}", "window=12", "--dry-run", "--tokens", "1e8", "--json"]
    result = CliRunner().invoke(app, [*words, "--gpu", "a100", "--gpus", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["fits"] and found["gpus"] == 2 and found["hours"] > 0
    assert found["steps"] == pytest.approx(1e8 / found["step_tokens"], rel=0.01)
    assert "Hours are an estimate: 40%" in result.output and "target: weights" in result.output
    assert "--tokens" in CliRunner().invoke(app, words[:5]).output
    result = CliRunner().invoke(app, [*words, "--gpu", "voodoo"])
    assert result.exit_code != 0
    config = read_config(None, words[2:4], TRAININGS["longspec"].load_settings())
    one, eight = (estimate("longspec", config, gpus=n, tokens=6e9) for n in (1, 8))
    assert one["hours"] == pytest.approx(8 * eight["hours"], rel=0.01) and set(GPUS) > {"h100"}


@pytest.mark.parametrize("kind", ["longspec", "eagle3", "lm"])
def test_a_caches_size_is_that_of_its_files(kind, target, text, tmp_path):
    config = settings(
        kind, target, text, tmp_path / "run", max_steps=1, cache=str(tmp_path / "cache"), precision="bf16"
    )
    steps(config)
    files = [load_file(path) for path in (tmp_path / "cache").rglob("*.safetensors")]
    size = sum(t.numel() * t.element_size() for file in files for t in file.values())
    length = sum(len(next(t for name, t in file.items() if name != "likeliest")) for file in files if file)
    assert abs(size / max(1, length) - estimate(kind, config)["feature_bytes"]) < 1
