"""Code in the cache is run only if no other user can have put it there. A kernel without memory says so."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from longdraft import native
from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info
from longdraft.native import build

pytestmark = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.unavailable_reason()}")


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o700)


def allow(up: int, mode: int, file: Path) -> None:
    (file, *file.parents)[up].chmod(mode)


def given(up: int, file: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown((file, *file.parents)[up], 12345, 12345)


SPOILS: dict[str, Callable[[Path], None]] = {
    **{
        f"{place} {mode:o}": partial(allow, up, mode) for place, up, mode in (
            ("file", 0, 0o775), ("folder", 1, 0o777), ("folder", 1, 0o1777), ("folder", 1, 0o770), ("parent", 2, 0o707),
            ("parent's parent", 3, 0o770),
        )
    },
    "link": linked,
    "fifo": fifo,
    **{f"another's {place}": partial(given, up) for up, place in enumerate(("file", "folder", "parent"))},
}  # fmt: skip


@pytest.mark.parametrize("spoil", [None, *SPOILS])
def test_code_that_others_can_have_written_is_not_run(spoil, tmp_path, monkeypatch, caplog):
    level = build.supported_levels()[0]
    made = build.ensure_compiled(level)
    file = tmp_path / "user" / "cache" / "native" / made.name
    file.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(made, file)
    file.chmod(0o755)
    if spoil is not None:
        SPOILS[spoil](file)
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "user" / "cache"))
    monkeypatch.setenv("CXX", "false")  # compiles nothing: what is run was in the cache
    if spoil is None:
        assert build.load_library(level)
        return
    with pytest.raises(OSError):
        build.load_library(level)
    assert ("Other users can write to" in caplog.text) == ("folder" in spoil or "parent" in spoil)


RUN = """
import resource, sys, psutil, torch
from longdraft import native
from longdraft.errors import MemoryBudgetError
torch.set_num_threads(int(sys.argv[1]))
kernels = native.kernels()
q, k, v = torch.randn(8, 64, 64), torch.randn(8, 64, 32768).transpose(1, 2), torch.randn(8, 32768, 64)
x, w = torch.randn(256, 4096), torch.randn(64, 4096)
calls = [lambda: kernels.attend(q, k, v, None, 1.0), lambda: kernels.linear(x, [(w, None)])[0]]
kernels.linear(x[:1, :64], [(w[:, :64].contiguous(), None)])  # threads start
for call in calls:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**20, limit[1]))
    try:
        for _ in range(3):
            call()
        print("had room")
    except (MemoryBudgetError, RuntimeError) as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    assert torch.equal(call(), call()) and bool(call().isfinite().all())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_without_memory_raises_and_works_again_with_it(threads):
    done = subprocess.run([sys.executable, "-c", RUN, str(threads)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "MemoryBudgetError" in done.stdout


LIMITED = """
import resource, sys, psutil, torch
import longdraft
from tests.support.tiny import tiny_model
model = tiny_model(hidden=256, heads=4, kv_heads=2, vocab=4000)
torch.set_num_threads(2)  # the second one starts at the first work
longdraft.Speculator  # imported while there is room
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (int(sys.argv[1]) << 20), limit[1]))
try:
    longdraft.Speculator("ar", target=model).generate([[1, 2, 3] * 100], max_new_tokens=4)
except longdraft.errors.MemoryBudgetError:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [2, 10, 12, 30])
def test_no_room_for_threads_is_said_before_openmp_ends_the_process(room):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(room)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "refused" in done.stdout, done.stderr[-2000:]


def test_what_is_available_looks_at_the_limits_of_the_process():
    before, limit = memory_info.available_bytes(torch.device("cpu")), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20), limit[1]))
    try:
        assert 0 < memory_info.available_bytes(torch.device("cpu")) <= 64 << 20 < before
        with pytest.raises(MemoryBudgetError):
            memory_info.require_bytes(128 << 20, torch.device("cpu"), "A test")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_available_looks_at_every_cgroup_around_the_process(version, tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    folder = root / ("memory" if version == 1 else "") / "job" / "step"
    limit, use = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for place, most in ((folder, 9_000_000), (folder.parent, 5_000_000)):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"memory.{limit}").write_text(f"{most}\n")
        (place / f"memory.{use}").write_text("1000000\n")
        (place / "memory.stat").write_text("anon 5\ninactive_file 500\ntotal_inactive_file 500\n")
    own.write_text("5:cpu:/job/step\n4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    assert min(memory_info.cgroup_available(own, root)) == 4_000_500
