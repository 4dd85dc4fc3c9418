"""Keys moved to other positions: they are what the model itself computes there, or the model is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GPTNeoXConfig,
    PhiConfig,
    SmolLM3Config,
)

from longdraft.drafters.shared.key_rotation import KeyRotation
from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward
from tests.support.tiny import FAMILIES, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def keys_at(runner: TargetRunner, token: int, positions: list[int]) -> torch.Tensor:
    """(layers, Hkv, n, d) of a token alone, at each position."""
    store = runner.new_store(len(positions), 1)
    slots = range(len(positions))
    forward(runner, [[token]] * len(positions), store, slots, root_positions=positions, logits="none")
    return store.keys[:, :, :, 0].transpose(1, 2).contiguous()


def partly_rotated(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**SIZES, initializer_range=0.3))


MODELS = {
    **{family: partial(tiny_model, family) for family in FAMILIES},
    "yarn": partial(tiny_model, rope_parameters=YARN),
    "llama3": partial(tiny_model, rope_parameters=LLAMA3, dtype=torch.float64),
    "bfloat16": partial(tiny_model, dtype=torch.bfloat16),
    "a part of each head": partial(partly_rotated, GPTNeoXConfig),
    "a part of each head, after biases": partial(partly_rotated, PhiConfig),
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_move_to_where_the_model_itself_would_have_them(name):
    runner = TargetRunner(MODELS[name]())
    rotation, close = KeyRotation(runner, 100), {"atol": 8e-2, "rtol": 8e-2} if name == "bfloat16" else CLOSE
    here, there = torch.tensor([3, 50, 99]), torch.tensor([98, 0, 41])
    unrotated = rotation.unrotate(keys_at(runner, 5, here.tolist()), here)
    torch.testing.assert_close(unrotated[:, :, 0], unrotated[:, :, 2], **close)
    expected = keys_at(runner, 5, there.tolist())
    torch.testing.assert_close(rotation.rotate(unrotated, there), expected, **close)
    assert not torch.allclose(expected[:, :, 0], expected[:, :, 1], atol=0.1)
    if name != "bfloat16":  # few bits may be equal by chance
        assert (expected[:, :, 0] == expected[:, :, 1]).any() == name.startswith("a part")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=61, bos_token_id=None, eos_token_id=None), "no rotary"),
        (CohereConfig(**SIZES), "layer 0 do not rotate"),  # neighbours are rotated together, not halves
        (SmolLM3Config(**SIZES, num_key_value_heads=4, no_rope_layers=[1, 0]), "layer 1 do not rotate"),
    ],
    ids=["learned positions", "interleaved", "a layer without positions"],
)
def test_models_whose_keys_cannot_be_moved(config, why):
    runner = TargetRunner(AutoModelForCausalLM.from_config(config))
    with pytest.raises(UnsupportedModelError, match=f"{why}.*Use view=full"):
        KeyRotation(runner, 100)


def test_frequencies_that_depend_on_the_length():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny_model(rope_parameters=rope | factors)
    assert KeyRotation(TargetRunner(model), 30)
    with pytest.raises(UnsupportedModelError):
        KeyRotation(TargetRunner(model), 100)
