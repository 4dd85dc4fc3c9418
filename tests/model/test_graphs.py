"""Recorded forwards, with a stand-in that records a function and runs it again on the same buffers."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import Speculator
from longdraft.attention import hybrid
from longdraft.attention.block import Block
from longdraft.attention.reference import partial_attention
from longdraft.engine.request import Request
from longdraft.errors import MemoryBudgetError, NumericalError
from longdraft.memory import sizes as free_memory
from longdraft.memory.host_store import HostStore
from longdraft.memory.store import KVStore
from longdraft.model import graphs
from longdraft.model.graphs import BUCKETS, Graphs, batches, padded, unavailable
from longdraft.model.outputs import NO_TAPS, Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.masks import padded_mask
from longdraft.trees.tree import TokenTree
from tests import torch_kernels
from tests.drafts import random_draft
from tests.exact_methods import Specs
from tests.forwards import forward
from tests.nominal import StandIn, card, moved
from tests.quick import slow
from tests.tiny import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def there(monkeypatch):
    with card(monkeypatch) as found:
        yield found


def recorded(target):
    """The graphs of the memory of each store."""
    return target.runner.graphs._known


def static_attend(q, keys, values, block: Block, scale, scoring=None):
    """Attention that reads the block's tensors and nothing of its numbers on the host."""
    slots, n = block.slots_t.long(), block.lengths_t.long()[:, None, None]
    k, v = (x[slots].nan_to_num() for x in (keys, values))
    place = torch.arange(keys.shape[2]) - n  # among the tree's rows
    mask = torch.ones(q.shape[2], block.width, dtype=torch.bool).tril(block.offset)[None]
    mask = (mask if block.mask is None else block.mask).expand(len(slots), -1, -1)
    at = place.clamp(0, block.width - 1).expand(-1, q.shape[2], -1)
    seen = (place < 0) | ((place < block.width) & mask.gather(2, at))
    return partial_attention(q, k, v, scale, seen[:, None])[0].to(q.dtype)


