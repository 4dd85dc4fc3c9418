"""Settings of all tests: offline, one thread, fixed seeds, one hypothesis profile; and shared fixtures."""

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
# One thread a process, set before torch is imported: several test processes share the cores, and on tiny tensors a
# second thread costs ten times what it saves.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Tests with several threads: waiting threads sleep, as other processes need the cores.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

# GPUs are hidden, so that tests compute the same on every machine. `pytest -m gpu` shows them, to its workers too, and
# runs the tests that need one; LONGDRAFT_TEST_GPU=rehearse runs those on the CPU. It is set here, before CUDA and
# triton read it: other conftest.py files import them.
_marks = [word[2:] or after for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True) if word[:2] == "-m"]
if any(re.search(r"(?<!not )\bgpu\b", mark) for mark in _marks):
    os.environ["LONGDRAFT_TEST_GPU"] = "1"
if os.environ.get("LONGDRAFT_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if not torch.cuda.is_available():
    # Triton reads it once, when a test first imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "longdraft",
    deadline=None,
    max_examples=40,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("longdraft")


# Long tests start first, so that all cores finish at about the same time.
LONG = (
    "cli/test_terminal", "training/test_runs", "exact/outside/test_damaged", "training/test_tokens", "docs/test_site",
    "training/test_train_command", "exact/outside/test_light_imports", "cli/test_serve_command",
    "exact/test_random", "exact/test_laws", "gpu/test_device_discipline", "test_vllm_proposers", "exact/test_bits",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long tests first. Skips tests that need a GPU if there is none, or if it is hidden."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if f"tests/{name}" in item.nodeid), len(LONG)))
    if not torch.cuda.is_available() and os.environ.get("LONGDRAFT_TEST_GPU") != "rehearse":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and `pytest -m gpu`"))


def pytest_collection_finish() -> None:
    """Freezes the imported objects: the garbage collector need not visit a million of them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Lets the imported objects be collected."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fixed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each test independent of the tests before it and of the shell's variables."""
    torch.set_num_threads(1)  # tests of thread counts set their own
    torch.manual_seed(0)
    logging.getLogger("longdraft").filters.clear()  # a server adds one that limits its log
    for name in ("LONGDRAFT_ATTENTION", "LONGDRAFT_PREFILL_ATTENTION", "LONGDRAFT_FUSION"):
        monkeypatch.delenv(name, raising=False)
    # Drafts must not depend on the machine's load; tests of the planner turn it on.
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")


class Forward(NamedTuple):
    """A forward of a hosted model: tokens of each sequence (``rows``), their last position, and the arguments."""

    context_length: int
    rows: int
    last: int
    prompt: bool
    logits: Any
    taps: Any


class Forwards(list[Forward]):
    """The forwards of all hosted models, targets and drafts. If ``error`` is set, each forward raises it."""

    error: Exception | None = None


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """Records every forward of the test."""
    from longdraft.model.runner import TargetRunner

    seen, forward = Forwards(), TargetRunner.forward

    def watched(self: TargetRunner, block: Any, *rest: Any, **options: Any) -> Any:
        last, wanted = int(block.positions.max()), (options.get("logits", "all"), options.get("taps"))
        seen.append(Forward(self.context_length, block.query_len, last, block.is_prefill, *wanted))
        if seen.error is not None:
            raise seen.error
        return forward(self, block, *rest, **options)

    monkeypatch.setattr(TargetRunner, "forward", watched)
    return seen


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``free_memory(a, b)``: the first question for free memory is answered with a bytes, later ones with b."""
    from longdraft.memory import memory_info

    def put(*left: int) -> None:
        answers = list(left)
        monkeypatch.setattr(
            memory_info, "available_bytes", lambda device: answers.pop(0) if answers[1:] else answers[0]
        )

    return put


@pytest.fixture(scope="session")
def spec_factory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes speculators of the table of methods on a tiny target; one for each test process."""
    from tests.support.methods import SpeculatorFactory

    return SpeculatorFactory(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Speculators by method on a target of 61 tokens; one for each test process."""
    from tests.support.methods import SpeculatorsByMethod

    return SpeculatorsByMethod(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated GPU."""
    from tests.support.simulated_gpu import simulate_gpu

    with simulate_gpu(monkeypatch) as found:
        yield found


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the chunks of views small, so that short contexts have several."""
    from longdraft.drafters import self_drafter
    from longdraft.views import draft_cache

    monkeypatch.setattr(self_drafter, "MIN_NEW_TOKENS", 6)
    monkeypatch.setattr(draft_cache, "MIN_NEW_ENTRIES", 8)
    monkeypatch.setattr(draft_cache, "PREFILL_CHUNK", 16)


@pytest.fixture
def shipped_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``shipped_in(folder)``: the folder's drafts take the place of the package's."""
    from longdraft.drafts import shipped

    return lambda folder: monkeypatch.setattr(shipped, "FOLDER", folder)


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Removes the methods and kinds of drafts that a test registers."""
    from longdraft.registry import KINDS, METHODS

    known = [(table, dict(table)) for table in (METHODS, KINDS)]
    yield
    for table, before in known:
        table.clear()
        table.update(before)


@pytest.fixture
def press_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``press_ctrl_c(owner, name, call, times)`` sends SIGINT at the n-th call (``call``) of ``owner.name``."""
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
    """``free_disk(n)``: every disk has n bytes left; None: the real number."""
    disk_usage = shutil.disk_usage

    def put(left: int | None) -> None:
        usage = disk_usage if left is None else lambda path: disk_usage(os.sep)._replace(free=left)
        monkeypatch.setattr(shutil, "disk_usage", usage)

    return put


@pytest.fixture
def cpu_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU offload KV as a GPU does (``offload="host:1"``), with copies as late as possible."""
    from longdraft.memory import offload
    from tests.support.lazy_side import LazyCopyStream

    monkeypatch.setattr(offload, "check", lambda *_: None)
    monkeypatch.setattr(offload, "CopyStream", lambda device: LazyCopyStream())
