"""The KV store in memory: how it writes in either layout, and the memory that is free.

On a GPU it writes by index tensors: tests/model/test_graphs.py compares whole texts.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from longdraft.attention.block import Block
from longdraft.errors import MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)


@pytest.mark.parametrize("transposed", [False, True], ids=["keys by row", "keys by column"])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_block_goes_behind_each_slots_prefix_and_changes_nothing_else(transposed, offset):
    store = KVStore(SHAPE, 4, 24, transposed_keys=transposed)
    for tensor in (store.keys, store.values):
        tensor.copy_(torch.randn(tensor.shape))
    expected = store.keys.clone(), store.values.clone()
    block = Block.make([2, 0, 1], [24 - 4 - offset, 5, 0], 4, offset=offset)  # the first one fills its slot
    for layer in range(2):
        new = torch.randn(2, 3, 3, 4, 4)
        store.write(layer, *new, block)
        for tensor, rows in zip(expected, new, strict=True):
            for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
                tensor[layer, slot, :, n + offset : n + offset + 4] = rows[b]
    assert torch.equal(store.keys, expected[0]) and torch.equal(store.values, expected[1])
    assert store.lengths == [0] * 4 and store.keys.stride(-2 if transposed else -1) == 1
    assert KVStore.bytes_for(SHAPE, 4, 24) == store.keys.nbytes + store.values.nbytes


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


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98 * 2**20, "98.0 MiB"), (2**42, "4.0 TiB")]
)
def test_bytes_are_written_for_people(n, text):
    assert sizes.human(n) == text