def text(n: int, seed: int) -> list[int]:
    return torch.randint(61, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def tree_of(size: int, seed: int, chain: bool = False) -> TokenTree:
    g = torch.Generator().manual_seed(seed)
    parents = [-1] + [i - 1 if chain else int(torch.randint(i, (), generator=g)) for i in range(1, size)]
    return TokenTree(tuple(text(size, seed)), tuple(parents))


def trees_of(*sizes: int, seed: int, chain: bool = False) -> list[TokenTree]:
    return [tree_of(size, seed + i, chain) for i, size in enumerate(sizes)]


class Target:
    """A runner with a store, and a twin without graphs on a store of its own."""

    def __init__(
        self, attend=static_attend, slots=3, capacity=160, features=(), layers=2, recorder=StandIn, uses=0, most=99
    ) -> None:
        self.runner = TargetRunner(tiny_model(layers=layers))
        self.recorder = recorder()
        if attend is not None:
            self.runner._attend = attend
            self.runner.graphs = Graphs(self.recorder, uses, most)
        self.plain = TargetRunner(self.runner.model)
        self.stores = [r.new_store(slots, capacity, features) for r in (self.runner, self.plain)]

    def read(self, *lengths: int) -> None:
        for slot, n in enumerate(lengths):
            for runner, store in zip((self.runner, self.plain), self.stores, strict=True):
                if n:
                    forward(runner, [text(n, slot)], store, [slot], logits="none")
                    store.commit(slot, range(n))

    def forward(self, slots: list[int], trees: list[TokenTree], taps: Taps = NO_TAPS, **options):
        """Both runners' outputs for the same trees."""
        size = max(tree.size for tree in trees)
        chain = all(tree.is_chain for tree in trees)
        tokens = [tree.tokens + (0,) * (size - tree.size) for tree in trees]
        shape = {} if chain else {"mask": padded_mask(trees, size)}
        if not chain:
            shape["depths"] = [tree.depths + (0,) * (size - tree.size) for tree in trees]
        pairs = zip((self.runner, self.plain), self.stores, strict=True)
        return [forward(runner, tokens, store, slots, taps=taps, **shape, **options) for runner, store in pairs]

    def check(self, slots: list[int], trees: list[TokenTree], taps: Taps = NO_TAPS, **options) -> None:
        """That both give the same, the shapes too, and leave the same rows; commits a path of each tree."""
        got, expected = self.forward(slots, trees, taps, **options)
        torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
        assert got.logits.dtype == torch.float32
        for name in ("hidden", "queries"):
            assert getattr(got, name).keys() == getattr(expected, name).keys()
            for layer, x in getattr(expected, name).items():
                torch.testing.assert_close(getattr(got, name)[layer], x, **CLOSE)
        for slot, tree in zip(slots, trees, strict=True):
            for store in self.stores:
                store.commit(slot, tree.path(tree.size - 1))
            n = self.stores[0].lengths[slot]
            for tensors in zip(*((s.keys, s.values) for s in self.stores), strict=True):
                torch.testing.assert_close(*(x[:, slot, :, :n] for x in tensors), **CLOSE)
            if self.stores[0].features is not None:
                torch.testing.assert_close(*(s.features[slot, :n] for s in self.stores), **CLOSE)


@settings(max_examples=15)
@given(
    lengths=st.tuples(*[st.integers(0, 40)] * 3),
    rounds=st.lists(
        st.tuples(st.permutations(range(3)), st.integers(1, 3), st.lists(st.integers(1, 12), min_size=3, max_size=3)),
        min_size=1,
        max_size=5,
    ),
    chain=st.booleans(),
    taps=st.sampled_from([Taps(), Taps((0,), (1,)), Taps((1, 0), (0, 1))]),
    seed=st.integers(0, 1000),
)
def test_a_replay_is_the_forward_whatever_the_numbers_are(lengths, rounds, chain, taps, seed):
    target = Target(features=(0, 1))
    target.read(*lengths)
    for number, (slots, batch, sizes) in enumerate(rounds):
        target.check(list(slots)[:batch], trees_of(*sizes[:batch], seed=seed + 7 * number, chain=chain), taps)
    # Every forward was a replay, and no size was recorded twice.
    kinds = {(padded(batch, 3), (max(sizes[:batch]) - 1).bit_length()) for _, batch, sizes in rounds}
    assert target.recorder.replays == len(rounds) and target.recorder.captures == len(kinds)


@pytest.mark.parametrize("size", [*BUCKETS, 3, 5, 33, 65, 70])
def test_every_size_is_padded_to_a_recorded_one(size):
    target = Target(slots=1)
    target.read(20)
    target.check([0], [tree_of(size, 1)])
    assert target.recorder.replays == 1


@pytest.mark.parametrize("path", ["triton", "hybrid"])
def test_a_capturable_path_reads_nothing_of_the_hosts_numbers(monkeypatch, path):
    if path == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is not in use")
        from longdraft.attention import triton_backend

        monkeypatch.setattr(triton_backend, "_processors", lambda device: 8)  # so that there are splits
        monkeypatch.setattr(triton_backend, "MIN_KEYS_PER_SPLIT", 16)
        attend = triton_backend.attend
    else:
        monkeypatch.setenv("LONGDRAFT_ATTENTION", "sdpa")  # keys by row, as on a GPU
        attend = hybrid.attend
    with torch_kernels.registered() if path == "hybrid" else nullcontext():
        target = Target(attend, layers=1)
        target.read(50, 0, 7)
        for slots, sizes in (([0, 2], [3, 4]), ([2, 1], [4, 1])):
            target.check(slots, trees_of(*sizes, seed=5), Taps((0,), (0,)))
        assert (target.recorder.captures, target.recorder.replays) == (1, 2)


@pytest.mark.parametrize("name", ["sdpa", "cpu", "reference"])
def test_a_path_that_reads_the_hosts_numbers_would_be_found_out(name):
    """So the tests above would fail for one that did: the host's numbers in a recorded block are useless."""
    import importlib

    target = Target(importlib.import_module(f"longdraft.attention.{name}").attend)
    target.read(30)
    with pytest.raises((AssertionError, IndexError, RuntimeError, NumericalError)):
        target.check([0], [tree_of(5, 1)])
    assert target.recorder.replays  # it failed by what was replayed, not by falling back


def test_padded_rows_do_not_reach_the_result():
    target = Target(slots=2)
    target.read(20, 11)
    trees = trees_of(5, 4, seed=3)
    first = target.forward([0, 1], trees, Taps((0,), (1,)))[0]
    (graph,) = recorded(target)[target.stores[0].room or target.stores[0]].values()
    with torch.inference_mode():
        graph._tokens[:, 5:] = 17
        graph._positions[:, 5:] = 90
    again = target.forward([0, 1], trees, Taps((0,), (1,)))[0]
    assert first.logits.shape == (2, 5, 61) and first.queries[1].shape[2] == first.hidden[0].shape[1] == 5
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first.hidden[0], again.hidden[0]) and torch.equal(first.queries[1], again.queries[1])


