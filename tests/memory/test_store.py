"""The KV store: what a commit keeps, in either layout, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.attention.block import Block
from longdraft.errors import MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)
LAYOUTS = pytest.mark.parametrize("transposed", [False, True], ids=["keys by row", "keys by column"])


def filled(lengths: list[int], capacity: int = 24, transposed: bool = False) -> KVStore:
    """A store of random numbers, scratch space included, with these committed lengths."""
    store = KVStore(SHAPE, len(lengths), capacity, transposed_keys=transposed)
    generator = torch.Generator().manual_seed(capacity)
    for tensor in (store.keys, store.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    store.lengths[:] = lengths
    return store


def write(store: KVStore, block: Block, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Writes a random block into every layer and returns what was written."""
    generator = torch.Generator().manual_seed(seed)
    shape = (block.batch, SHAPE.kv_heads, block.size, SHAPE.head_dim)
    written = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in "01"]
    for layer, (k, v) in enumerate(written):
        store.write(layer, k, v, block)
    return written


class _NoCpu:
    """Stands for a device that is not a CPU, so that the form with index tensors runs here too."""

    type = "elsewhere"


@pytest.fixture(params=["host loop", "index tensors"])
def form(request, monkeypatch):
    """Prepares a store to write in one form or the other."""

    def prepare(store: KVStore) -> KVStore:
        if request.param == "index tensors":
            arange = torch.arange
            monkeypatch.setattr(torch, "arange", lambda *a, device=None, **k: arange(*a, **k))
            store.device = _NoCpu()
        return store

    return prepare


# --- writing ---


@LAYOUTS
@pytest.mark.parametrize("behind", [0, 3])
def test_a_block_lands_behind_each_slots_prefix_and_touches_nothing_else(form, transposed, behind):
    store = form(filled([5, 0, 9, 2], transposed=transposed))
    expected_k, expected_v = store.keys.clone(), store.values.clone()
    block = Block.make([2, 0, 1], [9, 5, 0], 4, offset=behind)
    for layer, (k, v) in enumerate(write(store, block)):
        for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
            start = n + behind
            expected_k[layer, slot, :, start : start + 4] = k[b]
            expected_v[layer, slot, :, start : start + 4] = v[b]
    assert torch.equal(store.keys, expected_k) and torch.equal(store.values, expected_v)


def test_writing_commits_nothing():
    store = filled([5, 0])
    write(store, Block.make([0, 1], [5, 0], 3))
    assert store.lengths == [5, 0]


def test_a_block_may_fill_a_slot_to_its_last_row(form):
    store = form(filled([20]))
    ((k, _), _) = write(store, Block.make([0], [20], 4))
    assert torch.equal(store.keys[0, 0, :, 20:], k[0])


def test_both_layouts_have_the_same_shape():
    plain, transposed = filled([0, 0]), filled([0, 0], transposed=True)
    assert plain.keys.shape == transposed.keys.shape == (2, 2, 3, 24, 4)
    assert transposed.keys.stride(-2) == 1 and plain.keys.stride(-1) == 1


def test_a_block_that_does_not_fit_is_refused_by_name_of_its_slot():
    store = filled([3, 20])
    store.check_room([0, 1], 4)
    with pytest.raises(ValueError, match="slot 1 holds 20 rows; 5 more exceed the capacity 24"):
        store.check_room([0, 1], 5)


# --- committing and truncating ---


@st.composite
def commits(draw):
    """A prefix length, a block size and an increasing path of its rows."""
    size = draw(st.integers(1, 12))
    return draw(st.integers(0, 12)), sorted(draw(st.sets(st.integers(0, size - 1)))), draw(st.booleans())


@given(commits())
def test_a_commit_gathers_the_rows_of_its_path_and_touches_no_other_slot(case):
    n, path, transposed = case
    store = filled([7, n, 3], transposed=transposed)
    keys, values = store.keys.clone(), store.values.clone()
    store.commit(1, path)
    assert store.lengths == [7, n + len(path), 3]
    rows = [*range(n), *(n + row for row in path)]
    for now, before in ((store.keys, keys), (store.values, values)):
        assert torch.equal(now[:, 1, :, : len(rows)], before[:, 1, :, rows])
        assert torch.equal(now[:, [0, 2]], before[:, [0, 2]])


@given(st.lists(commits(), max_size=5))
def test_successive_commits_build_up_the_text(rounds):
    store = filled([0], capacity=200)
    expected: list[torch.Tensor] = []
    for i, (_, path, _) in enumerate(rounds):
        block = Block.make([0], store.lengths, 12)
        ((k, _), _) = write(store, block, seed=i)
        expected += [k[0, :, row] for row in path]
        store.commit(0, path)
    if expected:
        assert torch.equal(store.keys[0, 0, :, : store.lengths[0]], torch.stack(expected, dim=1))
    assert store.lengths[0] == len(expected)


@pytest.mark.parametrize("path", [[1, 1], [2, 1], [-1, 0], [0, 3, 2]])
def test_a_path_that_does_not_increase_is_refused(path):
    store = filled([4])
    with pytest.raises(ValueError, match="strictly increasing"):
        store.commit(0, path)
    assert store.lengths == [4]


def test_a_path_beyond_the_capacity_is_refused():
    store = filled([20])
    store.commit(0, [3])
    with pytest.raises(ValueError, match="beyond the capacity 24"):
        store.commit(0, [0, 3])


def test_truncating_forgets_the_end_and_keeps_the_rest():
    store = filled([9, 5])
    keys = store.keys.clone()
    store.truncate(0, 4)
    assert store.lengths == [4, 5] and torch.equal(store.keys, keys)
    store.truncate(0, 4)
    store.truncate(0, 0)
    assert store.lengths == [0, 5]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncating_to_a_length_that_is_not_there_is_refused(length):
    with pytest.raises(ValueError, match="cannot truncate slot 0 of length 5"):
        filled([5]).truncate(0, length)


# --- memory ---


def test_a_store_takes_the_bytes_it_says():
    store = filled([0, 0])
    assert KVStore.bytes_for(SHAPE, 2, 24) == store.keys.nbytes + store.values.nbytes
    half = KVShape(2, 3, 4, torch.bfloat16)
    assert KVStore.bytes_for(half, 2, 24) * 2 == KVStore.bytes_for(SHAPE, 2, 24)


def test_a_store_that_does_not_fit_is_refused_with_the_bytes_needed_and_available(monkeypatch):
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 9215)
    with pytest.raises(MemoryBudgetError) as caught:
        KVStore(SHAPE, 2, 24)
    assert KVStore.bytes_for(SHAPE, 2, 24) == 9216
    for part in ("24 tokens", "9216 bytes", "9215 bytes", "9.0 KiB", "Shorten the prompt"):
        assert part in str(caught.value)


@pytest.mark.parametrize("available", [9216, None])
def test_a_store_that_just_fits_or_cannot_be_judged_is_made(monkeypatch, available):
    monkeypatch.setattr(sizes, "available_bytes", lambda device: available)
    assert KVStore(SHAPE, 2, 24).capacity == 24


def test_this_machine_says_how_much_memory_is_free():
    available = sizes.available_bytes(torch.device("cpu"))
    assert available is None or available > 2**20


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98 * 2**20, "98.0 MiB"), (2**42, "4.0 TiB")]
)
def test_bytes_are_said_for_humans(n, text):
    assert sizes.human(n) == text
