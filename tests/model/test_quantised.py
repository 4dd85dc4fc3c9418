"""Layers that other packages quantise: tokens are the model's own, rows keep their bits, and the rest is refused."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import longdraft
from longdraft import PromptCache, Speculator
from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from tests.forwards import forward
from tests.quantised_folders import SIZES, compressed_folder, plain_folder, quantised_folder
from tests.tiny import tiny_model, tiny_tokenizer

needs_kernels = pytest.mark.skipif(kernels() is None, reason="rows have equal bits with our kernels only")
TEXT = [3, 9, 4, 7, 2, 5, 8, 1, 6, 10]
# Of several lengths, and each repeats itself: lookups find drafts, of which most are wrong.
PROMPTS = [TEXT[:7] * 2, TEXT * 3, TEXT[:3] * 2]
NEW = 24


def own_tokens(model: PreTrainedModel) -> list[list[int]]:
    """What the model's own ``generate`` continues each prompt with."""
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def decoded(model: PreTrainedModel, method: str, batch: int, **options: Any) -> list[list[int]]:
    results = Speculator(method, target=model, **options).generate(
        PROMPTS, max_new_tokens=NEW, batch=batch, eos_token_ids=[]
    )
    assert method != "prompt-lookup" or any(r.accepted < r.drafted for r in results)
    return [r.token_ids for r in results]


def logits(runner: TargetRunner, sizes: list[int]) -> torch.Tensor:
    """Of 20 rows behind a text, computed in pieces of these sizes."""
    store = runner.new_store(1, 64)
    forward(runner, [TEXT], store, [0], prompt=True)
    store.commit(0, range(len(TEXT)))
    text, done = (TEXT * 2)[::-1], []
    for size in sizes:
        start = sum(map(len, done))
        done.append(forward(runner, [text[start : start + size]], store, [0]).logits[0])
        store.commit(0, range(size))
    return torch.cat(done)


def check_rows(model: PreTrainedModel) -> None:
    """A row has the same bits alone and beside others."""
    if kernels() is not None:
        runner = TargetRunner(model)
        alone = logits(runner, [1] * 20)
        assert all(torch.equal(logits(runner, sizes), alone) for sizes in ([20], [3, 5, 7, 5], [8, 12]))


def check_tokens(model: PreTrainedModel, own: bool = True) -> None:
    """Drafts change no token: those of plain decoding and, if ``own``, of the model's ``generate``."""
    if not own and kernels() is None:
        return  # other attention rounds by the number of rows, which layers that round their rows make larger
    plain = decoded(model, "ar", 1)
    assert decoded(model, "prompt-lookup", 3, min_n=1, branches=2) == plain
    assert decoded(model, "self", 2, view="streaming", budget=12, sink=2, window=2) == plain
    if own:
        assert own_tokens(model) == plain


# --- layers of our own that do what packages do ---


class ScalesTogether(nn.Linear):
    """Rounds its input to eight bits with one scale for all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return F.linear((x / scale).round() * scale, self.weight, self.bias)


class RoundsByNumber(nn.Linear):
    """Adds up in another order for a single row, as many kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x.double(), self.weight.double(), None).float()


class RoundsByPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = 1 + 1e-6 * torch.arange(x.shape[-2])[:, None]
        return F.linear(x, self.weight, self.bias) * places


class RoundsItsRows(nn.Linear):
    """Rounds each row of its input to three bits, with a scale of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 3
        return F.linear((x / scale).round() * scale, self.weight, self.bias)


class RoundsItsResults(RoundsByNumber):
    """Rounds what it has added up to a few bits, which hides the order for most rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) / 0.02).round() * 0.02


class OnlyElsewhere(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ImportError("this kernel needs a GPU")


class NotInInferenceMode(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return F.linear(x, self.weight, self.bias)


def with_layers(kind: type[nn.Linear], **over: Any) -> PreTrainedModel:
    model = tiny_model(**(SIZES | over))
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ScalesTogether, r"model\.layers\.0\.self_attn\.q_proj \(ScalesTogether\) .* beside larger ones"),
        (OnlyElsewhere, r"q_proj \(OnlyElsewhere\), which cannot compute on cpu .*: this kernel needs a GPU"),
    ],
)
def test_a_layer_that_depends_on_other_rows_or_cannot_compute_is_refused(kind, message):
    with pytest.raises(UnsupportedModelError, match=message):
        TargetRunner(with_layers(kind))