def test_a_replay_writes_behind_the_prefix_of_its_slots_alone():
    target = Target(slots=3)
    target.read(20, 11, 30)
    store = target.stores[0]
    target.forward([2, 0], [tree_of(5, 3)] * 2)  # recorded with other slots
    before = store.keys.clone(), store.values.clone()
    target.forward([1, 0], [tree_of(6, 4)] * 2)
    for old, new in zip(before, (store.keys, store.values), strict=True):
        same = (old == new) | (old.isnan() & new.isnan())
        for slot, n in ((0, 20), (1, 11)):
            same[:, slot, :, n : n + 8] = True  # the padded block's rows
        assert same.all()


def test_results_are_the_callers_own():
    target = Target()
    target.read(20)
    one = target.forward([0], [tree_of(4, 1)], Taps((0,), (0,)))[0]
    kept = one.logits.clone(), one.hidden[0].clone(), one.queries[0].clone()
    target.forward([0], [tree_of(4, 2)], Taps((0,), (0,)))
    assert all(torch.equal(a, b) for a, b in zip(kept, (one.logits, one.hidden[0], one.queries[0]), strict=True))


def test_bases_move_positions_as_without():
    target = Target()
    target.read(20, 9)
    target.check([0, 1], trees_of(4, 2, seed=1), bases=[31, 12])


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "longspec", "specpv-exact"])
def test_whole_texts_come_out_the_same(method, tmp_path):
    model = tiny_model()
    prompts = [text(60, 1) * 2, text(40, 2)]
    options = {"draft": random_draft(tmp_path / "draft", model)} if method == "longspec" else {}
    if method == "specpv-exact":
        options = {"budget": 32, "sink": 8, "recent": 16, "margin": 6, "block": 8, "drafter": "prompt-lookup"}
    spec = Speculator(method, target=model, **options)
    expected = Speculator("ar", target=model).generate(prompts, max_new_tokens=24, eos_token_ids=[])
    runner = spec.runner()
    recorder = StandIn()
    runner._attend, runner.graphs = static_attend, Graphs(recorder)
    got = spec.generate(prompts, max_new_tokens=24, eos_token_ids=[])
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert recorder.replays > 2


def test_a_size_is_recorded_once_it_has_come_up_often_enough():
    target = Target(uses=graphs.USES)
    target.read(20)
    seen = []
    for seed in range(5):
        target.check([0], [tree_of(4, seed)])
        seen.append((target.recorder.captures, target.recorder.replays))
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3)]


def test_another_batch_other_rows_or_other_taps_are_another_recording():
    target = Target()
    target.read(10, 12)
    tree = tree_of(4, 1)
    for slots, taps in (([0], Taps()), ([0, 1], Taps()), ([0], Taps((0,))), ([0], Taps((), (0,))), ([1], Taps())):
        target.forward(slots, [tree] * len(slots), taps)
    assert target.recorder.captures == 4
    target.forward([0], [tree_of(5, 1)])
    assert target.recorder.captures == 5


