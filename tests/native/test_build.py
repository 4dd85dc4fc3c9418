"""Compiling: once, into the cache; where it cannot be done, torch's products serve."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from longdraft import folders, native
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.native import build, library
from tests.forwards import forward
from tests.tiny import tiny_model

compiles = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")


@pytest.mark.skipif(os.environ.get(library.SWITCH) == "0", reason="they are switched off")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no compiler")
def test_where_there_is_a_compiler_there_are_kernels():
    """So that no test of them is skipped for a fault of theirs."""
    assert native.missing() is None and native.kernels() is not None


@pytest.fixture
def anew():
    """As in a new process."""
    forget = library._known.clear
    forget()
    yield
    forget()


@pytest.fixture
def quick(monkeypatch):
    """Compiling is copying what has been compiled already: seconds a time."""
    level = build.levels()[0]
    made = build.shared_object(level)
    calls = []

    def compiled(compiler: list[str], level: str, sources: Path, place: Path) -> Path:
        calls.append(compiler)
        shutil.copy(made, place / "kernels.so")
        return place / "kernels.so"

    monkeypatch.setattr(build, "_compile", compiled)
    return level, calls


@compiles
def test_compiled_once_and_kept(tmp_path, quick, caplog):
    level, calls = quick
    caplog.set_level(logging.INFO, "longdraft")
    said: list[str] = []
    file = build.shared_object(level, tmp_path, said.append)
    assert file.parent == tmp_path
    assert "Compiling" in caplog.text and "Compiling" in said[0]
    assert build.shared_object(level, tmp_path) == file
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == [file]  # nothing of the work is left


@compiles
def test_what_lies_in_the_cache_needs_no_compiler(tmp_path, quick, monkeypatch, anew):
    build.shared_object(quick[0], tmp_path / "native")
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    found = native.kernels()
    assert found is not None and found.level == quick[0]


def test_what_the_package_carries_needs_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CARRIED", tmp_path / "wheel")
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    for level in ("x86-64-v4", "armv8-a"):
        with pytest.raises(OSError, match="no-such-compiler"):
            build.loaded(level)
        carried = tmp_path / "wheel" / build._name(level)
        carried.parent.mkdir(exist_ok=True)
        carried.touch()
        with pytest.raises(OSError, match=str(carried)):  # which is no library
            build.loaded(level)


def become(monkeypatch, machine: str, system: str = "linux") -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)


def test_each_machine_has_instruction_sets_of_its_own(monkeypatch):
    monkeypatch.delenv("LONGDRAFT_NATIVE", raising=False)
    become(monkeypatch, "aarch64")
    assert build.levels() == ["armv8-a"] == [library._level()]
    become(monkeypatch, "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        build.levels()


@compiles
@pytest.mark.parametrize("cxx", ["ccache g++", "clang++ -Wall", "g++"])
def test_a_compiler_may_bring_arguments(cxx, tmp_path, quick, monkeypatch):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    build.shared_object(quick[0], tmp_path)
    assert quick[1] == [[f"/usr/bin/{cxx.split()[0]}", *cxx.split()[1:]]]


@compiles
@pytest.mark.parametrize("compiler", ["clang++", "ccache"])
def test_other_compilers(compiler, tmp_path, monkeypatch):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CXX", "ccache g++" if compiler == "ccache" else compiler)
    monkeypatch.setattr(build, "SOURCES", ("linear.cpp", "rounded.cpp", "threads.cpp"))
    lib = ctypes.CDLL(str(build.shared_object(build.levels()[0], tmp_path)))
    assert lib.longdraft_lanes() in (4, 8, 16)


@compiles
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="file modes are POSIX")
def test_a_file_that_others_may_write_is_not_run(tmp_path, quick):
    file = build.shared_object(quick[0], tmp_path)
    file.write_bytes(b"not ours")
    file.chmod(0o666)
    assert build.shared_object(quick[0], tmp_path).read_bytes()[:4] == b"\x7fELF"
    assert not stat.S_IMODE(file.stat().st_mode) & 0o022


@compiles
def test_torchs_own_threads_serve():
    native.kernels()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    libraries = {line.split()[-1] for line in lines if "libgomp" in line}
    assert len(libraries) == 1


@compiles
def test_without_torchs_threads_one_does_the_work(monkeypatch):
    monkeypatch.setattr(library, "_parallel_entry", lambda: None)
    alone = library.kernels_for(build.levels()[0])
    x, w = torch.randn(3, 40), torch.randn(200, 40)
    try:
        torch.set_num_threads(2)
        torch.testing.assert_close(alone.linear(x, [(w, None)])[0], x @ w.T, rtol=1e-5, atol=1e-5)
    finally:
        monkeypatch.undo()
        library.kernels_for(build.levels()[0])  # the entry is the compiled file's, not an object's


@compiles
@pytest.mark.parametrize("name", ["v2", "v3", "v4", "v4-vnni"])
def test_an_instruction_set_by_name(name, monkeypatch, anew):
    monkeypatch.setenv("LONGDRAFT_NATIVE", name)
    found = native.kernels()
    if f"x86-64-{name}" in build.levels():
        assert found is not None and found.level == f"x86-64-{name}"
    else:
        assert found is None and "does not execute" in (native.missing() or "")


def spoiled_cache(monkeypatch, tmp_path):
    """A cache that cannot be written to, whoever asks: there is a file in its place."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("spoil", "reason", "said"),
    [
        (lambda m, _: m.setenv("CXX", "no-such-compiler"), "no-such-compiler", logging.WARNING),
        (lambda m, _: m.setattr(build, "_FLAGS", ("-no-such-flag",)), "failed", logging.WARNING),
        (spoiled_cache, "cannot be written to .*: set LONGDRAFT_CACHE to a folder that can", logging.WARNING),
        (lambda m, _: m.setattr(library, "loaded", lambda *_: ctypes.CDLL("/no/k.so")), "/no/k.so", logging.WARNING),
        (lambda m, _: become(m, "x86_64", "darwin"), "darwin", logging.INFO),
        (lambda m, _: m.setattr(library, "levels", lambda: ["x86-64-v2"]), "AVX2", logging.INFO),
    ],
    ids=["no compiler", "it fails", "no cache", "it cannot be loaded", "another system", "an old processor"],
)
def test_without_kernels_the_log_says_why_and_the_rest_goes_on(
    spoil, reason, said, monkeypatch, tmp_path, anew, caplog
):
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "longdraft")
    spoil(monkeypatch, tmp_path)
    assert native.kernels() is None
    assert re.search(reason, native.missing() or "")
    (record,) = (r for r in caplog.records if library.SLOWER in r.message)
    assert record.levelno == said and re.search(reason, record.message)
    monkeypatch.undo()
    runner = TargetRunner(tiny_model())
    assert forward(runner, [[1, 2, 3]], runner.new_store(1, 8), [0]).logits is not None