@pytest.mark.parametrize("kind", [RoundsByNumber, RoundsItsResults, NotInInferenceMode])
def test_a_layer_that_rounds_by_the_number_of_rows_gives_a_row_the_same_bits(kind):
    model = with_layers(kind)
    check_rows(model)
    check_tokens(model)


@needs_kernels
def test_layers_that_round_their_rows_are_hosted_with_our_attention():
    """A last bit of two attentions can change a row by a third: that is no other attention."""
    model = with_layers(RoundsItsRows, layers=6)
    check_rows(model)
    check_tokens(model, own=False)
    # With a model's own attention, no scores of rows are known.
    assert decoded(model, "self", 2, view="attention", budget=32, sink=8, window=8) == decoded(model, "ar", 1)


@needs_kernels
def test_a_layer_that_rounds_by_the_place_of_a_row_is_hosted_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "longdraft"):
        TargetRunner(with_layers(RoundsByPlace))
    assert [r.getMessage() for r in caplog.records if "number of rows" in r.getMessage()] == [
        r.getMessage() for r in caplog.records
    ]
    assert len(caplog.records) == 1


# --- the packages themselves: `make test-quantised` ---


def torchao(kind: str, **settings: Any) -> Any:
    pytest.importorskip("torchao")
    quantization = importlib.import_module("torchao.quantization")
    kinds = {name: getattr(quantization, name)(**more) for name, more in settings.items()}
    return importlib.import_module("transformers").TorchAoConfig(getattr(quantization, kind)(**kinds))


def int8_weights() -> Any:
    return torchao("Int8WeightOnlyConfig")


def int4_weights() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    return importlib.import_module("transformers").TorchAoConfig(config)


def float8_weights() -> Any:
    return torchao("Float8WeightOnlyConfig")


def int8_rows() -> Any:
    return torchao("Int8DynamicActivationInt8WeightConfig")


def int4_weights_int8_rows() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    return importlib.import_module("transformers").TorchAoConfig(config)


def int8_tensor() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8DynamicActivationInt8WeightConfig(granularity=quantization.PerTensor())
    return importlib.import_module("transformers").TorchAoConfig(config)


def bitsandbytes(**settings: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return importlib.import_module("transformers").BitsAndBytesConfig(**settings)


def int8_without_outliers() -> Any:
    return bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0)


def int8_with_outliers() -> Any:
    return bitsandbytes(load_in_8bit=True)


def nf4() -> Any:
    return bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def fp4() -> Any:
    return bitsandbytes(load_in_4bit=True)


def nf4_with_rounded_scales() -> Any:
    return bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def quanto(bits: str) -> Any:
    pytest.importorskip("optimum.quanto")
    return importlib.import_module("transformers").QuantoConfig(weights=bits)


def quanto_int8() -> Any:
    return quanto("int8")


def quanto_int4() -> Any:
    return quanto("int4")


def quanto_int2() -> Any:
    return quanto("int2")


def quanto_float8() -> Any:
    return quanto("float8")