def test_stores_in_use_have_recordings_of_their_own_and_a_later_one_takes_those_of_a_freed_one():
    target = Target()
    store, other = (target.runner.new_store(1, 100) for _ in range(2))
    for each in (store, other, store):
        forward(target.runner, [[1, 2]], each, [0])
    assert (target.recorder.captures, target.recorder.replays) == (2, 3)
    del store, other, each
    later = target.runner.new_store(1, 90)
    assert later.lengths == [0] and later.capacity >= 100
    target.stores[0] = later
    target.check([0], [tree_of(2, 1, chain=True)])
    assert (target.recorder.captures, target.recorder.replays) == (2, 4)


def test_a_store_with_more_slots_rows_or_features_takes_new_memory():
    target = Target()
    for slots, capacity, features in ((2, 100, ()), (3, 100, ()), (3, 300, ()), (3, 300, (0,))):
        forward(target.runner, [[1, 2]], target.runner.new_store(slots, capacity, features), [0])
    assert target.recorder.captures == 4


def test_memory_that_is_kept_for_later_is_freed_when_it_is_needed(monkeypatch):
    target = Target()
    forward(target.runner, [[1, 2]], target.runner.new_store(1, 100), [0])
    assert len(recorded(target)) == 1
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 0)
    with pytest.raises(MemoryBudgetError):
        target.runner.new_store(1, 1000)
    gc.collect()
    assert not recorded(target)


def test_without_room_for_a_rounded_capacity_the_exact_one_is_taken(monkeypatch):
    target = Target(slots=1)
    exact = KVStore.bytes_for(target.runner.kv_shape, 1, 1001 + target.runner.graphs.padding(1))
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: exact)
    assert target.runner.new_store(1, 1001).capacity == 1001 + target.runner.graphs.padding(1)


@pytest.mark.parametrize("method", ["eagle3", slow("self"), slow("longspec")])
def test_a_second_request_uses_the_recordings_of_the_first(method, tmp_path, there):
    specs = Specs(tmp_path, torch.float32)
    options, prompts = specs.options(method), [text(50, 1), text(30, 2)]
    expected = Speculator("ar", target=specs.model).generate(prompts, max_new_tokens=12, eos_token_ids=[])
    moved(specs.model)
    spec = Speculator(method, target=specs.model, plan="fixed", **options)
    recorder = StandIn(there)
    spec.runner().graphs = Graphs(recorder, uses=0)
    captures = []
    for _ in range(2):
        got = spec.generate(prompts, max_new_tokens=12, eos_token_ids=[])
        assert [r.token_ids for r in got] == [r.token_ids for r in expected]
        captures.append(recorder.captures)
    assert captures[0] == captures[1] > 0


@pytest.mark.parametrize("chain", [False, True])
def test_batches_are_padded_to_powers_of_two_or_all_slots(chain):
    target = Target(slots=7, features=(0,))
    target.read(20, 11, 30, 1, 9, 40, 3)
    store = target.stores[0]
    for slots in ([2, 0, 1], [1, 3, 4, 2], [4, 5, 6, 0, 1], [3, 2, 1, 0, 6, 5, 4], [5], [6, 1]):
        before = store.keys.clone(), store.values.clone()
        if chain:  # token by token behind the prefix
            for offset in range(3):
                pairs = zip((target.runner, target.plain), target.stores, strict=True)
                got, expected = (forward(r, [[n + 1] for n in slots], s, slots, offset=offset) for r, s in pairs)
                torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
        else:
            target.check(slots, trees_of(*(3 + n % 2 for n in slots), seed=5), Taps((1,), (0,)))
        for old, new in zip(before, (store.keys, store.values), strict=True):
            same = (old == new) | (old.isnan() & new.isnan())
            same[:, slots] = True
            same[..., -BUCKETS[-1] :, :] = True  # nobody's
            assert same.all()
    assert batches(7) == [1, 2, 4, 7] and target.recorder.captures == (12 if chain else 4)


