"""Runs on hidden states in the layout of vLLM's connector, made here with transformers alone."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longdraft.errors import CheckpointError, ConfigError
from tests.training.helpers import begun, steps

LAYERS = (0, 1)
# As vLLM counts them, with the last layer's output, which the loss follows.
IDS = (1, 2, 3)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Rows of tokens with a prompt each."""
    path, rng = tmp_path_factory.mktemp("answers") / "answers.jsonl", random.Random(0)
    rows = [{"tokens": [rng.randrange(5, 60) for _ in range(rng.randint(30, 60))], "start": 12} for _ in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def extract(target, answers, tmp_path):
    """Writes the files that vLLM writes, a request each, with their lock files."""

    def make(ids=IDS, end=None, folder="states"):
        model = AutoModelForCausalLM.from_pretrained(target)
        last = []
        model.model.layers[-1].register_forward_hook(lambda module, inputs, out: last.append(out))
        (out := tmp_path / folder).mkdir()
        for i, line in enumerate(answers.read_text().splitlines()):
            tokens = torch.tensor(json.loads(line)["tokens"][:end])
            with torch.no_grad():
                states = [*model(tokens[None], output_hidden_states=True).hidden_states[:-1], last.pop()]
            stacked = torch.stack([states[layer][0] for layer in ids], 1)
            save_file({"hidden_states": stacked, "token_ids": tokens}, out / f"cmpl-{i}-0.safetensors")
            (out / f"cmpl-{i}-0.safetensors.lock").touch()
        return out

    return make


@pytest.fixture
def run(config, answers, tmp_path):
    def make(states, kind="eagle3", **over):
        layers = {"feature_layers": LAYERS, "window": None} if kind == "eagle3" else {}
        where = {"data": answers, "out": tmp_path / f"run{states}".replace("/", "-")}
        return config(kind, **(where | layers | over), hidden_states=states and str(states))

    return make


@pytest.mark.parametrize("end", [None, -1])  # of an answer that vLLM wrote itself, the last token has no state
def test_a_run_on_them_is_the_run_on_the_targets_own(run, extract, end):
    there, own = (steps(run(states, max_steps=4)) for states in (extract(end=end), None))
    assert there[0].loss == pytest.approx(own[0].loss, rel=1e-4) and there[0].agreement == own[0].agreement
    assert [r.loss for r in there] == pytest.approx([r.loss for r in own], rel=1e-3) and len(own) > 2


def test_their_own_tokens_are_data(run, extract):
    states = extract()
    assert next(begun(run(states, data=str(states)))).step == 1


@pytest.mark.parametrize("kind", ["eagle", "heads", "lm"])
def test_drafts_that_read_the_last_layer_alone(run, extract, kind):
    assert steps(run(extract((3,)), kind, max_steps=2))[-1].step == 2


def test_what_is_refused(run, extract, tmp_path):
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\]"):
        steps(run(extract((1, 3), folder="fewer")))
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\]"):  # as many, of other layers
        steps(run(extract((0, 2, 3), folder="others")))
    states = extract()
    with pytest.raises(ConfigError, match="hidden_states"):
        steps(run(states, "longspec"))
    with pytest.raises(ConfigError, match="cache"):
        run(states, cache=str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="none"):
        steps(run(tmp_path / "none"))
    file = states / "cmpl-3-0.safetensors"
    kept = load_file(file)
    kept["hidden_states"][5, 1, 0] = torch.nan
    save_file(kept, file)
    with pytest.raises(CheckpointError, match=file.name):
        steps(run(states))
    file.unlink()
    with pytest.raises(CheckpointError, match="lacks a text"):
        steps(run(states))
    file.write_bytes(b"{")
    with pytest.raises(CheckpointError, match=file.name):
        steps(run(states))
