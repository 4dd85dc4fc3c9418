"""A model on a GPU that drafts for itself with a copy in four bits."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from longdraft import Speculator
from longdraft.drafts.four_bit import four_bit_draft
from longdraft.memory import memory_info
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.quant.draft_copy import four_bit_copy
from longdraft.model.quant.planes import PlanesLinear, planes_of
from longdraft.native.quantized_matrix import QuantizedMatrix, quantize_blocks
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [8, 1, 1, 6] * 9]
OPTIONS = {"view": "streaming", "budget": 512, "draft_weights": "q4_0"}


@pytest.mark.parametrize("tie", [False, True])
def test_a_copy_has_four_bits_in_layers_and_eight_in_the_head(tie):
    model = tiny_model(hidden=64, heads=4, tie=tie)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    copied, ratio = four_bit_copy(model)
    names = {name: module for name, module in copied.named_modules() if isinstance(module, PlanesLinear)}
    assert len(names) == 3 * 7 + 1
    for name, layer in names.items():
        blocks = QuantizedMatrix(quantize_blocks(model.get_submodule(name).weight.detach(), "Q4_0"), "Q4_0")
        assert torch.equal(layer.weight, blocks.dequantize()) == (name != "lm_head")
    assert copied.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert 4.5 / 32 < ratio < 0.3
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_rows_that_are_no_whole_blocks_stay(caplog):
    assert four_bit_copy(tiny_model(hidden=48, heads=3)) is None  # inputs of 48


def test_a_copy_that_does_not_fit_is_not_made(monkeypatch, caplog):
    monkeypatch.setattr(memory_info, "available_bytes", lambda *_: 100)
    with caplog.at_level(logging.INFO, "longdraft"):
        assert four_bit_copy(tiny_model(hidden=64, heads=4)) is None
    assert "copy in four bits" in caplog.text


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}], ids=str)
def test_it_drafts_on_a_gpu_and_the_text_is_the_models(settings, simulated_gpu, monkeypatch):
    model = tiny_model(hidden=64, heads=4)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24, eos_token_ids=[], **settings)
    to_simulated_gpu(model)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: generator())
    spec, recorder = Speculator("self", target=model, plan="fixed", **OPTIONS), SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    results = spec.generate(PROMPTS, max_new_tokens=24, eos_token_ids=[], **settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    accepted, drafted = sum(r.accepted for r in results), sum(r.drafted for r in results)
    assert 0 < accepted < drafted
    assert recorder.replays > 5 * max(r.rounds for r in results) // 2  # drafts are replayed too
    draft = four_bit_draft(spec.runner())
    assert draft is four_bit_draft(spec.runner()) and draft.forward_ratio < 0.3
    captures = recorder.captures
    again = spec.generate(PROMPTS, max_new_tokens=24, eos_token_ids=[], **settings)
    assert [r.token_ids for r in again] == [r.token_ids for r in plain] and recorder.captures == captures


def test_a_changed_model_gets_a_new_copy_and_an_unused_one_is_freed(simulated_gpu):
    model = to_simulated_gpu(tiny_model(hidden=64, heads=4))
    spec = Speculator("self", target=model, plan="fixed", **OPTIONS)
    spec.generate(PROMPTS[:1], max_new_tokens=4)
    before = four_bit_draft(spec.runner())
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach(), requires_grad=False)
    spec.generate(PROMPTS[:1], max_new_tokens=4)
    after = four_bit_draft(spec.runner())
    assert after is not before
    del spec, before, after
    gc.collect()


@pytest.mark.parametrize("with_head", [False, True])
def test_layers_of_eight_bits_get_four(with_head):
    """As a GGUF file in Q8_0 on a GPU has them. Its head keeps its eight bits."""
    model = tiny_model(hidden=64, heads=4)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and (with_head or name != "lm_head"):
            blocks = QuantizedMatrix(quantize_blocks(module.weight.detach(), "Q8_0"), "Q8_0")
            model.set_submodule(name, PlanesLinear(planes_of(blocks)))
    copied, ratio = four_bit_copy(model)
    layers = [module for module in copied.modules() if isinstance(module, PlanesLinear)]
    assert sum(layer.interleave == 16 for layer in layers) == 3 * 7 and 0.3 < ratio < 0.6
    assert four_bit_copy(copied) is None
