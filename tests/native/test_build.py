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

from longdraft import folders, native
from longdraft.model.runner import TargetRunner
from longdraft.native import build, library
from tests.native.levels import needs_kernels
from tests.support.forwards import forward
from tests.support.tiny import tiny_model


@needs_kernels
def test_with_a_compiler_there_are_kernels():
    """So that a fault of the kernels does not skip their tests."""
    assert native.unavailable_reason() is None and native.kernels() is not None


@pytest.fixture
def anew():
    """As in a new process."""
    before = list(library.load_result)
    library.load_result.clear()
    yield
    library.load_result[:] = before


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A fake compiler that copies the compiled library, and the list of its calls."""
    level = build.supported_levels()[0]
    script, calls = tmp_path / "bin" / "quick", tmp_path / "calls"
    script.parent.mkdir()
    made = build.ensure_compiled(level)
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do\n'
        f'case "$1" in -shared) echo "$0" >> {calls}; from={made};; esac; shift\n'
        'done\ncp "${from:-/dev/null}" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return level, lambda: calls.read_text().splitlines()


@needs_kernels
def test_compiled_once_and_kept(tmp_path, quick, caplog):
    (level, calls), said, place = quick, list[str](), tmp_path / "kept"
    caplog.set_level(logging.INFO, "longdraft")
    file = build.ensure_compiled(level, place, said.append)
    assert file.parent == place and "Compiling" in caplog.text and "Compiling" in said[0]
    assert build.ensure_compiled(level, place) == file and len(calls()) == 1
    assert list(place.iterdir()) == [file]  # nothing of the work is left


@needs_kernels
def test_a_cached_library_needs_no_compiler(tmp_path, quick, monkeypatch, anew):
    build.ensure_compiled(quick[0], tmp_path / "native")
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX")
    found = native.kernels()
    assert found is not None and found.level == quick[0]


@needs_kernels
def test_a_prebuilt_library_needs_no_cache_and_no_compiler(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "wheel")
    names = {level: build.compile_kernels(level, tmp_path / "made").name for level in ("x86-64-v4", "armv8.2-a-i8mm")}
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "wheel").mkdir()
    for level, name in names.items():
        with pytest.raises(OSError, match="no-such-compiler"):
            build.load_library(level)
        (tmp_path / "wheel" / name).touch()
        with pytest.raises(OSError, match=str(tmp_path / "wheel" / name)):  # which is no library
            build.load_library(level)


def become(monkeypatch, machine: str, system: str = "linux") -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)


def has_features(monkeypatch, machine: str, line: str) -> None:
    read = Path.read_text
    become(monkeypatch, machine)
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: line if path.name == "cpuinfo" else read(path, *a, **k)
    )


AVX2 = "flags : abm avx avx2 bmi1 bmi2 f16c fma movbe"
AVX512 = f"{AVX2} avx512bw avx512cd avx512dq avx512f avx512vl"
NEON, DOTPROD = "Features : fp asimd", "Features : fp asimd atomics crc32 asimdrdm asimddp"


@pytest.mark.parametrize(
    ("machine", "line", "levels"),
    [
        ("x86_64", AVX2, "v3"),  # Haswell, Zen 3
        ("x86_64", f"{AVX2} avx_vnni", "v3-vnni v3"),  # Alder Lake
        ("x86_64", AVX512, "v4 v3"),  # Skylake-X
        ("x86_64", f"{AVX512} avx512_vnni", "v4-vnni v4 v3"),  # Zen 4
        ("x86_64", f"{AVX512} avx512_vnni avx_vnni", "v4-vnni v4 v3-vnni v3"),  # Zen 5
        ("aarch64", NEON, "armv8-a"),  # Raspberry Pi 4
        ("aarch64", DOTPROD, "dotprod armv8-a"),  # Raspberry Pi 5
        ("aarch64", f"{DOTPROD} i8mm", "i8mm dotprod armv8-a"),  # Graviton 3
    ],
)
def test_each_machine_has_instruction_sets_of_its_own(machine, line, levels, monkeypatch):
    has_features(monkeypatch, machine, f"processor : 0\n{line}\n")
    assert [build.option_name(level) for level in build.supported_levels()] == levels.split()


def test_other_machines_have_none(monkeypatch):
    become(monkeypatch, "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        build.supported_levels()


@needs_kernels
def test_a_compiler_may_bring_arguments(tmp_path, quick, monkeypatch):
    compiler = os.environ["CXX"]
    monkeypatch.setenv("CXX", f"env LATER=1 {compiler} -Wall")
    build.ensure_compiled(quick[0], tmp_path / "kept")
    assert quick[1]() == [compiler]


@needs_kernels
@pytest.mark.parametrize("compiler", ["clang++", "ccache"])
def test_other_compilers(compiler, tmp_path, monkeypatch):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CXX", "ccache g++" if compiler == "ccache" else compiler)
    monkeypatch.setattr(build, "SOURCES", ("matmul_f32.cpp", "matmul.cpp"))
    lib = ctypes.CDLL(str(build.ensure_compiled(build.supported_levels()[0], tmp_path)))
    assert lib.longdraft_lanes() in (4, 8, 16)


@needs_kernels
def test_torchs_own_threads_serve():
    native.kernels()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1


@needs_kernels
def test_amx_is_not_used_without_permission(monkeypatch):
    monkeypatch.setattr(build, "request_amx_permission", lambda: False)
    assert build.supported_levels() and "x86-64-v4-amx" not in build.supported_levels()
    with pytest.raises(OSError, match="tiles"):
        build.load_library("x86-64-v4-amx")


@needs_kernels
@pytest.mark.parametrize("level", build.LEVELS)
def test_an_instruction_set_by_name(level, monkeypatch, anew):
    monkeypatch.setenv("LONGDRAFT_NATIVE", build.option_name(level))
    found = native.kernels()
    if level in build.supported_levels():
        assert found is not None and found.level == level
    else:
        assert found is None and "does not execute" in (native.unavailable_reason() or "")


@needs_kernels
def test_a_compiler_that_knows_fewer_instruction_sets(tmp_path, quick, monkeypatch, anew, caplog):
    """The widest that it knows is used, and the log says so."""
    *wider, portable = build.supported_levels()
    if not wider:
        pytest.skip("this processor has one instruction set")
    target_flags = "|".join(f"*{build.LEVELS[level].flags.split()[0]}*" for level in wider)
    compiler_that(
        monkeypatch,
        tmp_path,
        f'case "$*" in {target_flags}) echo no such flag >&2; exit 1; esac\nexec {os.environ["CXX"]} "$@"',
    )
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))
    loaded = native.kernels()
    assert loaded is not None and loaded.level == portable
    (record,) = (r for r in caplog.records if "cannot be compiled" in r.message)
    assert "no such flag" in record.message and f"LONGDRAFT_NATIVE={build.option_name(portable)}" in record.message


def compiler_that(monkeypatch, tmp_path, script: str) -> None:
    (tmp_path / "odd").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "odd").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "odd"))


def spoiled_cache(monkeypatch, tmp_path):
    """A cache that cannot be written to, whoever asks: there is a file in its place."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))


