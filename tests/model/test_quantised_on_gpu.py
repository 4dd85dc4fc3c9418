"""Weight-only quantised layers on a simulated GPU: verifications are recorded, and what cannot be done is said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longdraft import Speculator
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.runner import TargetRunner
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 5, [8, 1, 1, 6] * 7]


class Int8Linear(nn.Module):
    """Weights in eight bits with a scale for each output: what packages do that quantise weights alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.qweight.to(x.dtype) * self.scale)


class Waiting(Int8Linear):
    """Reads a number of the device in each forward, as layers do that look for outliers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.abs().amax()) < 1e9 else x


def quantised(kind: type[Int8Linear]):
    model = tiny_model(layers=2, hidden=32, heads=4)
    for layer in model.model.layers:
        for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(part, f"{name}_proj", kind(getattr(part, f"{name}_proj")))
    return model


@pytest.mark.parametrize(("kind", "recorded"), [(Int8Linear, True), (Waiting, False)])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_quantised_layers_are_recorded_unless_they_wait(method, kind, recorded, simulated_gpu, caplog):
    model = quantised(kind)
    options = {"max_new_tokens": 8, "eos_token_ids": []}
    expected = [r.token_ids for r in Speculator("ar", target=model).generate(PROMPTS, **options)]
    spec = Speculator(method, target=to_simulated_gpu(model), plan="fixed")
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    assert [r.token_ids for r in spec.generate(PROMPTS, **options)] == expected
    assert (recorder.replays > 0) == recorded and ("could not be captured" in caplog.text) != recorded


def test_deterministic_takes_quantised_layers(simulated_gpu):
    model = quantised(Int8Linear)
    TargetRunner(model)
    model = to_simulated_gpu(model)
    found = [
        Speculator(name, target=model, plan="fixed", deterministic=True).generate(PROMPTS, max_new_tokens=8)
        for name in ("ar", "prompt-lookup")
    ]
    assert [r.token_ids for r in found[0]] == [r.token_ids for r in found[1]]
