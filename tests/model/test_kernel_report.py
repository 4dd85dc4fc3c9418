"""Which kernels compute a target: said as it is."""

from __future__ import annotations

import re

import pytest
import torch

from longdraft import native
from longdraft.model.kernel_report import kernel_report
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import keep_stored, parameters
from longdraft.native.build import CALLED, LEVELS
from tests.tiny import tiny_model

compiles = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")
SIZES = {"hidden": 64, "head_dim": 32, "heads": 2, "kv_heads": 2}


def of(model, **options):
    return kernel_report(TargetRunner(model, **options))


@compiles
def test_what_a_model_is_computed_with():
    whole = of(tiny_model())
    assert whole.level == native.kernels().level and whole.reason is whole.cost is None
    assert (whole.weights, whole.kv, whole.whole) == (("float32",), "float32", True)
    assert (
        CALLED[whole.level] in whole.line
        and "in one call: weights in float32, float32 arithmetic, keys and values in float32" in whole.line
    )
    assert of(tiny_model(), kv_dtype=torch.int8).kv == "int8"
    kept = of(keep_stored(tiny_model(dtype=torch.bfloat16, **SIZES)))
    assert (kept.weights, kept.kv) == (("bfloat16",), "float32")


@compiles
def test_of_a_model_in_bfloat16_the_products():
    found = of(tiny_model(dtype=torch.bfloat16, **SIZES))
    assert (found.weights, found.kv, found.whole) == (("bfloat16",), None, False)
    assert "call by call: weights in bfloat16, bfloat16 arithmetic; torch does the rest" in found.line


@compiles
def test_a_model_that_they_do_not_serve():
    found = of(tiny_model(dtype=torch.float64))
    assert found.level is None and "none of this model's layers (float64 on a CPU)" in found.line


def test_without_any_it_says_why_and_what_that_costs(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    found = of(tiny_model())
    assert found.line.startswith("torch's, not longdraft's own: LONGDRAFT_NATIVE=0. Decoding takes")
    assert re.search(r"weights take .*iB, in float32$", found.line)
    assert "each product unpacks" in of(keep_stored(tiny_model(dtype=torch.bfloat16, **SIZES))).cost
    assert kernel_report(None).reason == "LONGDRAFT_NATIVE=0"


def test_of_the_machine_alone():
    found = kernel_report(None)
    assert found.level is None or found.line == f"longdraft's own for {CALLED[found.level]}"


def test_every_instruction_set_has_a_name():
    assert CALLED.keys() == {level for levels in LEVELS.values() for level in levels}


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_counted_however_they_are_stored(tie):
    model = tiny_model(dtype=torch.bfloat16, tie=tie, **SIZES)
    expected = sum(p.numel() for p in model.parameters())
    assert parameters(model) == expected
    assert parameters(keep_stored(model)) == expected
