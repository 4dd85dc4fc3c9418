"""The contract of KV stores: a store of any kind holds the rows of each text, as a list of rows would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import MemoryBudgetError
from longdraft.memory import snapshot
from longdraft.memory.offload import OffloadedKVStore
from longdraft.memory.store import KVShape, KVStore
from longdraft.native.int8_kv import Int8KV
from tests.support.lazy_side import LazyCopyStream

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32)
KINDS = ["rows", "columns", "bfloat16", "int8", "host"]
SLOTS, BLOCK, FEATURES = 3, 6, 5
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, slots: int = SLOTS, capacity: int = 200, shape: KVShape = SHAPE) -> KVStore:
    """A store of a kind with two layers' features; its rows are noise or zeros."""
    features = {"feature_layers": (0, 2), "feature_size": FEATURES}
    if kind == "host":
        return OffloadedKVStore(shape, slots, capacity, "cpu", copy_stream=LazyCopyStream(), **features)
    if kind in ("bfloat16", "int8"):
        return KVStore(shape, slots, capacity, "cpu", True, **features, dtype=getattr(torch, kind))
    return KVStore(shape, slots, capacity, "cpu", kind == "columns", **features)


def random_rows(kind: str, *size: int) -> torch.Tensor:
    """Keys and values (2, layers, kv_heads, *size, head_dim) that the kind of store does not round any further."""
    x = torch.randn(2, SHAPE.layers, SHAPE.kv_heads, *size, SHAPE.head_dim)
    return Int8KV.quantize(x).to(x.dtype) if kind == "int8" else x.bfloat16().float()


def check(actual: tuple[torch.Tensor, torch.Tensor], slot: int, rows: list[torch.Tensor], layer: int) -> None:
    """Compares keys and values of one layer with the rows (2, layers, kv_heads, head_dim) of a slot."""
    if rows:
        expected = torch.stack(rows, dim=3)[:, layer]
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x[slot, :, : len(rows)].to(y.dtype), y, rtol=1e-6, atol=0)


