"""The prompt cache: a run computes only the tokens that an earlier run has not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import PromptCache
from longdraft.memory.store import KVShape, KVStore
from longdraft.memory.token_ids import common_prefix_len

SHAPE = KVShape(2, 1, 4, torch.float32)


def new_store(slots: int, capacity: int) -> KVStore:
    return KVStore(SHAPE, slots, capacity)


def opened(cache: PromptCache, prompts: list[list[int]], capacity: int) -> KVStore:
    """A store for these prompts, with what each slot can reuse."""
    store = cache.open(new_store, len(prompts), capacity)
    for slot, prompt in enumerate(prompts):
        cache.reuse_prefix(slot, prompt)
    return store


def run(cache: PromptCache, prompts: list[list[int]], capacity: int = 20) -> KVStore:
    """Does what an engine does: opens, computes missing KV, records the tokens. A token's KV is the token itself."""
    store = opened(cache, prompts, capacity)
    for slot, prompt in enumerate(prompts):
        n = store.lengths[slot]
        for tensor in (store.keys, store.values):
            tensor[:, slot, :, n : len(prompt)] = torch.tensor(prompt[n:], dtype=torch.float32)[:, None]
        store.commit(slot, range(len(prompt) - n))
        cache.record_tokens(slot, prompt)
    return store


def held(store: KVStore, slot: int) -> list[int]:
    """The tokens whose KV a slot holds."""
    tokens = store.keys[0, slot, 0, : store.lengths[slot], 0].tolist()
    assert tokens == store.values[-1, slot, 0, : store.lengths[slot], -1].tolist()
    return [int(x) for x in tokens]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@given(st.lists(PROMPTS, min_size=1, max_size=5), PROMPTS)
def test_a_run_starts_where_its_prompt_first_differs_from_the_last_one(prompts, other):
    """And computes its last token again; a run that was opened and never ran leaves the cache usable."""
    cache, last = PromptCache(), list[int]()
    for prompt in prompts:
        n = common_prefix_len(last, prompt)
        assert last[:n] == prompt[:n] and (n == min(len(last), len(prompt)) or last[n] != prompt[n])
        assert held(opened(cache, [prompt], 20), 0) == prompt[: min(n, len(prompt) - 1)]
        assert held(run(cache, [prompt]), 0) == prompt
        last = prompt
    opened(cache, [other], 20)
    assert held(run(cache, [last]), 0) == last


def test_the_store_is_kept_while_it_is_large_enough_and_a_larger_one_takes_over_what_all_slots_hold():
    cache = PromptCache()
    first = run(cache, [[1, 2, 3], [4, 5]])
    assert opened(cache, [[1, 2, 3, 6]], 15) is first
    store = opened(cache, [[1, 2, 3, 7], [4, 5, 8], [6]], 40)
    assert (store.slots, store.capacity) == (3, 40)
    assert held(store, 0) == [1, 2, 3] and held(store, 1) == [4, 5] and held(store, 2) == []
    run(cache, [[1, 2]], capacity=60)  # a smaller batch keeps the slots that it does not use
    assert held(opened(cache, [[1, 2, 0], [4, 5, 0]], 20), 1) == [4, 5]


def test_a_prompt_is_given_the_slot_that_has_most_of_it():
    cache = PromptCache()
    run(cache, [[1, 2, 3], [1, 2], [5]])
    assert [cache.choose_slot(free, [1, 2, 3, 4]) for free in ([0, 1, 2], [1, 2], [2])] == [0, 1, 2]
    assert cache.choose_slot([0, 1, 2], [7]) == 2  # none has any: the one that holds the least
    cache = PromptCache()  # a long text is not given up for a short beginning
    run(cache, [[1, 2, *range(50)], [1]], capacity=60)
    assert cache.choose_slot([0, 1], [1, 2, 9, 9]) == 1  # copies a row from the other one
    assert cache.choose_slot([0, 1], [1, 2, *range(40), 9]) == 0
