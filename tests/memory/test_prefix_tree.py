"""The prefix tree: a sequence is found as far as any other begins like it, and the limit always holds."""

from __future__ import annotations

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import PromptCache
from longdraft.memory.kv_entries import KVEntries
from longdraft.memory.prefix_tree import BLOCK_SIZE, PrefixTree
from longdraft.memory.recurrent import SlotCheckpoint, StateCheckpoint
from longdraft.memory.store import KVStore, StoreConfig
from longdraft.memory.token_ids import common_prefix_len, to_array
from tests.memory.test_prompt_cache import SHAPE, held

ENTRY = 2 * torch.float32.itemsize


def kv_of(text: array[int]):
    """The KV of a token is the token itself."""

    def read(start: int, end: int) -> KVEntries:
        tokens = torch.tensor(text[start:end], dtype=torch.float32)[None, None, :, None]
        return KVEntries(tokens.clone(), tokens.clone())

    return read


def found(tree: PrefixTree, text: array[int], start: int = 0) -> list[int]:
    """The tokens of a sequence whose KV the tree holds, from ``start`` on."""
    end, out = tree.match_prefix(text), list[int]()
    for position, kv in tree.read_entries(text, start, end):
        assert position == start + len(out)
        out += [int(x) for x in kv.keys[0, 0, :, 0]]
    return out


# Sequences that fork at, before and behind the ends of blocks.
LENGTHS = st.sampled_from([1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 50])
TEXTS = st.lists(LENGTHS, min_size=1, max_size=3).map(
    lambda parts: to_array([i for i, n in enumerate(parts) for _ in range(n)])
)


@given(st.lists(TEXTS, min_size=1, max_size=6), TEXTS, st.integers(0, 300))
def test_a_text_is_found_as_far_as_any_other_begins_like_it(texts, asked, start):
    tree = PrefixTree(1 << 30)
    for text in texts:
        tree.insert(text, kv_of(text))
    shared = max(common_prefix_len(asked, text) for text in texts)
    assert tree.match_prefix(asked) == shared and tree.match_prefix(asked, "another RoPE regime") == 0
    assert found(tree, asked, min(start, shared)) == list(asked[min(start, shared) : shared])


@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(1, 5 * BLOCK_SIZE))
def test_the_limit_holds_and_what_is_kept_is_right(texts, limit):
    tree = PrefixTree(limit * ENTRY)
    for text in texts:
        tree.insert(text, kv_of(text))
        assert tree.nbytes <= tree.max_bytes
        assert all(found(tree, text) == list(text[: tree.match_prefix(text)]) for text in texts)
    tree.reclaim()
    assert not tree.nbytes and not tree.match_prefix(texts[0])


def test_common_beginnings_are_kept_once_and_the_end_not_used_for_longest_goes_first():
    document = to_array(range(4 * BLOCK_SIZE))
    forks = [document + to_array([-i] * BLOCK_SIZE) for i in range(1, 5)]
    tree = PrefixTree(7 * BLOCK_SIZE * ENTRY)  # the document, and three of its forks
    for fork in forks[:3]:
        tree.insert(fork, kv_of(fork))
    assert tree.nbytes == tree.max_bytes
    list(tree.read_entries(forks[0], 0, 5 * BLOCK_SIZE))
    tree.insert(forks[3], kv_of(forks[3]))
    assert [tree.match_prefix(fork) // BLOCK_SIZE for fork in forks] == [5, 4, 5, 5]


def test_a_text_whose_slot_was_taken_comes_back_with_its_hidden_states():
    def new_store(slots: int, capacity: int) -> KVStore:
        return KVStore(SHAPE, slots, capacity, config=StoreConfig(feature_layers=(0,), feature_size=1))

    cache = PromptCache(tree_bytes=1 << 20)
    store = cache.open(new_store, 1, 800, (0,))

    def read(prompt: list[int], chunk_size: int = 1) -> int:
        start = cache.reuse_prefix(0, prompt, chunk_size=chunk_size)
        new = torch.tensor(prompt[start:], dtype=torch.float32)[:, None]
        kv = new.expand(2, 1, -1, 4)
        store.write_entries(0, start, kv, kv, new)
        store.commit(0, range(len(new)))
        cache.record_tokens(0, prompt)
        return start

    document, other = list(range(600)), list(range(1000, 1700))
    for text in ([*document, *[7] * 40], other):
        assert read(text) == 0
    assert read([*document, 8, 8]) == 600 and held(store, 0) == [*document, 8, 8]
    assert store.features is not None
    assert store.features[0, 597:602].flatten().tolist() == [597, 598, 599, 8, 8]
    assert read([*other, 1], chunk_size=100) == 700 and held(store, 0) == [*other, 1]


# --- checkpoints of recurrent layers ---


def states_after(tokens: array[int]) -> SlotCheckpoint:
    """States that tell after which tokens they are."""
    return SlotCheckpoint({0: StateCheckpoint({0: torch.tensor([len(tokens), sum(tokens)])}, None)})


CUTS = st.lists(st.floats(0, 1), max_size=4)


@given(st.lists(st.tuples(TEXTS, CUTS), min_size=1, max_size=8), st.integers(1, 5 * BLOCK_SIZE))
def test_checkpoints_count_towards_the_limit_and_have_their_kv(texts, limit):
    tree = PrefixTree(limit * ENTRY)
    for text, cuts in texts:
        lengths = {1 + int(cut * (len(text) - 1)) for cut in cuts}
        tree.insert(text, kv_of(text), "", {n: states_after(text[:n]) for n in lengths})
        assert tree.nbytes <= tree.max_bytes
        for asked, _ in texts:
            checkpoints = tree.match_checkpoints(asked)
            assert max(checkpoints, default=0) <= tree.match_prefix(asked)
            for n, checkpoint in checkpoints.items():
                assert checkpoint[0].conv_states[0].tolist() == [n, sum(asked[:n])]
    tree.reclaim()
    assert not tree.nbytes and not tree.match_checkpoints(texts[0][0])


def test_checkpoints_that_nobody_starts_from_go_before_kv():
    text = to_array(range(3 * BLOCK_SIZE))
    size = states_after(text).nbytes
    tree = PrefixTree(len(text) * ENTRY + 2 * size)
    tree.insert(text, kv_of(text), "", {n: states_after(text[:n]) for n in (100, BLOCK_SIZE)})
    list(tree.read_entries(text, 0, BLOCK_SIZE))
    tree.insert(text, kv_of(text), "", {len(text): states_after(text)})
    assert set(tree.match_checkpoints(text)) == {BLOCK_SIZE, len(text)} and tree.match_prefix(text) == len(text)