slots, share = st.integers(0, SLOTS - 1), st.floats(0, 1)
OPERATIONS = st.one_of(
    # The rows of a block, or of three levels of a tree, in some slots, and the path of it that is committed.
    st.tuples(st.sampled_from([BLOCK, BLOCK // 3]), st.sets(slots, min_size=1), st.sets(st.integers(0, BLOCK - 1))),
    st.tuples(st.just("truncate"), slots, share),
    st.tuples(st.just("put unverified rows"), slots, st.integers(1, 3)),
    st.tuples(st.just("copy from another slot"), slots, share),
    st.tuples(st.just("read"), st.integers(-1, SHAPE.layers - 1), st.none()),
)


@every_kind
@settings(max_examples=25)
@given(st.lists(OPERATIONS, max_size=12))
def test_any_sequence_of_operations_leaves_the_rows_of_each_text(kind, operations):
    store = make(kind)
    texts: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]  # (2, layers, kv_heads, head_dim) a token
    unverified: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    features: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    for name, what, more in operations:
        if isinstance(name, int):
            chosen = sorted(what, reverse=True)
            rows, hidden = random_rows(kind, len(chosen), BLOCK), torch.randn(2, len(chosen), BLOCK, FEATURES)
            for offset in range(0, BLOCK, name):
                level = slice(offset, offset + name)
                block = ForwardBatch.make(chosen, [store.lengths[s] for s in chosen], name, tree_offset=offset)
                for layer in range(SHAPE.layers):
                    k, v = rows[:, layer, :, :, level].transpose(1, 2)
                    store.write(layer, k, v, block)
                    for i, slot in enumerate(chosen):  # attention reads the prefix and the tree of these slots
                        check(
                            store.layer(layer), slot, texts[slot] + [*rows[:, :, :, i, : level.stop].unbind(3)], layer
                        )
                store.write_features({0: hidden[0][:, level], 2: hidden[1][:, level]}, block)
            for i, slot in enumerate(chosen):
                assert store.lengths[slot] == len(texts[slot])  # nothing is committed yet
                path = sorted(more)
                store.commit(slot, path)
                texts[slot] += [rows[:, :, :, i, node] for node in path]
                features[slot] += [hidden[:, i, node].flatten() for node in path]
                unverified[slot] = []
        elif name == "truncate":
            length = int(store.lengths[what] * more)
            store.truncate(what, length)
            texts[what], unverified[what], features[what] = texts[what][:length], [], features[what][:length]
        elif name == "put unverified rows":
            rows = random_rows(kind, more)
            store.write_entries(what, store.lengths[what], *rows)
            store.num_unverified[what] = more
            unverified[what] = [*rows.unbind(3)]
        elif name == "copy from another slot":
            source = (what + 1) % SLOTS
            end = int(store.lengths[source] * more)
            start = min(end, store.lengths[what])
            store.truncate(what, start)
            store.copy_entries(source, what, start, end)
            texts[what] = texts[what][:start] + texts[source][start:end]
            features[what] = features[what][:start] + features[source][start:end]
            unverified[what] = []
        else:
            for slot in range(SLOTS):
                check(store.layer(what), slot, texts[slot] + unverified[slot], what)
        assert store.lengths == [*map(len, texts)] and store.num_unverified == [*map(len, unverified)]
    for slot, text in enumerate(texts):
        assert store.readable_len(slot) == len(text) + len(unverified[slot])
        for layer in range(SHAPE.layers):
            check(store.layer(layer), slot, text + unverified[slot], layer)
        for layers in store.layer_groups:
            for i, layer in enumerate(range(SHAPE.layers)[layers]):
                rows = tuple(x[i][None] for x in store.slot_kv(slot, layers))
                check(rows, 0, text, layer)
        if text:
            assert torch.equal(store.features[slot, : len(text)], torch.stack(features[slot]))


@every_kind
def test_a_snapshot_goes_to_a_file_and_into_a_store_of_another_kind(kind, tmp_path):
    stores = [make(kind), make("columns", 2, 30)]
    for source, target in (stores, stores[::-1]):
        rows = random_rows(kind, 7)
        source.write_entries(1, 0, *rows, features=torch.randn(7, 2 * FEATURES))
        source.lengths[1] = 7
        snapshot.save(source, 1, range(7), "target", tmp_path / "kv")
        target.truncate(0, 0)
        assert snapshot.load(target, 0, "target", tmp_path / "kv") == [*range(7)]
        assert target.lengths[0] == 7 and torch.equal(target.features[0, :7], source.features[1, :7])
        for layer in range(SHAPE.layers):
            check(target.layer(layer), 0, [*rows.unbind(3)], layer)


@every_kind
def test_wrong_rows_paths_and_lengths_are_refused(kind):
    store = make(kind, slots=2, capacity=24)
    store.write_entries(1, 0, *random_rows(kind, 20))
    store.commit(1, range(20))
    store.check_capacity([0, 1], 4)
    with pytest.raises(ValueError, match="slot 1 holds 20 rows; 5 more exceed the capacity 24"):
        store.check_capacity([0, 1], 5)
    with pytest.raises(ValueError, match=r"rows \[22, 25\) do not lie in a slot of 24 rows"):
        store.write_entries(1, 22, *random_rows(kind, 3))
    for path in ([1, 1], [2, 1], [-1, 0], [0, 3, 2]):
        with pytest.raises(ValueError, match="strictly increasing"):
            store.commit(1, path)
    with pytest.raises(ValueError, match="beyond the capacity 24"):
        store.commit(1, [0, 4])
    for length in (-1, 21):
        with pytest.raises(ValueError, match="cannot truncate slot 1 of length 20"):
            store.truncate(1, length)
    store.commit(1, [3])  # the last row
    assert store.lengths == [0, 21]


TOTAL = SHAPE.bytes_per_token * 4096
BESIDE = 2 * FEATURES * 4 * 4096
SCALES = 2 * SHAPE.layers * SHAPE.kv_heads * 4096 * 4


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("rows", [TOTAL + BESIDE]),
        ("columns", [TOTAL + BESIDE]),
        ("bfloat16", [TOTAL // 2 + BESIDE]),
        ("int8", [TOTAL // 4 + SCALES + BESIDE]),
        ("host", [TOTAL, TOTAL // 3 * 2 + BESIDE]),
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