def test_a_padded_sequence_writes_over_no_text_that_fills_its_slot():
    target = Target(slots=3, capacity=60)
    target.runner.graphs, capacity = Graphs(target.recorder, 0), target.stores[0].capacity
    for store in target.stores:
        store.capacity = 60
    target.read(49, 50, 3)
    assert capacity > 60
    target.check([0, 1, 2], trees_of(4, 3, 2, seed=1))
    target.check([1, 2], trees_of(4, 3, seed=2))
    assert target.recorder.captures == 2


def test_attention_is_split_by_the_text_and_not_by_the_capacity(monkeypatch):
    """In 16 bits torch's kernel splits by the longest text that may come: a power of two, of which the key is part."""
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "sdpa")  # keys by row, as on a GPU
    with torch_kernels.registered():
        runner = TargetRunner(tiny_model(layers=1, dtype=torch.bfloat16))
        recorder = StandIn()
        runner._attend, runner.graphs = hybrid.attend, Graphs(recorder, 0, shortest=16)
        store = runner.new_store(1, 1000)
        forward(runner, [text(20, 0)], store, [0], logits="none")
        store.commit(0, range(20))
        for length, captures in ((20, 1), (32, 1), (33, 2), (60, 2), (500, 3)):
            forward(runner, [text(length - store.lengths[0], 0)] if length > 20 else [[1]], store, [0], logits="none")
            store.commit(0, range(length - store.lengths[0]))
            torch_kernels.calls.clear()
            forward(runner, [[1, 2, 3]], store, [0])
            bounds = {call[3] for call in torch_kernels.calls}
            assert recorder.captures == captures and all(length <= bound < 2 * length for bound in bounds)


@pytest.mark.parametrize("method", ["longspec", slow("eagle3")])
def test_so_is_a_drafts(method, tmp_path, there):
    specs = Specs(tmp_path, torch.bfloat16)
    options = specs.options(method)
    moved(specs.model)
    spec = Speculator(method, target=specs.model, plan="fixed", **options)
    spec.runner().graphs = Graphs(StandIn(there), uses=0, shortest=16)
    session = spec.session(1, context=3000)
    session.add(Request(text(50, 1), max_new_tokens=12, eos_token_ids=[]))
    torch_kernels.calls.clear()
    while session.busy:
        session.step()
    assert torch_kernels.calls and all(call[3] <= 128 for call in torch_kernels.calls)


def test_graphs_are_recorded_before_the_first_request(there, tmp_path):
    specs = Specs(tmp_path, torch.float32)
    moved(specs.model)
    spec = Speculator("prompt-lookup", target=specs.model, plan="fixed", min_n=1)
    recorder, lines = StandIn(there), []
    spec.runner().graphs = Graphs(recorder)
    count = spec.record(4, context=100, progress=lines.append)
    assert recorder.captures == count > 0
    assert len({line.share for line in lines}) > 1 and lines[-1].share == 1.0
    session = spec.session(4, context=100)
    for seed in range(3):
        session.add(Request(text(50, seed) * 2, max_new_tokens=10, eos_token_ids=[]))
    while session.busy:
        session.step()
    assert recorder.captures == count and recorder.replays > count


def test_nothing_is_recorded_beforehand_on_a_cpu():
    assert Speculator("ar", target=tiny_model()).record(2) == 0


def test_tensors_that_lie_elsewhere_are_another_recording():
    target = Target()
    forward(target.runner, [[1, 2]], target.stores[0], [0])
    target.stores[0].keys = target.stores[0].keys.clone()
    target.check([0], [tree_of(2, 1, chain=True)])
    assert target.recorder.captures == 2
    table = target.runner.model.get_input_embeddings()
    table.weight.data = table.weight.data.clone()
    target.check([0], [tree_of(2, 1, chain=True)])
    assert target.recorder.captures == 3


def test_the_recordings_of_a_store_are_bounded():
    target = Target(most=2)
    target.read(5)
    for size in (1, 2, 1, 4, 1, 2):  # 2 has to go for 4
        target.check([0], [tree_of(size, size)])
    assert target.recorder.captures == 4


