"""Settings of every test: offline, one thread, fixed seeds, a hypothesis profile that is the same everywhere."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
# One thread a process, read when torch is imported: several processes test side by side, and on tiny tensors a second
# thread costs ten times what it saves.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Where a test takes several, they sleep while they wait for one another: others need the cores.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

# GPUs are hidden, so that tests compute the same on every machine; `pytest -m gpu` runs those that need one, and says
# so to its workers. Now, as CUDA and triton read it when they are first asked for: other conftest.py import them.
# LONGDRAFT_TEST_GPU=rehearse runs them on the CPU.
_marks = [word[2:] or after for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True) if word[:2] == "-m"]
if any(re.search(r"(?<!not )\bgpu\b", each) for each in _marks):
    os.environ["LONGDRAFT_TEST_GPU"] = "1"
if os.environ.get("LONGDRAFT_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if not torch.cuda.is_available():
    # Read once, when triton is first imported, by whichever test that is.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "longdraft",
    deadline=None,
    max_examples=40,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("longdraft")


# What takes long starts first, so that no core waits for another at the end.
LONG = (
    "cli/test_terminal", "training/test_runs", "exact/outside/test_damaged", "training/test_tokens", "docs/test_site",
    "training/test_train_command", "gpu/test_rehearsal", "exact/outside/test_light_imports", "cli/test_serve_command",
    "exact/test_random", "exact/test_laws", "gpu/test_device_discipline", "test_vllm_proposers", "exact/test_bits",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what takes long first. Skips what needs a GPU where none is, or none is to be seen."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if f"tests/{name}" in item.nodeid), len(LONG)))
    if not torch.cuda.is_available() and os.environ.get("LONGDRAFT_TEST_GPU") != "rehearse":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and `pytest -m gpu`"))


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """And at the end it goes."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the one before it, nor on what the shell has set."""
    torch.set_num_threads(1)  # tests of thread counts set their own
    torch.manual_seed(0)
    logging.getLogger("longdraft").filters.clear()  # a server bounds its log
    monkeypatch.delenv("LONGDRAFT_ATTENTION", raising=False)
    # What is drafted must not depend on how busy the machine is; tests of the planner ask for it.
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")


class Forward(NamedTuple):
    """A forward of a hosted model: rows a sequence, their highest position, and what was asked for."""

    context_length: int
    rows: int
    last: int
    prompt: bool
    logits: Any
    taps: Any


class Forwards(list[Forward]):
    """The forwards of all hosted models, targets and drafts; with an ``error``, each raises it."""

    error: Exception | None = None


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """Every forward from now on."""
    from longdraft.model.runner import TargetRunner

    seen, forward = Forwards(), TargetRunner.forward

    def watched(self: TargetRunner, block: Any, *rest: Any, **options: Any) -> Any:
        last, wanted = int(block.positions.max()), (options.get("logits", "all"), options.get("taps"))
        seen.append(Forward(self.context_length, block.size, last, block.prompt, *wanted))
        if seen.error is not None:
            raise seen.error
        return forward(self, block, *rest, **options)

    monkeypatch.setattr(TargetRunner, "forward", watched)
    return seen


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``free_memory(a, b)``: a bytes are free when it is asked first, b from then on."""
    from longdraft.memory import memory_info

    def put(*left: int) -> None:
        answers = list(left)
        monkeypatch.setattr(
            memory_info, "available_bytes", lambda device: answers.pop(0) if answers[1:] else answers[0]
        )

    return put


@pytest.fixture(scope="session")
def spec_factory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The table of methods on a tiny target, made once a test process."""
    from tests.support.methods import SpeculatorFactory

    return SpeculatorFactory(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """And on one of 61 tokens."""
    from tests.support.methods import SpeculatorsByMethod

    return SpeculatorsByMethod(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated GPU."""
    from tests.support.nominal import simulate_gpu

    with simulate_gpu(monkeypatch) as found:
        yield found


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are chosen and compacted in small pieces, so that short texts pass through several."""
    from longdraft.drafters import self_drafter
    from longdraft.views import draft_cache

    monkeypatch.setattr(self_drafter, "FRESH", 6)
    monkeypatch.setattr(draft_cache, "MIN_NEW_ENTRIES", 8)
    monkeypatch.setattr(draft_cache, "PREFILL_CHUNK", 16)


@pytest.fixture
def shipped_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``shipped_in(folder)`` makes a folder's drafts the ones that come with longdraft."""
    from longdraft.drafts import shipped

    return lambda folder: monkeypatch.setattr(shipped, "FOLDER", folder)


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Methods and kinds of drafts that a test registers are forgotten."""
    from longdraft.drafts.kinds import KINDS
    from longdraft.methods import METHODS

    known = [(table, dict(table)) for table in (METHODS, KINDS)]
    yield
    for table, before in known:
        table.clear()
        table.update(before)


@pytest.fixture
def press_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``press_ctrl_c(owner, name, call, times)`` presses it where ``owner.name`` is called for the n-th time."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def put(owner: type, name: str, call: int = 1, times: int = 1) -> None:
        function, calls = getattr(owner, name), iter(range(1, 10**9))

        def interrupted(*arguments: Any, **options: Any) -> Any:
            if next(calls) == call:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, interrupted)

    yield put
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """``free_disk(n)``: every disk has n bytes left; None: what it has."""
    disk_usage = shutil.disk_usage

    def put(left: int | None) -> None:
        usage = disk_usage if left is None else lambda path: disk_usage(os.sep)._replace(free=left)
        monkeypatch.setattr(shutil, "disk_usage", usage)

    return put


@pytest.fixture
def cpu_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU offloads to the host as a GPU does, with copies as late as possible: ``offload="host:1"``."""
    from longdraft.memory import offload
    from tests.support.lazy_side import LazyCopyStream

    monkeypatch.setattr(offload, "check", lambda *_: None)
    monkeypatch.setattr(offload, "CopyStream", lambda device: LazyCopyStream())
