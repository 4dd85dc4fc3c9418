"""Dry runs: what a real step takes, what 8B and 32B targets take from a config.json alone, what users read of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longdraft.cli.main import app
from longdraft.errors import ConfigError
from longdraft.training import tokens
from longdraft.training.documents import Skipped, encoded
from longdraft.training.dry_run import GPUS, estimate
from longdraft.training.session import begin, never, silent
from longdraft.training.settings import read_config
from tests.quick import few
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import ROOT, SMALL, TRAININGS, settings, steps

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWQ_32B = LLAMA_8B | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 40, "intermediate_size": 27648, "vocab_size": 152064,
}  # fmt: skip


def preset(kind: str, path: str, sizes: dict[str, Any], folder: Path, *words: str):
    (folder / "config.json").write_text(json.dumps(sizes))
    training = TRAININGS[kind]
    given = [f"target={folder}", *words]
    return training, read_config(ROOT / "configs" / "papers" / f"{path}.yaml", given, training.load_settings())


@pytest.mark.parametrize("kind", few(sorted(SMALL), ("eagle3", "lm")))
def test_every_kind_is_estimated_from_its_own_step(kind, target, text, tmp_path):
    """The draft's weights are those of the real run, and its steps those of the same shards."""
    shards = tmp_path / "shards"
    tokenizer = tiny_tokenizer(chat=True)
    tokens.write(shards, encoded([text], tokenizer, Skipped(), 61), tokenizer)
    config = settings(kind, target, shards, tmp_path / "run", epochs=0.3, held_out=0.0)
    found = estimate(TRAININGS[kind], config)
    reports = steps(config)
    state = torch.load(next((tmp_path / "run").rglob("optimizer.bin")), weights_only=True)["state"]
    assert found.draft_weights == sum(each["exp_avg"].numel() for each in state.values())
    assert abs(found.steps - reports[-1].steps) <= 1
    assert found.memory["draft: weights (float32)"] == 4 * found.draft_weights
    assert found.memory["target: weights"] == 2 * sum(p.numel() for p in tiny_model().parameters())
    assert all(size > 0 for size in found.memory.values()) and found.draft > 2 * found.draft_weights * 0.5


def test_a_draft_that_begins_from_the_targets_numbers_is_refused(target, text, tmp_path):
    def begins_from_them(config):
        yield bool(begin(config, 1, silent, never).runner.parts.head.any())

    config = replace(settings("mtp", target, text, tmp_path / "run"), data=())
    with pytest.raises(ConfigError, match="max_steps"):
        estimate(SimpleNamespace(load_run=lambda: begins_from_them), config)


def test_32k_tokens_at_hidden_4096_fit_80_gb(tmp_path):
    """The presets of stages 2 and 3 have the same settings; no mask, and layers that are computed again."""
    training, config = preset("longspec", "longspec/2-long", LLAMA_8B, tmp_path)
    _, answers = preset(
        "longspec", "longspec/3-answers", LLAMA_8B, tmp_path, "out=drafts/longspec-long", f"init={config.init}"
    )
    assert config == answers and config.recompute
    found = estimate(training, config, 8)
    assert config.rows == 32768 and found.bytes < GPUS["a100"].memory
    assert 15e9 < found.memory["target: weights"] < 17e9
    assert found.step_tokens == pytest.approx(256 * 32768, rel=1e-3)
    # By hand: every weight forward, again and backward, the head forward and backward, and causal attention.
    attention = (2 * 4 + 10) * 4096 * (32768 / 2 + 512)
    by_hand = 8 * found.draft_weights + 4 * 128256 * 4096 + attention
    assert found.draft == pytest.approx(by_hand, rel=0.02)


@pytest.mark.slow
def test_32k_tokens_of_eagle3_fit_80_gb_with_recomputation(tmp_path):
    training, config = preset("eagle3", "specpv", LLAMA_8B, tmp_path)
    with_it, without = (estimate(training, c, 4).bytes for c in (config, replace(config, recompute=False)))
    assert with_it < GPUS["a100"].memory and with_it < without


@pytest.mark.slow
def test_32k_tokens_with_a_target_of_32b_fit_80_gb_if_eight_gpus_share_it(tmp_path):
    training, config = preset("longspec", "longspec/3-answers", QWQ_32B, tmp_path, "shard_target=true")
    found = estimate(training, config, 8)
    assert config.rows == 32768 and found.bytes < GPUS["h100"].memory
    # Embedding and head stay whole; three layers' worth is gathered.
    layer = (found.memory["target: weights"] - 2 * 2 * 152064 * 5120) / 64 * 8
    assert found.memory["target: gathered layers"] == pytest.approx(3 * layer, rel=1e-3)


def test_a_target_of_32b_is_too_large_for_one_gpu_and_hours_follow_the_gpus(tmp_path):
    training, config = preset("longspec", "longspec/1-short", QWQ_32B, tmp_path, "rows=4096", "accumulate=64")
    found = estimate(training, config, 8, 6e9)
    assert 64e9 < found.memory["target: weights"] < 67e9 and found.bytes > GPUS["h100"].memory > 0
    assert found.steps == pytest.approx(6e9 / (2048 * 1024), rel=0.01)
    one, eight = (found.hours(6e9, GPUS["h100"], n) for n in (1, 8))
    assert one == pytest.approx(8 * eight) and 10 < eight < 100


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
