"""Trained drafts of a target with few bits a weight on a GPU: their layers have eight bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft import Speculator
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.quant.planes import PlanesLinear, planes_of
from longdraft.native.quantized_matrix import QuantizedMatrix, quantize_blocks
from tests.support.methods import METHODS, SpeculatorsByMethod
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.slow_marks import slow
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [8, 1, 1, 6] * 9]
# As an AWQ checkpoint, whose head has 16 bits; as a GGUF file.
HEADS = ("float", "planes")


def round_to_planes(model: nn.Module, with_head: bool) -> None:
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and (with_head or path != "lm_head") and module.in_features % 32 == 0:
            blocks = QuantizedMatrix(quantize_blocks(module.weight.detach(), "Q8_0"), "Q8_0")
            model.set_submodule(path, PlanesLinear(planes_of(blocks), module.bias))


def linear_layers(spec: Speculator) -> list[nn.Module]:
    block = spec.draft().bind(spec.runner()).block
    return [module for module in block.modules() if isinstance(module, nn.Linear | PlanesLinear)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", ["longspec", "eagle3", slow("tokenswift"), slow("eagle")])
def test_drafts_of_a_quantised_target_have_eight_bits(method, head, tmp_path, simulated_gpu):
    specs = SpeculatorsByMethod(tmp_path, torch.float32)
    model = specs.model
    round_to_planes(model, head == "planes")
    options = specs.options(method)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    to_simulated_gpu(model)
    spec = Speculator(method, target=model, plan="fixed", **options)
    spec.runner().graphs = CudaGraphs(SimulatedGraphs(simulated_gpu), uses_before_capture=0)
    found = spec.generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert 0 < sum(r.accepted for r in found) < sum(r.drafted for r in found)
    linear = linear_layers(spec)
    assert linear and all(type(module) is PlanesLinear and module.interleave == 0 for module in linear)
    for module in linear:
        assert module.quants.numel() + module.block_scales.nbytes < 1.1 * module.in_features * module.out_features


@pytest.mark.slow
@pytest.mark.parametrize("method", ["peagle", "dflash"])
def test_published_drafts_have_eight_bits_where_rows_are_whole_blocks(method, tmp_path, simulated_gpu):
    model, case = tiny_model(layers=4), METHODS[method]
    round_to_planes(model, with_head=False)
    options = SpeculatorsByMethod(tmp_path).given(case, model)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    spec = Speculator(case.method, target=to_simulated_gpu(model), plan="fixed", **options)
    found = spec.generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert 0 < sum(r.accepted for r in found) < sum(r.drafted for r in found)
    assert any(type(module) is PlanesLinear for module in linear_layers(spec))
