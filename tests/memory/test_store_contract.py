"""The contract of KV stores: a store of any kind holds each sequence's entries, as a list of entries would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.memory import snapshot
from longdraft.memory.offload import OffloadedKVStore
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from tests.native.cases import quantized
from tests.support.lazy_side import LazyCopyStream

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32)
KINDS = ["plain", "transposed", "bfloat16", "int8", "int4", "host"]
SLOTS, TREE, FEATURES = 3, 6, 5
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, slots: int = SLOTS, capacity: int = 200, shape: KVShape = SHAPE) -> KVStore:
    """A store of a kind with two layers' features; its entries are noise or zeros."""
    dtype = getattr(torch, kind) if kind in ("bfloat16", "int8", "int4") else None
    config = StoreConfig(kind == "transposed" or dtype is not None, (0, 2), FEATURES, dtype)
    if kind == "host":
        return OffloadedKVStore(shape, slots, capacity, "cpu", config, LazyCopyStream())
    return KVStore(shape, slots, capacity, "cpu", config)


def random_kv(kind: str, *size: int) -> torch.Tensor:
    """Keys and values (2, layers, kv_heads, *size, head_dim) that the kind of store does not round any further."""
    x = torch.randn(2, SHAPE.layers, SHAPE.kv_heads, *size, SHAPE.head_dim)
    if kind in ("int8", "int4"):
        kv = zip(x, (True, False), strict=True)
        return torch.stack([quantized(y, getattr(torch, kind), is_keys).to(y.dtype) for y, is_keys in kv])
    return x.bfloat16().float()


def check(actual: tuple[torch.Tensor, torch.Tensor], slot: int, entries: list[torch.Tensor], layer: int) -> None:
    """Compares keys and values of one layer with the entries (2, layers, kv_heads, head_dim) of a slot."""
    if entries:
        expected = torch.stack(entries, dim=3)[:, layer]
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x[slot, :, : len(entries)].to(y.dtype), y, rtol=1e-6, atol=0)


