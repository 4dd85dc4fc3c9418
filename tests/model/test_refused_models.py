"""Models that cannot be hosted exactly are refused, and numbers that are none are errors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    OpenAIGPTConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from longdraft import Speculator
from longdraft.errors import ContextError, UnsupportedModelError
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward
from tests.support.simulated_gpu import simulate_gpu, to_simulated_gpu
from tests.support.tiny import tiny_model
from tests.zoo.tiny_models import tiny_model as zoo_model


def text(n: int, seed: int = 0, vocab: int = 61) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def without_weights():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_model().config)


def with_sparse_attention():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "full_attention", "indexed_attention"]
    return model


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def of(config):
    return lambda: AutoModelForCausalLM.from_config(config)


def with_an_option():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda **given: own(**given, position_bias=4)
    return model


def by_torch():
    return torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear}, dtype=torch.qint8)


def by_bitsandbytes():
    model = tiny_model()
    layer = model.model.layers[1].mlp.up_proj
    layer.__class__ = type("Linear8bitLt", (torch.nn.Linear,), {"state": SimpleNamespace(threshold=6.0)})
    return model


QUANTISED = r"model\.layers\.\d\.\w+\.\w+ \(Linear"
# What is given as a target, and what the refusal names.
REFUSED = {
    "a name": (lambda: "meta-llama/Llama-3.2-1B", r"\bstr\b"),
    "no head": (lambda: tiny_model().model, "LlamaModel"),
    "no weights": (without_weights, r"model\.embed_tokens\.weight.*'meta'"),
    "sparse attention": (with_sparse_attention, "indexed_attention"),
    "an encoder-decoder": (encoder_decoder, "T5ForConditionalGeneration"),
    "attention without interface": (of(OpenAIGPTConfig(vocab_size=61, n_embd=16, n_layer=2, n_head=2)), "inter"),
    "a model that looks ahead": (of(BertConfig(**SMALL, initializer_range=0.3)), "BertLMHeadModel"),  # no is_decoder
    "an option of attention": (with_an_option, "position_bias"),
    # Attention code of their own: the way out is named.
    **{kind: (partial(zoo_model, kind), "decode it with its own generate") for kind in ("bloom", "gpt_neo", "falcon")},
    # Quantisations that look at all rows.
    "quantised by torch": (by_torch, QUANTISED),
    "quantised by bitsandbytes": (by_bitsandbytes, QUANTISED),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_hosted_is_refused_by_name(name):
    made, named = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=named):
        Speculator("ar", target=made()).generate([[1, 2]], max_new_tokens=1)


def test_a_model_whose_layers_are_on_several_devices_is_refused_by_name(monkeypatch):
    """As ``device_map="auto"`` spreads it over two GPUs; here half of it is on a simulated one."""
    with simulate_gpu(monkeypatch):
        model = tiny_model(layers=2)
        to_simulated_gpu(model.model.layers[1])
        with pytest.raises(UnsupportedModelError, match=r"layer 0 is on cpu, layer 1 is on cuda:0.*device_map"):
            Speculator("ar", target=model).generate([text(20)], max_new_tokens=4)


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "self"])
def test_rotary_frequencies_that_follow_the_length_are_exact_up_to_where_they_change(method):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_model(rope_parameters=rope, context=24, dtype=torch.float64)
    spec = Speculator(method, target=model)
    room = spec.recipe().drafter().max_nodes
    prompt = text(max(2, 12 - room)) * 2
    ids = torch.tensor([prompt])
    fits = 24 - len(prompt) - room
    if fits > 0:
        settings = {"max_new_tokens": fits, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, custom_generate=spec))
    with pytest.raises(ContextError):
        model.generate(ids, max_new_tokens=max(fits, 0) + 1, custom_generate=spec)
    with pytest.raises(ContextError):
        spec.generate([prompt, [1, 2]], max_new_tokens=max(fits, 0) + 1)


def test_a_layer_that_mixes_tokens_without_the_interface_is_noticed():
    model = tiny_model()
    runner = TargetRunner(model)
    mixer = model.model.layers[1].self_attn
    mixer.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        forward(runner, [[1, 2]], runner.new_store(1, 8), [0])
