"""Scaled rotary frequencies in GGUF files: what transformers makes of the same model's own configuration."""

from __future__ import annotations

import math

import pytest
import torch

import longdraft
from longdraft import load
from longdraft.errors import CapabilityError
from longdraft.model.rope import rotary_module
from tests.support.gguf_files import write_gguf
from tests.support.slow_marks import rotate_pairs

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

# As the checkpoints of Llama 3.1 say it.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128}
SCALED = {
    "llama3": ({}, {"rope_type": "llama3", **LLAMA3}),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    "yarn of its own": (
        YARN | {"scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0, "scaling.yarn_attn_factor": 1.5},
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
            "beta_slow": 2.0, "attention_factor": 1.5,
        },
    ),
    "linear": ({"scaling.type": "linear", "scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    "a factor alone": ({"scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    "before scaling had a name": ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
}  # fmt: skip
TEXT = (torch.arange(300) * 7 % 61 + 1)[None]


def llama3_factors() -> list[float]:
    """The tensor ``rope_freqs`` as llama.cpp's converter makes it for heads of 16, in float32."""
    factor, low, high, length = LLAMA3.values()
    found = []
    for frequency in 1.0 / (1e4 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)):
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wavelength < length / high else factor if wavelength > length / low else float(between))
    return found


def decoded(model, tokenizer) -> list[int]:
    spec = longdraft.Speculator("prompt-lookup", target=model, tokenizer=tokenizer)
    return spec.generate(TEXT.tolist(), max_new_tokens=14)[0].token_ids


@pytest.mark.parametrize(("kind", "family"), rotate_pairs(SCALED, ["llama", "qwen2"]))
@torch.no_grad()
def test_they_are_those_of_the_same_models_configuration(kind, family, tmp_path):
    rope, parameters = SCALED[kind]
    factors = llama3_factors() if kind == "llama3" else ()
    parameters = {"rope_theta": 1e4, **parameters}
    file = tmp_path / "a.gguf"
    written = write_gguf(file, family, rope=rope, rope_freqs=factors, rope_parameters=parameters)
    expected = written(TEXT).logits
    plain = write_gguf(tmp_path / "plain.gguf", family)(TEXT).logits
    assert (plain - expected).abs().max() > 0.1  # the text is long enough to tell
    for weights in ("stored", "float32"):
        model, tokenizer = load(file, device="cpu", weights=weights, arithmetic="float32")
        assert model.config.max_position_embeddings == 512
        found = model.config.rope_parameters
        assert {name: found[name] for name in parameters} == pytest.approx(parameters)
        torch.testing.assert_close(rotary_module(model).inv_freq, rotary_module(written).inv_freq)
        torch.testing.assert_close(model(TEXT).logits, expected, rtol=1e-3, atol=1e-3)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = model.generation_config.eos_token_id
    assert decoded(model, tokenizer) == written.generate(TEXT, **options)[0, TEXT.shape[1] :].tolist()
    half = load(file, device="cpu", dtype="bfloat16").model
    assert half.config.rope_parameters == found and half.name_or_path == str(file)


@torch.no_grad()
def test_factors_that_are_nobodys_are_taken_as_they_are(tmp_path):
    factors = [1, 1, 1.5, 2, 3, 8, 8, 12]
    written = write_gguf(tmp_path / "a.gguf", rope_freqs=factors)
    rotary = rotary_module(written)
    rotary.inv_freq /= torch.tensor(factors)
    for weights in ("stored", "float32"):
        model, tokenizer = load(tmp_path / "a.gguf", device="cpu", weights=weights, arithmetic="float32")
        assert model.config.max_position_embeddings == 512
        torch.testing.assert_close(model(TEXT).logits, written(TEXT).logits, rtol=1e-3, atol=1e-3)
        assert decoded(model, tokenizer)


@pytest.mark.parametrize(("own", "more"), [({}, 1.0), ({"scaling.attn_factor": 1.25}, 1.25)])
def test_yarns_own_factor_of_attention(own, more, tmp_path):
    write_gguf(tmp_path / "a.gguf", rope=YARN | own)
    rotary = rotary_module(load(tmp_path / "a.gguf", device="cpu").model)
    assert rotary.attention_scaling == pytest.approx(more * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("scaled", "named"),
    [
        ({"rope": {"scaling.type": "longrope"}}, "longrope"),
        ({"rope": {"scaling.type": "yarn"}}, "None"),
        ({"rope": YARN | {"scaling.yarn_ext_factor": 0.5}}, "yarn_ext_factor 0.5"),
        ({"rope": YARN | {"scaling.yarn_log_multiplier": 0.5}}, "yarn_log_multiplier 0.5"),
        ({"rope": {"dimension_count": 8}}, "8 of each head's 16"),
        ({"rope_freqs": [2] * 4}, "4 frequencies, not 8"),
        ({"rope_freqs": [2] * 8, "rope": YARN}, "rope_freqs"),
        ({"by_length": True}, "longrope"),
    ],
    ids=str,
)
def test_what_transformers_does_not_know_is_refused_not_ignored(scaled, named, tmp_path):
    write_gguf(tmp_path / "a.gguf", **scaled)
    for weights in ("stored", "float32"):
        with pytest.raises(CapabilityError, match=rf"a\.gguf .*{named}.*Hugging Face folder"):
            load(tmp_path / "a.gguf", device="cpu", weights=weights, arithmetic="float32")


def test_what_scales_nothing_is_plain(tmp_path):
    write_gguf(tmp_path / "a.gguf", rope_freqs=[1] * 8, rope={"scaling.type": "none", "scaling.factor": 4.0})
    model = load(tmp_path / "a.gguf", device="cpu", rope_factor=2).model
    assert model.config.rope_parameters["rope_type"] == "yarn"
    write_gguf(tmp_path / "b.gguf", rope=YARN)
    with pytest.raises(CapabilityError):
        load(tmp_path / "b.gguf", device="cpu", rope_factor=2)
