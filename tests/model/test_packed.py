"""AWQ and GPTQ checkpoints on a GPU, read without another package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft import Speculator
from longdraft.errors import CheckpointError
from longdraft.model.gpu import planes_kernel
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.load.checkpoints import read_checkpoint
from longdraft.model.quant import planes
from longdraft.model.quant.packed import PackedLinear, is_readable, reading_packed_layers
from longdraft.model.quant.planes import PlanesLinear
from tests.support.quantised_folders import GROUP, KINDS, pack, quantised_folder
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu

METHODS = ("awq", "gptq")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 30, [8, 1, 1, 6] * 40]


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_has_the_checkpoints_weights_and_the_kernel_multiplies_with_them(method):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(16, (40, 4 * GROUP), generator=generator)
    zeros = torch.randint(16, (40, 4), generator=generator)
    scales = torch.rand(40, 4, generator=generator).half().float() / 64
    layer = PackedLinear(nn.Linear(4 * GROUP, 40, device="meta"), method, GROUP)
    tensors = pack(method, numbers, zeros, scales) | {"bias": torch.randn(40, generator=generator).half()}
    assert {name: x.shape for name, x in layer.named_buffers()} == {name: x.shape for name, x in tensors.items()}
    for name, x in tensors.items():
        setattr(layer, name, x)
    found = layer.to_planes(torch.bfloat16)
    weights = (numbers - zeros.repeat_interleave(GROUP, 1)) * scales.half().float().repeat_interleave(GROUP, 1)
    assert torch.equal(found.weight, weights) and found.bias.dtype == torch.bfloat16
    p = found.planes
    x = torch.randn(5, 4 * GROUP, generator=generator).bfloat16()
    arguments = x, p.quants, p.block_scales, p.group_scales, found.bias, p.interleave, p.zero
    expected = planes.planes_linear(*arguments)
    step = torch.finfo(torch.bfloat16).eps
    limit = 4 * step * float(expected.abs().max())
    torch.testing.assert_close(planes_kernel.planes_linear(*arguments), expected, rtol=4 * step, atol=limit)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_read_and_drafts_are_exact(method, tmp_path, simulated_gpu, monkeypatch):
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: generator())
    folder = quantised_folder(tmp_path, method)
    with reading_packed_layers():
        model = read_checkpoint(str(folder), torch.float32).model
    layers = {name for name, module in model.named_modules() if isinstance(module, PlanesLinear)}
    assert layers and "lm_head" not in layers and model.dtype == torch.float32
    assert not [name for name, x in model.named_parameters() if x.dtype != torch.float32]
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
    view = {"view": "streaming", "budget": 12, "sink": 2, "window": 2}  # so little that some drafts are wrong
    spec = Speculator("self", target=to_simulated_gpu(model.eval()), plan="fixed", **view)
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    settings = {"max_new_tokens": 48, "eos_token_ids": [], "temperature": 0.7, "seed": 3}
    plain = Speculator("ar", target=model).generate(PROMPTS, **settings)
    found = spec.generate(PROMPTS, **settings)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain] and recorder.replays > 0
    assert 0 < sum(r.accepted for r in found) < sum(r.drafted for r in found)


def test_what_is_not_read_goes_its_usual_way():
    assert all(is_readable(KINDS[method][0]) for method in METHODS)
    other = [{"bits": 8}, {"group_size": -1}, {"desc_act": True, "quant_method": "gptq"}, {"version": "gemv"}]
    assert not any(is_readable(KINDS["awq"][0] | settings) for settings in other)
    assert not is_readable({"quant_method": "fp8"})


def test_inputs_in_another_order_are_refused(tmp_path):
    layer = PackedLinear(nn.Linear(2 * GROUP, 8, bias=False, device="meta"), "gptq", GROUP)
    ones = torch.ones(8, 2)
    tensors = pack("gptq", torch.ones(8, 2 * GROUP).int(), ones.int(), ones)
    for name, x in tensors.items():
        setattr(layer, name, x.flip(0) if name == "g_idx" else x)
    with pytest.raises(CheckpointError, match="desc_act"):
        layer.to_planes(torch.float16)
