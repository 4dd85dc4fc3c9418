"""Packed weights compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft.model import packing
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.packing import PackedLinear


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    """Weights are packed where our kernels cannot be compiled."""
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")


pytestmark = pytest.mark.skipif(not packing.available(), reason="this build of torch has no packed products")


@pytest.mark.parametrize(("shape", "bias"), [((3, 20), False), ((1, 4, 20), True), ((32, 20), True)])
def test_the_product_is_the_plain_one_and_a_changed_weight_is_packed_anew(shape, bias):
    layer, x = nn.Linear(20, 33, bias=bias), torch.randn(shape)
    packed = PackedLinear(layer.weight, layer.bias)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)
            layer.weight.mul_(2)


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Rows of every packed product."""
    found: list[int] = []
    own = PackedLinear.__call__

    def product(self, x):
        found.append(len(x))
        return own(self, x)

    monkeypatch.setattr(PackedLinear, "__call__", product)
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 32, 33])
def test_layers_serve_packed_where_it_pays(rows, products):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(rows, 8)
    with torch.inference_mode():
        expected = module(x)
        assert len(FewRowsModule(module).layers) == 2
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert products == ([rows, rows] if packing.pays(rows) else [])


def test_other_kinds_of_layers_are_left_alone():
    class Adapted(nn.Linear):
        pass

    module = nn.Sequential(Adapted(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert FewRowsModule(module).layers == []
    assert not any("forward" in vars(layer) for layer in module)


def test_the_switch_and_full_memory_leave_layers_as_they_are(monkeypatch, free_memory, products):
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    expected = module(x)
    with monkeypatch.context() as patched:
        patched.setenv(packing.SWITCH, "0")
        assert FewRowsModule(module).layers == []
    free_memory(100)
    FewRowsModule(module)
    torch.testing.assert_close(module(x), expected)
    assert not products
