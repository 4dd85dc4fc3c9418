"""Layers that other packages quantise: tokens are the model's own, rows keep their bits, and the rest is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import longdraft
from longdraft import Speculator
from longdraft.errors import UnsupportedModelError
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from tests.native.levels import needs_kernels
from tests.support import tree_logits
from tests.support.quantised_folders import (
    NEW,
    PROMPTS,
    SIZES,
    compressed_folder,
    own_tokens,
    plain_folder,
    quantised_folder,
)
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.slow_marks import slow
from tests.support.tiny import tiny_model, tiny_tokenizer


def decoded(model: PreTrainedModel, method: str, batch: int, **options: Any) -> list[list[int]]:
    results = Speculator(method, target=model, **options).generate(
        PROMPTS, max_new_tokens=NEW, batch=batch, eos_token_ids=[]
    )
    assert method != "prompt-lookup" or any(r.accepted < r.drafted for r in results)
    return [r.token_ids for r in results]


def check_rows(model: PreTrainedModel) -> None:
    """A row has the same bits alone and beside others."""
    if kernels() is not None:
        tree_logits.check_tree_logits(TargetRunner(model))


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


def rounded(x: torch.Tensor, step: torch.Tensor | float) -> torch.Tensor:
    return (x / step).round() * step


def by_number(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Adds up in another order for a single row, as many kernels do."""
    if x.numel() > x.shape[-1]:
        return F.linear(x, layer.weight)
    return F.linear(x.double(), layer.weight.double()).float()


def not_here(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    raise ImportError("this kernel needs a GPU")


def not_in_inference_mode(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("Cannot set version_counter for inference tensor")
    return F.linear(x, layer.weight)


def int8_weights(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, rounded(layer.weight, layer.weight.abs().amax(1, keepdim=True) / 127))


def waiting(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Reads a number of the device in each forward, as layers do that look for outliers."""
    return int8_weights(layer, x) if float(x.abs().amax()) < 1e9 else x


# Name of a layer's class -> its forward.
LAYERS: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "ScalesTogether": lambda layer, x: F.linear(rounded(x, x.abs().amax() / 127), layer.weight),
    "RoundsByNumber": by_number,
    "RoundsByPlace": lambda layer, x: F.linear(x, layer.weight) * (1 + 1e-6 * torch.arange(x.shape[-2])[:, None]),
    "RoundsItsRows": lambda layer, x: F.linear(rounded(x, x.abs().amax(-1, keepdim=True) / 3), layer.weight),
    # To a few bits, which hides the order for most rows.
    "RoundsItsResults": lambda layer, x: rounded(by_number(layer, x), 0.02),
    "OnlyElsewhere": not_here,
    "NotInInferenceMode": not_in_inference_mode,
    "Int8Weights": int8_weights,
    "Waiting": waiting,
}


class Halved(torch.Tensor):
    """A weight that multiplies otherwise than its numbers say, as packages' subclasses of tensors do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], 2 * args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


def with_layers(name: str, **over: Any) -> PreTrainedModel:
    model, kind = tiny_model(**(SIZES | over)), type(name, (nn.Linear,), {"forward": LAYERS[name]})
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ScalesTogether", r"model\.layers\.0\.self_attn\.q_proj \(ScalesTogether\) .* beside larger ones"),
        ("OnlyElsewhere", r"q_proj \(OnlyElsewhere\), which cannot compute on cpu .*: this kernel needs a GPU"),
    ],
)
def test_a_layer_that_depends_on_other_rows_or_cannot_compute_is_refused(name, message):
    with pytest.raises(UnsupportedModelError, match=message):
        TargetRunner(with_layers(name))


@pytest.mark.parametrize("name", ["RoundsByNumber", "RoundsByPlace", "RoundsItsResults", "NotInInferenceMode"])
def test_a_layer_that_rounds_by_the_number_of_rows_gives_a_row_the_same_bits(name):
    model = with_layers(name)
    check_rows(model)
    if name == "RoundsByNumber":
        check_tokens(model)


def test_weights_that_are_tensors_of_another_kind():
    model = tiny_model(**SIZES)
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach().as_subclass(Halved), requires_grad=False)
    assert own_tokens(model) != own_tokens(tiny_model(**SIZES))
    check_tokens(model)


@needs_kernels
def test_layers_that_round_their_rows_are_hosted_with_our_attention():
    """A last bit of two attentions can change a row by a third: that is no other attention."""
    model = with_layers("RoundsItsRows", layers=6)
    check_rows(model)
    check_tokens(model, own=False)
    # With a model's own attention, no scores of rows are known.
    assert decoded(model, "self", 2, view="attention", budget=32, sink=8, window=8) == decoded(model, "ar", 1)


# --- the packages themselves: `make test-quantised` ---