def loaded(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(plain_folder(folder), dtype=dtype, quantization_config=config)


WEIGHTS = [int8_weights, int4_weights, float8_weights, quanto_int8, quanto_int4, quanto_int2, quanto_float8]
# Here a last bit that attention rounds otherwise can change a row's eight or sixteen bits: own tokens may differ.
# bitsandbytes computes four bits in bfloat16 where the processor can.
ROUND = [int8_rows, int4_weights_int8_rows, int8_without_outliers, nf4, fp4, nf4_with_rounded_scales]


@pytest.mark.parametrize("config", [*WEIGHTS, *ROUND])
def test_weights_that_transformers_quantises(config, tmp_path):
    model = loaded(tmp_path, config())
    before = TargetRunner(model).fingerprint
    check_rows(model)
    check_tokens(model, own=config not in ROUND)
    assert TargetRunner(model).fingerprint == before


@pytest.mark.parametrize("config", [int8_weights, int4_weights, int8_rows, int8_without_outliers, nf4])
def test_a_quantised_model_that_was_saved_is_loaded(config, tmp_path):
    model = loaded(tmp_path, config())
    model.save_pretrained(tmp_path / "saved")
    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    again = longdraft.load(tmp_path / "saved").model
    check_rows(again)
    assert decoded(again, "prompt-lookup", 3, min_n=1, branches=2) == decoded(model, "ar", 1)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_model_that_hqq_quantises(bits):
    models = pytest.importorskip("hqq.models.hf.base")
    settings = importlib.import_module("hqq.core.quantize").BaseQuantizeConfig(nbits=bits, group_size=32)
    model = tiny_model(**SIZES)
    models.AutoHQQHFModel.quantize_model(model, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    check_rows(model)
    check_tokens(model)


@pytest.mark.parametrize("config", [int8_tensor, int8_with_outliers])
def test_activations_that_are_scaled_or_searched_together_are_refused(config, tmp_path):
    model = loaded(tmp_path, config())
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_proj \(Linear.* of its input together"):
        TargetRunner(model)


@pytest.mark.parametrize("config", [int8_weights, nf4])
def test_halves(config, tmp_path):
    """In bfloat16 rounding decides between tokens now and then, so only the first are compared."""
    model = loaded(tmp_path, config(), torch.bfloat16)
    results = Speculator("prompt-lookup", target=model, min_n=1).generate(PROMPTS, max_new_tokens=2, eos_token_ids=[])
    assert [r.token_ids[:1] for r in results] == [tokens[:1] for tokens in own_tokens(model)]


def test_a_whole_model_with_a_quantised_head_takes_no_trained_drafts(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model(**SIZES)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    check_rows(model)
    check_tokens(model)
    assert TargetRunner(model).vocab_size == 61
    with pytest.raises(UnsupportedModelError, match="leave lm_head out"):
        _ = TargetRunner(model).parts


PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "fp8": "accelerate", "bitnet": "accelerate"}
CHECKPOINTS = [
    "gptq", "awq", "fp8", "gemma", "w4a16", "w8a8", "w8a8-float",
    pytest.param("bitnet", marks=pytest.mark.slow),  # compiled by torch
]  # fmt: skip


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_quantised_checkpoint_is_loaded_and_hosted(kind, tmp_path):
    if kind != "gemma":
        pytest.importorskip(PACKAGES.get(kind, "compressed_tensors"))
    elif not hasattr(importlib.import_module("transformers"), "GemmaQuantizationConfig"):
        pytest.skip("needs a newer transformers")
    model = longdraft.load(quantised_folder(tmp_path, kind)).model
    assert model.dtype == torch.float32
    check_rows(model)  # before the model's own first forward, in which a package may unpack it
    check_tokens(model, own=kind in ("gptq", "awq", "fp8", "w4a16"))


# Weights alone, and weights with what is multiplied with them: static or by row, in eight bits or fewer.
SCHEMES = {
    True: ["W4A16", "W8A16", "W2A16", "NVFP4A16", "MXFP4A16", "MXFP8A16"],
    False: ["W8A8", "W6A8", "W4A8", "W4A4", "FP8", "FP8_DYNAMIC", "W4AFP8", "NVFP4", "MXFP4", "MXFP8"],
}


@pytest.mark.parametrize(("preset", "own"), [(name, own) for own, names in SCHEMES.items() for name in names])
def test_a_checkpoint_of_compressed_tensors_is_loaded_and_hosted(preset, own, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    if not quantization.is_preset_scheme(preset):
        pytest.skip("needs a newer compressed-tensors")
    model = longdraft.load(compressed_folder(tmp_path, preset)).model
    assert {weight.dtype for weight in model.parameters() if weight.is_floating_point()} == {torch.float32}
    check_rows(model)
    check_tokens(model, own)


def test_weights_that_were_unpacked_into_another_dtype_are_refused_by_name(tmp_path):
    """As transformers loads them; the model's own forward fails too."""
    pytest.importorskip("compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(compressed_folder(tmp_path, "NVFP4A16"), dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"q_proj \(Linear\), which cannot compute on cpu.*another dtype"):
        TargetRunner(model)


def test_a_checkpoint_whose_rows_are_scaled_together_is_refused(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = longdraft.load(quantised_folder(tmp_path, "w8a8-by-tensor")).model
    with pytest.raises(UnsupportedModelError, match="scales all rows of its input together"):
        TargetRunner(model)


def test_quantised_models_have_fingerprints_of_their_own(tmp_path):
    """A cache of one model is not read by another, even if both have the same sizes."""
    names = set()
    for i, config in enumerate([None, int8_weights(), int4_weights()]):
        model = tiny_model(**SIZES) if config is None else loaded(tmp_path / str(i), config)
        spec, cache = Speculator("ar", target=model), PromptCache()
        spec.generate(PROMPTS[1], max_new_tokens=2, cache=cache)
        names.add(spec.runner().fingerprint)
    assert len(names) == 3
