"""Adapters of PEFT on the target: tokens are those of the adapted model, and rows of another adapter are not reused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, PreTrainedModel

import longdraft
from longdraft import PromptCache, Speculator
from longdraft.errors import CheckpointError, UnsupportedModelError
from longdraft.model.quant.stored import StoredLinear
from longdraft.model.runner import TargetRunner
from tests.native.levels import LEVELS, needs_kernels
from tests.support.quantised_folders import (
    NEW,
    PROMPTS,
    SIZES,
    compressed_folder,
    own_tokens,
    plain_folder,
    quantised_folder,
)
from tests.support.tiny import tiny_model

peft = pytest.importorskip("peft")

IDS = torch.tensor([PROMPTS[1]])


def adapted(kind: str = "LoraConfig", **settings: Any) -> Any:
    """A PeftModel whose adapter changes the text."""
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    return on(tiny_model(**SIZES), kind, **settings)


def on(base: PreTrainedModel, kind: str = "LoraConfig", **settings: Any) -> Any:
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "up_proj"]} | settings
    model = peft.get_peft_model(base, getattr(peft, kind)(**options)).eval()
    shake(model)
    return model


def shake(model: PreTrainedModel) -> None:
    """Changes the weights of an active adapter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)


def two_adapters() -> Any:
    model = adapted(r=4)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("other")
    shake(model)
    model.set_adapter("default")
    return model


def decoded(spec: Speculator, cache: PromptCache | None = None) -> list[list[int]]:
    results = spec.generate(PROMPTS, max_new_tokens=NEW, batch=3, cache=cache, eos_token_ids=[])
    return [r.token_ids for r in results]