def torchao(kind: str, **settings: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    if group := settings.pop("group", None):
        settings[group] = quantization.PerGroup(32)
    if settings.pop("by_tensor", False):
        settings["granularity"] = quantization.PerTensor()
    return transformers.TorchAoConfig(getattr(quantization, kind)(**settings))


def bitsandbytes(**settings: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**settings)


def quanto(bits: str) -> Any:
    pytest.importorskip("optimum.quanto")
    return transformers.QuantoConfig(weights=bits)


_4_BITS = {"weight_dtype": torch.int4}
_IN_4_BITS = {"load_in_4bit": True}
_NF4 = _IN_4_BITS | {"bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "int8 weights": lambda: torchao("Int8WeightOnlyConfig"),
    "int4 weights": lambda: torchao("IntxWeightOnlyConfig", group="granularity", **_4_BITS),
    "float8 weights": lambda: torchao("Float8WeightOnlyConfig"),
    "int8 rows": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "int4 weights, int8 rows": lambda: torchao(
        "Int8DynamicActivationIntxWeightConfig", group="weight_granularity", **_4_BITS
    ),
    "int8 by tensor": lambda: torchao("Int8DynamicActivationInt8WeightConfig", by_tensor=True),
    "int8 without outliers": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "int8 with outliers": lambda: bitsandbytes(load_in_8bit=True),
    "nf4": lambda: bitsandbytes(**_NF4, bnb_4bit_compute_dtype=torch.float32),
    "fp4": lambda: bitsandbytes(**_IN_4_BITS),
    "nf4 with rounded scales": lambda: bitsandbytes(**_NF4, bnb_4bit_use_double_quant=True),
    **{f"quanto {bits}": partial(quanto, bits) for bits in ("int8", "int4", "int2", "float8")},
}
TOGETHER = ("int8 by tensor", "int8 with outliers")
# Here a last bit that attention rounds otherwise can change a row's eight or sixteen bits: own tokens may differ.
# bitsandbytes computes four bits in bfloat16 where the processor can.
ROUND = ("int8 rows", "int4 weights, int8 rows", "int8 without outliers", "nf4", "fp4", "nf4 with rounded scales")


def loaded(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = CONFIGS[name]()
    return AutoModelForCausalLM.from_pretrained(plain_folder(folder), dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("config", [name for name in CONFIGS if name not in TOGETHER])
def test_weights_that_transformers_quantises(config, tmp_path):
    model = loaded(tmp_path, config)
    before = TargetRunner(model).fingerprint
    check_rows(model)
    check_tokens(model, own=config not in ROUND)
    assert TargetRunner(model).fingerprint == before


@pytest.mark.parametrize("config", ["int8 weights", "int4 weights", "int8 rows", "int8 without outliers", "nf4"])
def test_a_quantised_model_that_was_saved_is_loaded(config, tmp_path):
    model = loaded(tmp_path, config)
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


@pytest.mark.parametrize("config", TOGETHER)
def test_activations_that_are_scaled_or_searched_together_are_refused(config, tmp_path):
    model = loaded(tmp_path, config)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.self_attn\.q_proj \(Linear.* (input together|larger ones)"
    ):
        TargetRunner(model)


def test_a_whole_model_with_a_quantised_head_takes_no_trained_drafts(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model(**SIZES)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    check_rows(model)
    check_tokens(model)
    assert TargetRunner(model).vocab_size == 61
    with pytest.raises(UnsupportedModelError, match="leave lm_head out"):
        _ = TargetRunner(model).shared_parts


PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "fp8": "accelerate", "bitnet": "accelerate"}


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8", "gemma", slow("bitnet")])  # torch compiles bitnet's
def test_a_quantised_checkpoint_is_loaded_and_hosted(kind, tmp_path):
    if kind != "gemma":
        pytest.importorskip(PACKAGES[kind])
    elif not hasattr(transformers, "GemmaQuantizationConfig"):
        pytest.skip("needs a newer transformers")
    model = longdraft.load(quantised_folder(tmp_path, kind)).model
    assert model.dtype == torch.float32
    check_rows(model)  # before the model's own first forward, in which a package may unpack it
    check_tokens(model, own=kind in ("gptq", "awq", "fp8"))


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


# --- on a simulated GPU ---


@pytest.mark.parametrize(
    ("name", "deterministic", "recorded"),
    [("Int8Weights", False, True), ("Int8Weights", True, True), ("Waiting", False, False)],
)
def test_layers_on_a_gpu_are_recorded_unless_they_wait(name, deterministic, recorded, simulated_gpu, caplog):
    model = with_layers(name)
    expected = decoded(model, "ar", 2)
    if deterministic:
        TargetRunner(model)  # it is tried out on the host
    to_simulated_gpu(model)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", deterministic=deterministic, min_n=1)
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    results = spec.generate(PROMPTS[:2], max_new_tokens=8, eos_token_ids=[])
    assert [r.token_ids for r in results] == [tokens[:8] for tokens in expected[:2]]
    assert any(r.accepted < r.drafted for r in results)
    assert (recorder.replays > 0) == recorded and ("could not be captured" in caplog.text) != recorded
