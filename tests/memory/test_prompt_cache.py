"""The prompt cache: a run computes only the tokens that an earlier run has not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.store import KVShape, KVStore
from longdraft.memory.token_ids import common_prefix

SHAPE = KVShape(2, 1, 4, torch.float32)


def new_store(slots: int, capacity: int) -> KVStore:
    return KVStore(SHAPE, slots, capacity)


def opened(cache: PromptCache, prompts: list[list[int]], capacity: int) -> KVStore:
    """A store with room for these prompts, each slot with what is there of its own."""
    store = cache.open(new_store, len(prompts), capacity)
    for slot, prompt in enumerate(prompts):
        cache.begin(slot, prompt)
    return store


def run(cache: PromptCache, prompts: list[list[int]], capacity: int = 20) -> KVStore:
    """Does what an engine does: opens, computes missing rows, remembers. A token's KV is the token itself."""
    store = opened(cache, prompts, capacity)
    for slot, prompt in enumerate(prompts):
        n = store.lengths[slot]
        for tensor in (store.keys, store.values):
            tensor[:, slot, :, n : len(prompt)] = torch.tensor(prompt[n:], dtype=torch.float32)[:, None]
        store.commit(slot, range(len(prompt) - n))
        cache.remember(slot, prompt)
    return store


def held(store: KVStore, slot: int) -> list[int]:
    """The tokens whose KV a slot holds."""
    rows = store.keys[0, slot, 0, : store.lengths[slot], 0].tolist()
    assert rows == store.values[-1, slot, 0, : store.lengths[slot], -1].tolist()
    return [int(x) for x in rows]


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_common_prefix_is_as_long_as_it_can_be(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@pytest.mark.parametrize(
    ("earlier", "prompt", "kept"),
    [
        ([], [1, 2, 3], []),
        ([[1, 2, 3, 4, 5]], [1, 2, 3, 9, 9, 9], [1, 2, 3]),
        ([[1, 2, 3]], [1, 2, 3], [1, 2]),  # the last prompt token is computed again
        ([[1, 2, 3, 4], [1, 2]], [1, 2, 3, 4], [1, 2]),  # a shorter prompt forgets the rest
    ],
)
def test_a_run_starts_where_its_prompt_first_differs(earlier, prompt, kept):
    cache = PromptCache()
    for text in earlier:
        run(cache, [text])
    assert held(opened(cache, [prompt], 20), 0) == kept


def test_a_run_that_was_opened_and_never_ran_leaves_the_cache_usable():
    cache = PromptCache()
    run(cache, [[1, 2, 3, 4]])
    opened(cache, [[1, 2, 9]], 20)
    assert held(opened(cache, [[1, 2, 3, 4]], 20), 0) == [1, 2]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_slot_always_holds_its_own_prompt(prompts):
    cache = PromptCache()
    for prompt in prompts:
        assert held(run(cache, [prompt]), 0) == prompt


def test_the_store_is_kept_while_it_is_large_enough():
    cache = PromptCache()
    first = run(cache, [[1, 2, 3], [4, 5]])
    assert opened(cache, [[1, 2, 3]], 15) is first


def test_a_larger_store_takes_over_what_all_slots_hold():
    cache = PromptCache()
    run(cache, [[1, 2, 3], [4, 5]])
    store = opened(cache, [[1, 2, 3, 7], [4, 5, 8], [6]], 40)
    assert (store.slots, store.capacity) == (3, 40)
    assert held(store, 0) == [1, 2, 3] and held(store, 1) == [4, 5] and held(store, 2) == []


def test_a_smaller_batch_keeps_the_slots_it_does_not_use():
    cache = PromptCache()
    run(cache, [[1, 2], [3, 4]])
    run(cache, [[1, 2]], capacity=40)
    assert held(opened(cache, [[1, 2, 0], [3, 4, 0]], 20), 1) == [3, 4]


def test_growth_that_does_not_fit_leaves_the_cache_as_it_was(free_memory):
    cache = PromptCache()
    store = run(cache, [[1, 2, 3]])
    free_memory(100)
    with pytest.raises(MemoryBudgetError):
        opened(cache, [[9]], 1000)
    assert cache.store is store and held(store, 0) == [1, 2, 3] and list(map(list, cache.tokens)) == [[1, 2, 3]]


def test_only_committed_rows_are_remembered():
    cache = PromptCache()
    store = run(cache, [[1, 2]])
    cache.remember(0, [1, 2, 7])  # the last emitted token's KV is not computed yet
    assert list(cache.tokens[0]) == [1, 2] and held(store, 0) == [1, 2]


@pytest.fixture
def saved(tmp_path):
    """Saves a cache of a prompt, and returns the file and a cache that is restored from it."""

    def save(prompt: list[int]):
        cache = PromptCache()
        run(cache, [[8], prompt])
        cache.save(tmp_path / "kv", "target", slot=1)
        return tmp_path / "kv", PromptCache.restored(tmp_path / "kv", "target")

    return save


def test_a_saved_cache_serves_another_process(saved):
    assert held(opened(saved([1, 2, 3, 4])[1], [[1, 2, 3, 9]], 20), 0) == [1, 2, 3]


def test_a_restored_cache_makes_room_for_all_of_the_snapshot(saved):
    store = opened(saved([1, 2, 3, 4, 5, 6])[1], [[1, 2]], 3)
    assert store.capacity == 6 and held(store, 0) == [1]


def test_a_restored_cache_is_read_once(saved):
    file, restored = saved([1, 2, 3])
    run(restored, [[5, 6, 7]])
    file.unlink()
    assert held(opened(restored, [[5, 6, 7]], 20), 0) == [5, 6]


def test_another_targets_cache_is_refused(saved):
    file, _ = saved([1, 2, 3])
    with pytest.raises(CheckpointError):
        opened(PromptCache.restored(file, "mine"), [[1, 2]], 20)


def test_what_another_slot_has_is_copied_and_not_read_again():
    cache = PromptCache()
    run(cache, [[1, 2, 3, 4, 5], [9, 8]])
    store = cache.open(new_store, 2, 20)
    assert cache.begin(1, [1, 2, 3, 7]) == 3
    assert held(store, 1) == [1, 2, 3] and held(store, 0) == [1, 2, 3, 4, 5]
    assert cache.begin(1, [1, 2, 3, 4, 7], piece=2) == 4  # its own three, and one that was copied
    assert cache.begin(1, [1, 2, 3, 7], piece=2) == 2


def test_a_prompt_is_given_the_slot_that_has_most_of_it():
    cache = PromptCache()
    run(cache, [[1, 2, 3], [1, 2], [5]])
    assert [cache.choose(free, [1, 2, 3, 4]) for free in ([0, 1, 2], [1, 2], [2])] == [0, 1, 2]
    assert cache.choose([0, 1, 2], [7]) == 2  # none has any: the one that holds the least
