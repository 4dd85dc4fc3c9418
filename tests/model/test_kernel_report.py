"""The report of the kernels that compute a target."""

from __future__ import annotations

import re

import pytest
import torch

from longdraft import native
from longdraft.cli.kernel_report import kernel_report
from longdraft.model.quant.stored_model import num_parameters, store_half_weights
from longdraft.model.runner import TargetRunner
from longdraft.native.build import LEVELS
from tests.native.levels import needs_kernels
from tests.support.tiny import tiny_model

SIZES = {"hidden": 64, "head_dim": 32, "heads": 2, "kv_heads": 2}


def report(model, **options):
    return kernel_report(TargetRunner(model, **options))


HALVES = {"dtype": torch.bfloat16, **SIZES}
# Name -> model, options; weights, keys and values, in one call; and what the line says.
REPORTS = {
    "float32": (tiny_model, {}, (("float32",), "float32", True), "weights in float32, float32 arithmetic"),
    "rounded KV": (tiny_model, {"kv_dtype": torch.int8}, (("float32",), "int8", True), "keys and values in int8"),
    "stored": (lambda: store_half_weights(tiny_model(**HALVES)), {}, (("bfloat16",), "float32", True), "in bfloat16"),
    "in bfloat16": (lambda: tiny_model(**HALVES), {}, (("bfloat16",), None, False), "torch does the rest"),
}


@needs_kernels
@pytest.mark.parametrize("name", REPORTS)
def test_the_kernels_of_a_model(name):
    model, options, expected, line = REPORTS[name]
    found = report(model(), **options)
    assert found.level == native.kernels().level and found.reason is found.cost is None
    assert (found.weights, found.kv, found.whole) == expected
    assert LEVELS[found.level].title in found.line and line in found.line


def test_a_model_that_they_do_not_serve_is_told_why_and_what_that_costs(monkeypatch):
    if native.kernels() is not None:
        found = report(tiny_model(dtype=torch.float64))
        assert found.level is None and "none of this model's layers (float64 on a CPU)" in found.line
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    found = report(tiny_model())
    assert found.line.startswith("torch's, not longdraft's own: LONGDRAFT_NATIVE=0. Decoding takes")
    assert re.search(r"weights take .*iB, in float32$", found.line)
    assert "each product unpacks" in report(store_half_weights(tiny_model(dtype=torch.bfloat16, **SIZES))).cost
    assert kernel_report(None).reason == "LONGDRAFT_NATIVE=0"


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_counted_however_they_are_stored(tie):
    model = tiny_model(dtype=torch.bfloat16, tie=tie, **SIZES)
    expected = sum(p.numel() for p in model.parameters())
    assert num_parameters(model) == expected
    assert num_parameters(store_half_weights(model)) == expected