def old_processor(monkeypatch, tmp_path):
    has_features(monkeypatch, "x86_64", "flags : cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3")


WARNING, INFO = logging.WARNING, logging.INFO
NO_KERNELS = {
    "no compiler": (lambda m, _: m.setenv("CXX", "no-such-compiler"), "no-such-compiler", WARNING),
    "it fails": (lambda m, path: compiler_that(m, path, "exit 3"), "failed", WARNING),
    "no cache": (spoiled_cache, "cannot be written to .*: set LONGDRAFT_CACHE to a writable folder", WARNING),
    "it cannot be loaded": (
        lambda m, path: compiler_that(m, path, 'for last; do :; done; echo bad > "$last"'),
        "file too short|ELF",
        WARNING,
    ),
    "another system": (lambda m, _: become(m, "x86_64", "darwin"), "darwin", INFO),
    "an old processor": (old_processor, "AVX2", INFO),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_KERNELS)
def test_without_kernels_the_log_says_why_and_the_rest_goes_on(case, monkeypatch, tmp_path, anew, caplog):
    spoil, reason, said = NO_KERNELS[case]
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "longdraft")
    spoil(monkeypatch, tmp_path)
    assert native.kernels() is None
    assert re.search(reason, native.unavailable_reason() or "")
    (record,) = (r for r in caplog.records if library.NO_KERNELS_COST in r.message)
    assert record.levelno == said and re.search(reason, record.message)
    monkeypatch.undo()
    runner = TargetRunner(tiny_model())
    assert forward(runner, [[1, 2, 3]], runner.new_store(1, 8), [0]).logits is not None


def test_the_cache_is_where_the_environment_says_or_among_temporary_files(monkeypatch, tmp_path, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("LONGDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert folders.cache_folder() == tmp_path / ".cache" / "longdraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folders.cache_folder() == tmp_path / "xdg" / "longdraft"
    monkeypatch.setenv("LONGDRAFT_CACHE", "~/own")
    assert folders.cache_folder() == tmp_path / "own"
    for name in ("LONGDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    found = folders.cache_folder()
    assert found.parent == tmp_path and stat.S_IMODE(found.stat().st_mode) == 0o700
    assert folders.cache_folder() == found
    assert caplog.text.count("LONGDRAFT_CACHE") == 1


def test_switched_off(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    assert native.kernels() is None and native.unavailable_reason() == "LONGDRAFT_NATIVE=0"
