"""Which attention path is chosen, and what is said when one cannot run."""

from __future__ import annotations

import logging

import pytest
import torch

from longdraft import native
from longdraft.attention import cpu, dispatch, reference, sdpa
from longdraft.errors import CapabilityError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        (CPU, torch.float32, 64, "cpu"),
        (CUDA, torch.bfloat16, 64, "hybrid"),
        (CUDA, torch.float32, 64, "hybrid"),
        (CUDA, torch.bfloat16, 36, "sdpa"),
        (CUDA, torch.float16, 512, "sdpa"),
        (CUDA, torch.float64, 64, "sdpa"),
        (MPS, torch.float16, 64, "sdpa"),
    ],
)
def test_a_path_is_chosen_by_device_dtype_and_head_size(caplog, device, dtype, head_dim, expected):
    with caplog.at_level(logging.INFO, logger="longdraft"):
        name, attend = dispatch.resolve(device, dtype, head_dim)
    assert name == expected and (name != "cpu" or attend is cpu.attend)
    warned = expected == "sdpa" and device == CUDA
    assert ("Attention runs on torch's masked kernels" in caplog.text) == warned
    assert caplog.text.count(f"attention path: {expected}") == 1


PATHS = [("reference", reference.attend), ("sdpa", sdpa.attend), ("cpu", cpu.attend)]


@pytest.mark.parametrize(("name", "attend"), PATHS)
def test_a_path_can_be_forced(monkeypatch, name, attend):
    monkeypatch.setenv(dispatch.ENVIRONMENT, name)
    assert dispatch.resolve(CPU, torch.float32, 64) == (name, attend)


@pytest.mark.parametrize("name", ["turbo", "triton", "hybrid"])
def test_a_forced_path_that_cannot_run_is_an_error_not_another_path(monkeypatch, name):
    monkeypatch.setenv(dispatch.ENVIRONMENT, name)
    with pytest.raises(CapabilityError, match=name):
        dispatch.choose(CPU, torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "reason"),
    [
        ("cpu", CUDA, torch.float32, 64, "runs on a CPU"),
        ("hybrid", CPU, torch.float32, 64, "try sdpa"),
        ("hybrid", MPS, torch.float32, 64, "try sdpa"),
        ("hybrid", CUDA, torch.float64, 64, "float64"),
        ("hybrid", CUDA, torch.bfloat16, 320, "up to 256"),
        ("hybrid", CUDA, torch.bfloat16, 36, "multiples of 8"),
        *((name, device, torch.float64, 1000, None) for name in ("reference", "sdpa") for device in (CPU, CUDA)),
    ],
)
def test_a_path_that_cannot_run_says_why(name, device, dtype, head_dim, reason):
    found = dispatch.unavailable(name, device, dtype, head_dim)
    assert found is None if reason is None else reason in found


def test_keys_are_transposed_for_the_float32_cpu_path_alone():
    assert dispatch.prefers_transposed_keys("cpu", torch.float32) == (native.kernels() is not None)
    assert not dispatch.prefers_transposed_keys("cpu", torch.bfloat16)
    assert not dispatch.prefers_transposed_keys("sdpa", torch.float32)