def test_a_padded_block_that_has_no_room_is_computed_without():
    target = Target(capacity=30)
    for store in target.stores:
        store.capacity = 30
    target.read(24)
    target.check([0], [tree_of(5, 1, chain=True)])
    assert target.recorder.captures == 0


def test_stores_leave_room_for_padding():
    target = Target(capacity=30)
    gaps = [min(b for b in BUCKETS if b >= n) - n for n in range(1, BUCKETS[-1] + 1)]
    assert target.stores[0].capacity >= 30 + max(gaps) + BUCKETS[-1]  # and for what padded sequences write
    assert target.runner.new_store(1, 500).capacity >= 500 + max(gaps)
    assert target.stores[1].capacity == 30


def test_prefills_and_stores_outside_the_device_are_computed_without():
    target = Target()
    for logits in ("last", "none"):
        forward(target.runner, [[1, 2, 3]], target.stores[0], [0], logits=logits)
    forward(target.runner, [text(97, 0)], target.stores[0], [0])  # larger than any tree
    forward(target.runner, [[1, 2]], HostStore(target.runner.kv_shape, 1, 64, "cpu"), [0])
    assert target.recorder.captures == 0


def test_tokens_of_a_chain_behind_others_are_recorded_by_their_place_and_wider_levels_not():
    target = Target(slots=2)
    target.read(10, 3)
    for slot in (0, 1):
        for place, token in enumerate((1, 2, 3)):
            pairs = zip((target.runner, target.plain), target.stores, strict=True)
            got, expected = (forward(r, [[token]], store, [slot], offset=place) for r, store in pairs)
            torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
    assert (target.recorder.captures, target.recorder.replays) == (3, 6)
    forward(target.runner, [[3, 4]], target.stores[0], [0], offset=2)
    assert target.recorder.captures == 3


class Failing(StandIn):
    """Fails to record the first so many sizes."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self._times = times

    def capture(self, compute):
        if self.captures < self._times:
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return super().capture(compute)


def test_a_size_that_cannot_be_recorded_is_said_once_and_does_not_switch_off_the_others(caplog):
    target = Target(recorder=Failing)
    target.read(10)
    with caplog.at_level(logging.WARNING, logger="longdraft"):
        for seed in range(3):
            target.check([0], [tree_of(4, seed)])
            target.check([0], [tree_of(7, seed)])
    assert (target.recorder.captures, target.recorder.replays) == (2, 3)
    (record,) = caplog.records
    assert "could not be recorded" in record.getMessage() and "and more" not in record.getMessage()


def test_where_no_size_can_be_recorded_no_more_are_tried(caplog):
    target = Target(recorder=lambda: Failing(99))
    target.read(10)
    for size in (1, 2, 4, 8, 16):
        target.check([0], [tree_of(size, 1)])
    assert target.recorder.captures == graphs.FAILURES
    assert "CUDA graphs are off" in caplog.text


@pytest.mark.parametrize(
    ("device", "path", "reason"),
    [
        (CPU, "cpu", "they need an NVIDIA GPU"),
        (CPU, "triton", "they need an NVIDIA GPU"),
        (CUDA, "sdpa", "LONGDRAFT_ATTENTION=hybrid"),
        (CUDA, "hybrid", None),
        (CUDA, "triton", None),
    ],
)
def test_where_there_are_graphs(device, path, reason):
    found = unavailable(device, path)
    assert found is None if reason is None else reason in found


def test_graphs_are_used_unless_the_switch_is_off(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="longdraft"):
        graphs_on = Graphs.on(CUDA, "triton")
        monkeypatch.setenv("LONGDRAFT_GRAPHS", "0")
        graphs_off = Graphs.on(CUDA, "triton")
        assert not Graphs.on(CPU, "cpu").recording
    assert graphs_on.recording and not graphs_off.recording
    assert graphs_on.padding(1) == 15 and graphs_on.padding(4) == 111 and graphs_off.padding(4) == 0
    assert [r.getMessage() for r in caplog.records] == [
        "CUDA graphs: verifications are recorded",
        "CUDA graphs: none, LONGDRAFT_GRAPHS=0 switches them off",
    ]
