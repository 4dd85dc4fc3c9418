"""Recorded forwards, with a stand-in that records a function and runs it again on the same buffers."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import Request, Speculator
from longdraft.attention import dispatch
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.reference import partial_attention
from longdraft.engine.verifier import verify_trees
from longdraft.errors import MemoryBudgetError
from longdraft.memory.offload import OffloadedKVStore
from longdraft.model.gpu import cuda_graphs
from longdraft.model.gpu.cuda_graphs import (
    CAPTURE_QUERY_LENS,
    CudaGraphs,
    batch_sizes,
    padded_batch_size,
    unavailable_reason,
)
from longdraft.model.outputs import NO_TAPS, Taps
from longdraft.model.runner import TargetRunner
from longdraft.planning import costs
from longdraft.trees.tree import TokenTree
from tests.support import torch_kernels
from tests.support.forwards import forward
from tests.support.lazy_side import LazyCopyStream
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.tiny import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def static_attend(q, keys, values, block: ForwardBatch, scale, scoring=None):
    """Attention that reads the block's tensors and nothing of its numbers on the host."""
    slots, n = block.slots_t.long(), block.prefix_lens_t.long()[:, None, None]
    k, v = (x[slots].nan_to_num() for x in (keys, values))
    place = torch.arange(keys.shape[2]) - n  # among the tree's rows
    mask = torch.ones(q.shape[2], block.tree_len, dtype=torch.bool).tril(block.tree_offset)[None]
    mask = (mask if block.mask is None else block.mask).expand(len(slots), -1, -1)
    at = place.clamp(0, block.tree_len - 1).expand(-1, q.shape[2], -1)
    seen = (place < 0) | ((place < block.tree_len) & mask.gather(2, at))
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
        self, slots=3, capacity=160, features=(), recorder=SimulatedGraphs, uses=0, most=99
    ) -> None:  # fmt: skip
        self.runner = TargetRunner(tiny_model(layers=2))
        self.recorder = recorder()
        self.runner.attend, self.runner.graphs = static_attend, CudaGraphs(self.recorder, uses, most)
        self.plain = TargetRunner(self.runner.model)
        self.stores = [r.new_store(slots, capacity, features) for r in (self.runner, self.plain)]

    def read(self, *lengths: int) -> None:
        for slot, n in enumerate(lengths):
            for runner, store in zip((self.runner, self.plain), self.stores, strict=True):
                if n:
                    forward(runner, [text(n, slot)], store, [slot], logits="none")
                    store.commit(slot, range(n))

    def forward(self, slots: list[int], trees: list[TokenTree], taps: Taps = NO_TAPS):
        """Both runners' outputs for the same trees."""
        pairs = zip((self.runner, self.plain), self.stores, strict=True)
        return [verify_trees(runner, store, slots, trees, taps=taps) for runner, store in pairs]

    def check(self, slots: list[int], trees: list[TokenTree], taps: Taps = NO_TAPS) -> None:
        """That both give the same, the shapes too, and leave the same rows; commits a path of each tree."""
        got, expected = self.forward(slots, trees, taps)
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


@settings(max_examples=8)
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
    kinds = {(padded_batch_size(batch, 3), (max(sizes[:batch]) - 1).bit_length()) for _, batch, sizes in rounds}
    assert target.recorder.replays == len(rounds) and target.recorder.captures == len(kinds)


def test_results_are_the_callers_own():
    target = Target()
    target.read(20)
    one = target.forward([0], [tree_of(4, 1)], Taps((0,), (0,)))[0]
    kept = one.logits.clone(), one.hidden[0].clone(), one.queries[0].clone()
    target.forward([0], [tree_of(4, 2)], Taps((0,), (0,)))
    assert all(torch.equal(a, b) for a, b in zip(kept, (one.logits, one.hidden[0], one.queries[0]), strict=True))