def speculator(model: Any) -> Speculator:
    return Speculator("prompt-lookup", target=model, min_n=1, branches=2)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LoraConfig", {"r": 4}),
    ("LoraConfig", {"r": 4, "use_dora": True}),
    ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("LoraConfig", {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("LoHaConfig", {"r": 4}),
    ("LoKrConfig", {"r": 4}),
    ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    ("LoraConfig", {"r": 4, "use_rslora": True}),
    ("LoraConfig", {"r": 4, "target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "down_proj.weight"]}),
    ("AdaLoraConfig", {"total_step": 10}),
    ("BOFTConfig", {"boft_block_size": 4}),
    ("HRAConfig", {}),
    ("MissConfig", {"r": 4}),
    ("OFTConfig", {"oft_block_size": 4}),
    ("RandLoraConfig", {"r": 4}),
    ("RoadConfig", {"group_size": 4}),
    ("ShiraConfig", {"r": 2}),
    ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    ("TrainableTokensConfig", {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"]}),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_tokens_are_those_of_the_adapted_model(kind, settings):
    model = adapted(kind, **settings)
    expected = own_tokens(model)
    with model.disable_adapter():
        assert own_tokens(model) != expected
    spec = speculator(model)
    assert decoded(spec) == expected == decoded(Speculator("ar", target=model))
    # PEFT hands the call on to the model inside.
    out = model.generate(input_ids=IDS, max_new_tokens=NEW, do_sample=False, custom_generate=spec)
    assert out[0, IDS.shape[1] :].tolist() == expected[1]


def test_a_switch_of_adapters_is_noticed_and_no_cache_is_read_with_another():
    model = two_adapters()
    spec, cache = speculator(model), PromptCache()
    first = own_tokens(model)
    assert decoded(spec, cache) == first
    names = [spec.runner().fingerprint]
    model.set_adapter("other")
    second = own_tokens(model)
    assert second != first and decoded(spec, cache) == second
    names.append(spec.runner().fingerprint)
    with model.disable_adapter():
        base = own_tokens(model)
        assert base not in (first, second) and decoded(spec, cache) == base
        names.append(spec.runner().fingerprint)
    model.set_adapter("default")
    assert decoded(spec, cache) == first
    assert spec.runner().fingerprint == names[0] and len(set(names)) == 3
    # The same adapter again: now the rows are there.
    assert spec.generate(PROMPTS[1], max_new_tokens=2, cache=cache)[0].cached_tokens > 0


def test_merged_adapters_give_the_same_text_and_a_cache_of_their_own():
    model = two_adapters()
    spec, cache = speculator(model), PromptCache()
    expected = own_tokens(model)
    assert decoded(spec, cache) == expected
    model.merge_adapter()
    result = spec.generate(PROMPTS[1], max_new_tokens=NEW, cache=cache, eos_token_ids=[])[0]
    assert result.token_ids == expected[1] and result.cached_tokens == 0
    model.unmerge_adapter()
    assert decoded(spec, cache) == expected
    plain = copy.deepcopy(model).merge_and_unload()
    assert decoded(speculator(plain)) == expected


def test_adapters_that_transformers_loads_itself(tmp_path: Path):
    saved = two_adapters()
    saved.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model(**SIZES), tmp_path).eval()  # as PEFT loads them
    assert decoded(speculator(again)) == own_tokens(again) == own_tokens(saved)
    model = tiny_model(**SIZES)
    model.load_adapter(tmp_path, adapter_name="one")
    model.load_adapter(tmp_path / "other", adapter_name="two")
    try:
        model.set_adapter("one")
    except ValueError as error:  # an older PEFT than this transformers wants
        pytest.skip(str(error))
    spec, cache, texts = speculator(model), PromptCache(), []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(own_tokens(model))
        assert decoded(spec, cache) == texts[-1]
    assert texts[0] == texts[2] != texts[1]
    model.disable_adapters()
    assert decoded(spec, cache) == own_tokens(model) == own_tokens(tiny_model(**SIZES))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("PromptTuningConfig", {"num_virtual_tokens": 3}, r"'default' \(PROMPT_TUNING\) puts tokens of its own"),
    ("PrefixTuningConfig", {"num_virtual_tokens": 3}, r"PREFIX_TUNING\) puts tokens"),
    ("LoraConfig", {"target_modules": ["q_proj"], "alora_invocation_tokens": [3]}, "begins in the middle"),
    ("LilyConfig", {"target_modules": ["q_proj"], "r": 4}, r"LILY\) mixes its parts by all tokens"),
    ("PolyConfig", {"target_modules": ["q_proj"]}, r"POLY\) takes a task id"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_adapters_that_compute_more_than_rows_are_refused(kind, settings, message):
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    model = peft.get_peft_model(tiny_model(), getattr(peft, kind)(task_type="CAUSAL_LM", **settings)).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        TargetRunner(model)
    # The model inside, which is what generate calls us with, does not know its prefix.
    spec = Speculator("prompt-lookup")
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, custom_generate=spec)


def test_an_adapter_for_each_row_of_a_batch_is_refused():
    model = two_adapters()
    spec = speculator(model)
    model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False, custom_generate=spec)
    with pytest.raises(UnsupportedModelError, match="given adapter_names"):
        model.generate(
            input_ids=IDS.expand(2, -1), adapter_names=["default", "other"], max_new_tokens=2, do_sample=False,
            custom_generate=spec,
        )  # fmt: skip
    model.set_adapter("other")
    assert decoded(spec) == own_tokens(model)


def mixture() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "initializer_range": 0.3}
    config = MixtralConfig(vocab_size=61, num_hidden_layers=2, max_position_embeddings=512, **sizes, **ends, **experts)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("parameters", [None, ["experts.gate_up_proj", "experts.down_proj"], ["gate.weight"]])
def test_adapters_of_experts(parameters):
    """PEFT replaces the experts' weights while they compute."""
    model = on(mixture(), r=4, target_modules=["q_proj"], target_parameters=parameters)
    spec = speculator(model)
    assert decoded(spec) == own_tokens(model) == decoded(Speculator("ar", target=model))
    with model.disable_adapter():
        assert decoded(spec) == own_tokens(model)
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        assert decoded(spec) == own_tokens(model) == decoded(Speculator("ar", target=model))


def stored(folder: Path) -> PreTrainedModel:
    """A model whose weights stay in bfloat16 while it computes in float32."""
    return longdraft.load(plain_folder(folder, torch.bfloat16), weights="stored").model


@needs_kernels
def test_adapters_on_weights_that_stay_as_they_are_stored(tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"StoredLinear.* is not supported"):  # PEFT's own
        peft.get_peft_model(stored(tmp_path), config)
    config._register_custom_module({StoredLinear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(stored(tmp_path), config).eval()
    shake(model)
    expected = own_tokens(model)
    assert decoded(speculator(model)) == expected == decoded(Speculator("ar", target=model))
    unpacked = on(longdraft.load(tmp_path, weights="float32").model, r=4, target_modules=["q_proj", "up_proj"])
    assert decoded(speculator(unpacked)) == own_tokens(unpacked)


def test_the_folder_of_an_adapter_is_refused_as_a_model(tmp_path: Path):
    adapted(r=4).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds an adapter.*PeftModel"):
        longdraft.load(tmp_path)


def by_torchao(_folder: Path) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    base = tiny_model(**SIZES)
    quantization.quantize_(base.model, quantization.Int8WeightOnlyConfig())
    return base


def by_bitsandbytes(folder: Path) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(plain_folder(folder), dtype=torch.float32, quantization_config=config)


def by_gptq(folder: Path) -> PreTrainedModel:
    pytest.importorskip("gptqmodel")
    return longdraft.load(quantised_folder(folder, "gptq")).model


def by_compressed_tensors(folder: Path) -> PreTrainedModel:
    pytest.importorskip("compressed_tensors")
    return longdraft.load(compressed_folder(folder, "W4A16")).model


def in_int8(_folder: Path) -> PreTrainedModel:
    """The embedded model."""
    if not LEVELS:
        pytest.skip("needs kernels")
    return longdraft.load().model


BASES = {
    "torchao": by_torchao,
    "bitsandbytes": by_bitsandbytes,
    "gptq": by_gptq,
    "compressed-tensors": by_compressed_tensors,
    "int8": in_int8,
}


@pytest.mark.parametrize("base", BASES)
def test_an_adapter_on_a_quantised_model(base, tmp_path):
    """As QLoRA trains them. An adapter's own products are in float32."""
    model, own = BASES[base](tmp_path), {StoredLinear: peft.tuners.lora.Linear}
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    config._register_custom_module(own)
    without = decoded(Speculator("ar", target=model))
    model = peft.get_peft_model(model, config).eval()
    plain = decoded(Speculator("ar", target=model))
    assert decoded(speculator(model)) == plain != without
    assert (TargetRunner(model).arithmetic == "int8") == (base == "int8")
    # bitsandbytes computes in bfloat16 where the processor can: a last bit of two attentions can change a token. With
    # int8 arithmetic, the KV of generate has other bits.
    assert base in ("bitsandbytes", "int8") or own_tokens(model) == plain