def test_without_a_home_temporary_files_do(monkeypatch, tmp_path, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("LONGDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    forget = folders._temporary.cache_clear
    forget()
    try:
        found = folders.cache_folder()
        assert found.parent == tmp_path and stat.S_IMODE(found.stat().st_mode) == 0o700
        assert folders.cache_folder() == found
        assert caplog.text.count("LONGDRAFT_CACHE") == 1
    finally:
        forget()


def test_switched_off(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    assert native.kernels() is None
    assert native.missing() == "LONGDRAFT_NATIVE=0"


@pytest.mark.parametrize("rows", [1, 5, 128, 129])
@pytest.mark.parametrize("most", [128, None])
def test_layers_compute_what_torchs_do_with_any_number_of_rows(rows, most):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(rows, 8)
    expected = module(x)
    fast = FewRowsModule(module)
    fast.most = most
    with torch.inference_mode():
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


@compiles
@pytest.mark.parametrize(("most", "rows", "ours"), [(128, 128, True), (128, 129, False), (None, 129, True)])
def test_the_kernel_serves_as_many_rows_as_it_is_told(most, rows, ours):
    fast = FewRowsModule(nn.Linear(8, 8))
    fast.most = most
    assert fast.serves(torch.randn(1, rows, 8), torch.float32) == ours
    assert not fast.serves(torch.randn(1, 1, 8, dtype=torch.float64), torch.float32)


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
    FewRowsModule(module)
    with torch.inference_mode():
        for found, wanted in zip(module(x, y), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