slots, share = st.integers(0, SLOTS - 1), st.floats(0, 1)
OPERATIONS = st.one_of(
    # A tree in some slots, written at once or in three levels, and the path of it that is committed.
    st.tuples(st.sampled_from([TREE, TREE // 3]), st.sets(slots, min_size=1), st.sets(st.integers(0, TREE - 1))),
    st.tuples(st.just("truncate"), slots, share),
    st.tuples(st.just("write unverified entries"), slots, st.integers(1, 3)),
    st.tuples(st.just("copy from another slot"), slots, share),
    st.tuples(st.just("read"), st.integers(-1, SHAPE.layers - 1), st.none()),
)


@every_kind
@settings(max_examples=25)
@given(st.lists(OPERATIONS, max_size=12))
def test_any_operations_leave_the_entries_of_each_sequence(kind, operations):
    store = make(kind)
    sequences: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]  # (2, layers, kv_heads, head_dim) a token
    unverified: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    features: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    for name, target, argument in operations:
        if isinstance(name, int):
            chosen = sorted(target, reverse=True)
            rows, hidden = random_kv(kind, len(chosen), TREE), torch.randn(2, len(chosen), TREE, FEATURES)
            for offset in range(0, TREE, name):
                level = slice(offset, offset + name)
                block = ForwardBatch.make(chosen, [store.lengths[s] for s in chosen], name, tree_offset=offset)
                for layer in range(SHAPE.layers):
                    k, v = rows[:, layer, :, :, level].transpose(1, 2)
                    store.write(layer, k, v, block)
                    for i, slot in enumerate(chosen):  # attention reads the prefix and the tree of these slots
                        check(
                            store.layer(layer),
                            slot,
                            sequences[slot] + [*rows[:, :, :, i, : level.stop].unbind(3)],
                            layer,
                        )
                store.write_features({0: hidden[0][:, level], 2: hidden[1][:, level]}, block)
            for i, slot in enumerate(chosen):
                assert store.lengths[slot] == len(sequences[slot])  # nothing is committed yet
                path = sorted(argument)
                store.commit(slot, path)
                sequences[slot] += [rows[:, :, :, i, node] for node in path]
                features[slot] += [hidden[:, i, node].flatten() for node in path]
                unverified[slot] = []
        elif name == "truncate":
            length = int(store.lengths[target] * argument)
            store.truncate(target, length)
            sequences[target], unverified[target], features[target] = (
                sequences[target][:length],
                [],
                features[target][:length],
            )
        elif name == "write unverified entries":
            rows = random_kv(kind, argument)
            store.write_entries(target, store.lengths[target], *rows)
            store.num_unverified[target] = argument
            unverified[target] = [*rows.unbind(3)]
        elif name == "copy from another slot":
            source = (target + 1) % SLOTS
            end = int(store.lengths[source] * argument)
            start = min(end, store.lengths[target])
            store.truncate(target, start)
            store.copy_entries(source, target, start, end)
            sequences[target] = sequences[target][:start] + sequences[source][start:end]
            features[target] = features[target][:start] + features[source][start:end]
            unverified[target] = []
        else:
            for slot in range(SLOTS):
                check(store.layer(target), slot, sequences[slot] + unverified[slot], target)
        assert store.lengths == [*map(len, sequences)] and store.num_unverified == [*map(len, unverified)]
    for slot, entries in enumerate(sequences):
        assert store.readable_len(slot) == len(entries) + len(unverified[slot])
        for layer in range(SHAPE.layers):
            check(store.layer(layer), slot, entries + unverified[slot], layer)
        for layers in store.layer_groups:
            for i, layer in enumerate(range(SHAPE.layers)[layers]):
                kv = tuple(x[i][None] for x in store.slot_kv(slot, layers))
                check(kv, 0, entries, layer)
        if entries:
            assert torch.equal(store.features[slot, : len(entries)], torch.stack(features[slot]))


@every_kind
def test_a_snapshot_goes_to_a_file_and_into_a_store_of_another_kind(kind, tmp_path):
    # KV in other numbers of bits is that of another target.
    stores = [make(kind), make(kind if kind in ("int8", "int4") else "transposed", 2, 30)]
    for source, target in (stores, stores[::-1]):
        rows = random_kv(kind, 7)
        source.write_entries(1, 0, *rows, features=torch.randn(7, 2 * FEATURES))
        source.lengths[1] = 7
        snapshot.save(source, 1, range(7), "target", tmp_path / "kv")
        target.truncate(0, 0)
        assert snapshot.load(target, 0, "target", tmp_path / "kv") == [*range(7)]
        assert target.lengths[0] == 7 and torch.equal(target.features[0, :7], source.features[1, :7])
        for layer in range(SHAPE.layers):
            check(target.layer(layer), 0, [*rows.unbind(3)], layer)


@every_kind
def test_entries_that_are_read_take_their_bytes_in_the_store_and_are_written_back_bit_by_bit(kind):
    source, target = make(kind), make(kind, 1, 30)
    source.write_entries(1, 0, *torch.randn(2, SHAPE.layers, SHAPE.kv_heads, 20, SHAPE.head_dim))
    source.lengths[1] = 20
    saved = source.read_entries(1, 3, 17)
    assert saved.keys.nbytes + saved.values.nbytes == 14 * source.bytes_per_token
    target.write_entries(0, 3, saved.keys, saved.values)
    target.lengths[0] = 17
    again = target.read_entries(0, 3, 17)
    assert torch.equal(again.keys, saved.keys) and torch.equal(again.values, saved.values)
    for layer in range(SHAPE.layers):
        stored = zip(source.layer(layer), target.layer(layer), strict=True)
        assert all(torch.equal(x[1, :, 3:17].to(torch.float32), y[0, :, 3:17].to(torch.float32)) for x, y in stored)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_snapshot_with_quantized_entries_as_floats_is_read(kind, tmp_path):
    """Versions before int4 wrote them so."""
    floats, quantized_store = make("plain"), make(kind)
    rows = random_kv(kind, 7)
    floats.write_entries(0, 0, *rows, features=torch.zeros(7, 2 * FEATURES))
    floats.lengths[0] = 7
    snapshot.save(floats, 0, range(7), "target", tmp_path / "kv")
    assert snapshot.load(quantized_store, 0, "target", tmp_path / "kv") == [*range(7)]
    check(quantized_store.layer(0), 0, [*rows.unbind(3)], 0)
    snapshot.save(quantized_store, 0, range(7), "target", tmp_path / "kv")
    with pytest.raises(CheckpointError, match="not those of 7 tokens"):
        snapshot.load(floats, 0, "target", tmp_path / "kv")


@every_kind
def test_wrong_entries_paths_and_lengths_are_refused(kind):
    store = make(kind, slots=2, capacity=24)
    store.write_entries(1, 0, *random_kv(kind, 20))
    store.commit(1, range(20))
    store.check_capacity([0, 1], 4)
    with pytest.raises(ValueError, match="slot 1 holds 20 tokens; 5 more exceed the capacity 24"):
        store.check_capacity([0, 1], 5)
    with pytest.raises(ValueError, match=r"entries \[22, 25\) do not fit a slot of capacity 24"):
        store.write_entries(1, 22, *random_kv(kind, 3))
    for path in ([1, 1], [2, 1], [-1, 0], [0, 3, 2]):
        with pytest.raises(ValueError, match="strictly increasing"):
            store.commit(1, path)
    with pytest.raises(ValueError, match="beyond the capacity 24"):
        store.commit(1, [0, 4])
    for length in (-1, 21):
        with pytest.raises(ValueError, match="cannot truncate slot 1 of length 20"):
            store.truncate(1, length)
    store.commit(1, [3])  # the last entry
    assert store.lengths == [0, 21]


KV_BYTES = SHAPE.bytes_per_token * 4096
FEATURE_BYTES = 2 * FEATURES * 4 * 4096
SCALE_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * 4096 * 4


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("plain", [KV_BYTES + FEATURE_BYTES]),
        ("transposed", [KV_BYTES + FEATURE_BYTES]),
        ("bfloat16", [KV_BYTES // 2 + FEATURE_BYTES]),
        ("int8", [KV_BYTES // 4 + SCALE_BYTES + FEATURE_BYTES]),
        ("int4", [SHAPE.layers * SHAPE.kv_heads * 4096 * (17 + 10) + FEATURE_BYTES]),
        ("host", [KV_BYTES, KV_BYTES // 3 * 2 + FEATURE_BYTES]),
    ],
)
def test_a_store_asks_for_its_bytes_and_is_refused_without_them(kind, needed, free_memory):
    free_memory(*needed)
    assert make(kind, 1, 4096).capacity == 4096
    free_memory(*needed[:-1], needed[-1] - 1)
    with pytest.raises(MemoryBudgetError, match=rf"A cache of 4096 tokens.* \({needed[-1]} bytes\)"):
        make(kind, 1, 4096)
    free_memory(None)  # a system that does not say
    assert make(kind, 1, 4096).capacity == 4096
