"""Free memory: a store that does not fit it is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory.store import KVShape, KVStore

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)


@pytest.fixture
def machine(monkeypatch):
    """``machine(free, limit, used, cached)``: what the system and the container's files say."""

    def put(free, limit="max", used=0, cached=0):
        files = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 1\ninactive_file {cached}"}
        read = Path.read_text

        def text(path, *rest):
            return f"{files[path.name]}\n" if path.parent == Path("/sys/fs/cgroup") else read(path, *rest)

        monkeypatch.setattr(Path, "read_text", text)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))

    return put


@pytest.mark.parametrize(
    ("short", "enough"),
    [
        ((9215,), (9216,)),
        ((2**40, 10_000, 785), (2**40, 10_000, 784)),
        ((2**40, 10_000, 1000, 215), (2**40, 10_000, 1000, 216)),  # what is cached of files is free
        ((9215, 2**40), (9216, 2**40)),
    ],
    ids=["the machine", "a container", "its cached files", "the smaller one"],
)
def test_a_store_that_does_not_fit_is_refused_with_the_bytes_needed_and_available(machine, short, enough):
    machine(*short)
    with pytest.raises(MemoryBudgetError) as caught:
        KVStore(SHAPE, 2, 24)
    for part in ("24 tokens", "9216 bytes", "9215 bytes"):
        assert part in str(caught.value)
    machine(*enough)
    assert KVStore(SHAPE, 2, 24).capacity == 24
