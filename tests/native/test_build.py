"""Compiling: once, into the cache; where it cannot be done, torch's products serve."""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from longdraft import native
from longdraft.few_rows import FewRowsModule
from longdraft.native import build, library
from longdraft.target.runner import TargetRunner
from tests.tiny import tiny_model

compiles = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")


@pytest.fixture
def anew():
    """As in a new process."""
    library._known.clear()
    yield
    library._known.clear()


@compiles
def test_compiled_once_and_kept(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "longdraft")
    said: list[str] = []
    file = build.shared_object(tmp_path, said.append)
    assert file.parent == tmp_path
    assert "Compiling" in caplog.text and "Compiling" in said[0]
    monkeypatch.setattr(build, "_compile", None)
    assert build.shared_object(tmp_path) == file
    assert list(tmp_path.iterdir()) == [file]  # nothing of the work is left


@compiles
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="file modes are POSIX")
def test_a_file_that_others_may_write_is_not_run(tmp_path):
    file = build.shared_object(tmp_path)
    file.write_bytes(b"not ours")
    file.chmod(0o666)
    assert build.shared_object(tmp_path).read_bytes()[:4] == b"\x7fELF"
    assert not stat.S_IMODE(file.stat().st_mode) & 0o022


@compiles
def test_torchs_own_threads_serve():
    native.kernels()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    libraries = {line.split()[-1] for line in lines if "libgomp" in line}
    assert len(libraries) == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m.setenv("CXX", "no-such-compiler"), "no-such-compiler"),
        (lambda m: m.setattr(build, "_FLAGS", ("-no-such-flag",)), "failed"),
        (lambda m: m.setattr(sys, "platform", "darwin"), "darwin"),
        (lambda m: m.setattr(library, "_LANES", 99), "AVX"),
        (lambda m: m.setattr(library, "shared_object", lambda progress: "/nowhere/kernels.so"), "nowhere"),
    ],
    ids=["no compiler", "it fails", "another system", "an old processor", "it cannot be loaded"],
)
def test_without_kernels_the_log_says_why_and_the_rest_goes_on(spoil, reason, monkeypatch, tmp_path, anew, caplog):
    if native.kernels() is None and reason == "AVX":
        pytest.skip("nothing is compiled here")
    library._known.clear()
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "longdraft")
    spoil(monkeypatch)
    assert native.kernels() is None
    assert reason in (native.missing() or "")
    assert reason in caplog.text
    monkeypatch.undo()
    runner = TargetRunner(tiny_model())
    assert runner.forward([[1, 2, 3]], runner.new_store(1, 8), [0]).logits is not None


def test_switched_off(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    assert native.kernels() is None
    assert native.missing() == "LONGDRAFT_NATIVE=0"


@pytest.mark.parametrize("rows", [1, 5, 128, 129])
def test_layers_serve_only_inside(rows):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(rows, 8)
    expected = module(x)
    fast = FewRowsModule(module)
    with pytest.raises(KeyError), torch.inference_mode(), fast.serving(rows):
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
        raise KeyError
    assert all("forward" not in vars(layer) for layer in module)


@compiles
def test_layers_of_the_same_rows_are_one_product():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)

        def forward(self, x, y):
            return self.gate_proj(x), self.up_proj(y), self.up_proj(x)

    module = Gated()
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    expected = module(x, y)
    with torch.inference_mode(), FewRowsModule(module).serving(4):
        for found, wanted in zip(module(x, y), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