ALL, HIDDEN = Taps(), Taps((0,))
# What a target is given, forwards (slots, size of the tree, taps), and the number of recordings after each.
CAPTURES = {
    "a size is recorded once it has come up often enough": (
        {"uses": cuda_graphs.USES_BEFORE_CAPTURE}, [([0], 4, ALL)] * 5, [0, 0, 1, 1, 1],
    ),
    "another batch, other taps or other rows are another recording": (
        {},
        [([0], 4, ALL), ([0, 1], 4, ALL), ([0], 4, HIDDEN), ([0], 4, Taps((), (0,))), ([1], 4, ALL), ([0], 5, ALL)],
        [1, 2, 3, 4, 4, 5],
    ),
    "those of a store are bounded: the one not used for longest goes": (
        {"most": 2}, [([0], size, ALL) for size in (1, 2, 1, 4, 1, 2)], [1, 2, 2, 3, 3, 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURES)
def test_what_is_recorded(name):
    options, forwards, expected = CAPTURES[name]
    target, found = Target(**options), []
    target.read(10, 12)
    for seed, (slots, size, taps) in enumerate(forwards):
        target.check(slots, trees_of(*[size] * len(slots), seed=seed), taps)
        found.append(target.recorder.captures)
    assert found == expected and target.recorder.replays == sum(n >= options.get("uses", 0) for n in range(len(found)))


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
    target = Target()  # more slots, rows or features take new memory
    for slots, capacity, features in ((2, 100, ()), (3, 100, ()), (3, 300, ()), (3, 300, (0,))):
        forward(target.runner, [[1, 2]], target.runner.new_store(slots, capacity, features), [0])
    assert target.recorder.captures == 4


def test_memory_that_is_kept_for_later_is_freed_when_it_is_needed(free_memory):
    target = Target()
    store = target.runner.new_store(1, 100)
    forward(target.runner, [[1, 2]], store, [0])
    kept = weakref.ref(store.keys)
    del store
    gc.collect()
    assert kept() is not None
    free_memory(0)
    with pytest.raises(MemoryBudgetError):
        target.runner.new_store(1, 1000)
    gc.collect()
    assert kept() is None


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
                got, expected = (forward(r, [[n + 1] for n in slots], s, slots, tree_offset=offset) for r, s in pairs)
                torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
        else:
            target.check(slots, trees_of(*(3 + n % 2 for n in slots), seed=5), Taps((1,), (0,)))
        for old, new in zip(before, (store.keys, store.values), strict=True):
            same = (old == new) | (old.isnan() & new.isnan())
            same[:, slots] = True
            same[..., -CAPTURE_QUERY_LENS[-1] :, :] = True  # nobody's
            assert same.all()
    assert batch_sizes(7) == [1, 2, 4, 7] and target.recorder.captures == (12 if chain else 4)


def test_a_padded_sequence_writes_over_no_text_that_fills_its_slot():
    target = Target(slots=3, capacity=60)
    target.runner.graphs, capacity = CudaGraphs(target.recorder, 0), target.stores[0].capacity
    for store in target.stores:
        store.capacity = 60
    target.read(49, 50, 3)
    assert capacity > 60
    target.check([0, 1, 2], trees_of(4, 3, 2, seed=1))
    target.check([1, 2], trees_of(4, 3, seed=2))
    assert target.recorder.captures == 2


def test_attention_is_split_by_the_text_and_not_by_the_capacity(monkeypatch):
    """In 16 bits torch's kernel splits by the longest text that may come: 2^k or 3 * 2^k, which is part of the key."""
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "sdpa")  # keys by row, as on a GPU
    with torch_kernels.registered():
        runner = TargetRunner(tiny_model(layers=1, dtype=torch.bfloat16))
        recorder = SimulatedGraphs()
        runner.attend, runner.graphs = dispatch.PATHS["hybrid"], CudaGraphs(recorder, 0, min_kv_bound=16)
        store = runner.new_store(1, 1000)
        forward(runner, [text(20, 0)], store, [0], logits="none")
        store.commit(0, range(20))
        for length, captures in ((20, 1), (24, 1), (25, 2), (32, 2), (33, 3), (48, 3), (500, 4)):
            forward(runner, [text(length - store.lengths[0], 0)] if length > 20 else [[1]], store, [0], logits="none")
            store.commit(0, range(length - store.lengths[0]))
            torch_kernels.calls.clear()
            forward(runner, [[1, 2, 3]], store, [0])
            bounds = {call[3] for call in torch_kernels.calls}
            assert recorder.captures == captures and all(length <= bound <= 1.5 * length for bound in bounds)


def test_graphs_are_recorded_before_the_first_request(simulated_gpu):
    model = to_simulated_gpu(tiny_model(layers=1, hidden=32, heads=4))
    spec = Speculator("prompt-lookup", target=model, plan="fixed", min_n=1, max_draft=3)
    recorder, lines = SimulatedGraphs(simulated_gpu), []
    spec.runner().graphs = CudaGraphs(recorder)
    count = spec.record(2, context=60, progress=lines.append)
    assert recorder.captures == count > 0
    assert len({line.share for line in lines}) > 1 and lines[-1].share == 1.0
    session = spec.session(2, context=60)
    for seed in range(2):
        session.add(Request(text(20, seed) * 2, max_new_tokens=10, eos_token_ids=[]))
    while session.busy:
        session.step()
    assert recorder.captures == count and recorder.replays > count


def test_tensors_that_lie_elsewhere_or_have_another_shape_are_another_recording():
    target = Target()
    store = target.stores[0]
    forward(target.runner, [[1, 2]], store, [0])
    store.keys = store.keys.clone()
    target.check([0], [tree_of(2, 1, chain=True)])
    assert target.recorder.captures == 2
    store.keys, store.values, store.capacity = store.keys[..., :-9, :], store.values[..., :-9, :], store.capacity - 9
    target.check([0], [tree_of(2, 1, chain=True)])
    assert target.recorder.captures == 3
    table = target.runner.model.get_input_embeddings()
    table.weight.data = table.weight.data.clone()
    target.check([0], [tree_of(2, 1, chain=True)])
    assert target.recorder.captures == 4


def test_prefills_and_stores_outside_the_device_are_computed_without():
    target = Target()
    for logits in ("last", "none"):
        forward(target.runner, [[1, 2, 3]], target.stores[0], [0], logits=logits)
    forward(target.runner, [text(97, 0)], target.stores[0], [0])  # larger than any tree
    offloaded = OffloadedKVStore(target.runner.kv_shape, 1, 64, "cpu", copy_stream=LazyCopyStream())
    forward(target.runner, [[1, 2]], offloaded, [0])
    assert target.recorder.captures == 0


class Failing(SimulatedGraphs):
    """Fails to record the first size."""

    def capture(self, compute):
        if not self.captures:
            self.captures += 1
            self.fail()
        return super().capture(compute)

    def fail(self):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


class LacksMemory(Failing):
    def fail(self):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("the capture was invalidated")  # as torch's context of a capture does when it ends


def test_a_size_that_cannot_be_recorded_is_said_once_and_runs_without(caplog):
    target = Target(recorder=Failing)
    target.read(10)
    for seed in range(3):
        target.check([0], [tree_of(4, seed)])
        target.check([0], [tree_of(7, seed)])
    assert (target.recorder.captures, target.recorder.replays) == (2, 3)
    assert caplog.text.count("could not be captured") == 1 and "and more" not in caplog.text


def test_a_size_for_which_memory_was_short_is_tried_again(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_RETRY", 2)
    target, found = Target(recorder=LacksMemory), []
    target.read(10)
    for seed in range(5):
        target.check([0], [tree_of(4, seed)])
        found.append((target.recorder.captures, target.recorder.replays))
    assert found == [(1, 0), (1, 0), (1, 0), (2, 1), (2, 2)]


def test_costs_are_those_of_recorded_forwards(tmp_path):
    target = Target()
    target.runner.graphs = CudaGraphs(target.recorder)
    costs.load_or_measure(target.runner, tmp_path)
    assert target.recorder.captures > 1 and target.recorder.replays >= 2 * target.recorder.captures
    assert costs.load_or_measure(target.plain, tmp_path, measure_with=lambda *_, **__: None) is None  # another key


def test_where_there_are_graphs(monkeypatch, caplog):
    for device, path in ((CPU, "cpu"), (CPU, "hybrid"), (CUDA, "sdpa")):
        assert unavailable_reason(device, path) and not CudaGraphs.for_device(device, path).enabled
    assert "LONGDRAFT_ATTENTION=hybrid" in (unavailable_reason(CUDA, "sdpa") or "")
    assert unavailable_reason(CUDA, "hybrid") is None and CudaGraphs.for_device(CUDA, "hybrid").enabled
    assert [CudaGraphs.for_device(CUDA, "hybrid").extra_kv_entries(slots) for slots in (1, 4)] == [15, 111]
    monkeypatch.setenv("LONGDRAFT_GRAPHS", "0")
    with caplog.at_level(logging.INFO, logger="longdraft"):
        switched_off = CudaGraphs.for_device(CUDA, "hybrid")
    assert not switched_off.enabled and switched_off.extra_kv_entries(4) == 0 and "LONGDRAFT_GRAPHS=0" in caplog.text
