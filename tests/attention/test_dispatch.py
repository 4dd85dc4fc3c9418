"""Which attention path is chosen, and what is said when one cannot run."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types

import pytest
import torch

from longdraft.attention import cpu, dispatch, reference, sdpa
from longdraft.errors import CapabilityError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch):
    """Says whether the machine has triton."""

    def set_packages(*names: str) -> None:
        for name in ("triton",):
            module = types.ModuleType(name) if name in names else None
            if module is not None:
                module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
                monkeypatch.setitem(sys.modules, name, module)
        find = dispatch.importlib.util.find_spec
        monkeypatch.setattr(
            dispatch.importlib.util,
            "find_spec",
            lambda name: None if name == "triton" and name not in names else find(name),
        )

    return set_packages


def test_a_cpu_gets_the_cpu_path():
    name, attend = dispatch.resolve(CPU, torch.float32, 64)
    assert name == "cpu" and attend is cpu.attend


@pytest.mark.parametrize(
    ("packages", "dtype", "head_dim", "expected"),
    [
        ([], torch.bfloat16, 64, "hybrid"),
        ([], torch.float32, 64, "hybrid"),
        (["triton"], torch.bfloat16, 64, "hybrid"),
        (["triton"], torch.bfloat16, 36, "sdpa"),
        (["triton"], torch.float16, 512, "sdpa"),
        ([], torch.float64, 64, "sdpa"),
    ],
)
def test_a_gpu_gets_hybrid_attention_where_it_serves(installed, caplog, packages, dtype, head_dim, expected):
    installed(*packages)
    assert dispatch.choose(CUDA, dtype, head_dim) == expected
    assert ("Attention runs on torch's masked kernels" in caplog.text) == (expected == "sdpa")


def test_other_devices_get_sdpa():
    assert dispatch.choose(torch.device("mps"), torch.float16, 64) == "sdpa"


@pytest.mark.parametrize(
    ("name", "attend"), [("reference", reference.attend), ("sdpa", sdpa.attend), ("cpu", cpu.attend)]
)
def test_a_path_can_be_forced(monkeypatch, name, attend):
    monkeypatch.setenv(dispatch.ENVIRONMENT, name)
    assert dispatch.resolve(CPU, torch.float32, 64) == (name, attend)


def test_an_unknown_path_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "turbo")
    with pytest.raises(CapabilityError, match="turbo"):
        dispatch.choose(CPU, torch.float32, 64)


def test_a_forced_path_that_cannot_run_is_an_error_not_another_path(monkeypatch, installed):
    installed()
    monkeypatch.setenv(dispatch.ENVIRONMENT, "hybrid")
    with pytest.raises(CapabilityError, match="hybrid"):
        dispatch.choose(CPU, torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("name", "packages", "device", "dtype", "head_dim", "reason"),
    [
        ("cpu", [], CUDA, torch.float32, 64, "runs on a CPU"),
        ("hybrid", [], CPU, torch.float32, 64, "try sdpa"),
        ("hybrid", [], torch.device("mps"), torch.float32, 64, "try sdpa"),
        ("hybrid", [], CUDA, torch.float64, 64, "float64"),
        ("hybrid", [], CUDA, torch.bfloat16, 320, "up to 256"),
        ("hybrid", [], CUDA, torch.bfloat16, 36, "multiples of 8"),
        ("triton", [], CUDA, torch.bfloat16, 64, "longdraft[gpu]"),
        ("triton", ["triton"], CPU, torch.float32, 64, "TRITON_INTERPRET=1"),
        ("triton", ["triton"], CUDA, torch.float32, 320, "up to 256"),
    ],
)
def test_a_path_that_cannot_run_says_why(monkeypatch, installed, name, packages, device, dtype, head_dim, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    installed(*packages)
    assert reason in (dispatch.unavailable(name, device, dtype, head_dim) or "")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim"),
    [
        *((name, device, torch.float64, 1000) for name in ("reference", "sdpa") for device in (CPU, CUDA)),
        *((name, CUDA, torch.bfloat16, 256) for name in ("triton",)),
        ("triton", CPU, torch.float32, 64),
    ],
    ids=str,
)
def test_a_path_that_can_run_has_no_reason_against_it(monkeypatch, installed, name, device, dtype, head_dim):
    installed("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.unavailable(name, device, dtype, head_dim) is None


def test_the_chosen_path_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="longdraft"):
        dispatch.resolve(CPU, torch.float32, 64)
    assert [r.getMessage() for r in caplog.records] == ["attention path: cpu (cpu, torch.float32, head size 64)"]


def test_keys_are_transposed_for_the_float32_cpu_path_alone():
    assert dispatch.prefers_transposed_keys("cpu", torch.float32)
    assert not dispatch.prefers_transposed_keys("cpu", torch.bfloat16)
    assert not dispatch.prefers_transposed_keys("sdpa", torch.float32)
