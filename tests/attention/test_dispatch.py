"""Which attention path is chosen, and what is said when one cannot run."""

from __future__ import annotations

import logging

import pytest
import torch

from longdraft.attention import cpu, dispatch
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


@pytest.mark.parametrize("name", ["turbo", "triton", "hybrid"])
def test_a_forced_path_that_cannot_run_is_an_error_not_another_path(monkeypatch, name):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, name)
    with pytest.raises(CapabilityError, match=name):
        dispatch.choose(CPU, torch.bfloat16, 64)
