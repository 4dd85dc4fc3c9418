"""Packed weights, which serve where our kernels cannot be compiled, compute what plain ones do.

tests/model/test_fused.py compares whole models that are computed by them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft.model import packing
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.packing import PackedLinear

pytestmark = pytest.mark.skipif(not packing.available(), reason="this build of torch has no packed products")


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")


@pytest.mark.parametrize(("shape", "bias"), [((3, 20), False), ((1, 4, 20), True), ((32, 20), True)])
def test_the_product_is_the_plain_one_and_a_changed_weight_is_packed_anew(shape, bias):
    layer, x = nn.Linear(20, 33, bias=bias), torch.randn(shape)
    packed = PackedLinear(layer.weight, layer.bias)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)
            layer.weight.mul_(2)


def test_other_layers_the_switch_and_full_memory_leave_layers_as_they_are(monkeypatch, free_memory):
    class Adapted(nn.Linear):
        pass

    module = nn.Sequential(Adapted(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert FewRowsModule(module).layers == [] and not any("forward" in vars(layer) for layer in module)
    with monkeypatch.context() as patched:
        patched.setenv(packing.SWITCH, "0")
        assert FewRowsModule(nn.Linear(8, 8)).layers == []
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    expected = layer(x)
    assert FewRowsModule(layer).layers == [layer]
    free_memory(100)
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: pytest.fail("there is no room"))
    torch.testing.assert_close(layer(x), expected)
