"""Draft caches: their contents after any sequence of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.shared.key_rotation import KeyRotation
from longdraft.drafters.small_lm import make_repositioned_cache
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from longdraft.views import draft_cache
from longdraft.views.draft_cache import DraftCache
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View
from tests.support.forwards import forward
from tests.support.tiny import tiny_model

TRAINED, SLOTS = 60, 2


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(draft_cache, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(draft_cache, "SPARE_ENTRIES", 5)  # rows are moved after a few tokens


# One layer: keys and values depend on token and position alone, whatever was attended to.
RUNNER = TargetRunner(tiny_model(layers=1, vocab=61))


def read(cache, slot: int, tokens: list[int]) -> None:
    """Feeds tokens as a prompt."""
    while tokens:
        count = cache.begin_chunk(slot, len(tokens))
        assert 1 <= count <= len(tokens)
        feed(cache, slot, tokens[:count])
        tokens = tokens[count:]


def feed(cache, slot: int, tokens: list[int]) -> None:
    forward(RUNNER, [tokens], cache.store, [slot], logits="none")
    cache.commit(slot, len(tokens))


def computed(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (Hkv, n, d) of these tokens at positions 0, 1, 2, ..., as the model computes them."""
    store = RUNNER.new_store(1, len(tokens))
    forward(RUNNER, [tokens], store, [0], logits="none")
    return store.keys[0, 0], store.values[0, 0]


def assert_holds(cache, slot: int, tokens: list[int]) -> None:
    n = cache.store.lengths[slot]
    assert n == len(tokens)
    if n:
        got = cache.store.keys[0, slot, :, :n], cache.store.values[0, slot, :, :n]
        for a, b in zip(got, computed(tokens), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


class ScriptedRetrieval:
    """A retrieval whose selection the test sets: sink, some entries, window."""

    def __init__(self) -> None:
        self.view = View("quest", 8, 3, 5, max_new=6, shared_by_heads=True)
        self.rows_of: list[set[int]] = [set() for _ in range(SLOTS)]
        self.versions = [0] * SLOTS

    def choose(self, slot: int, rows: set[int]) -> None:
        self.rows_of[slot] = rows
        self.versions[slot] += 1

    def kv_indices(self, slot: int, length: int) -> torch.Tensor:
        ends = [*range(min(3, length)), *range(max(0, length - 5), length)]
        return torch.tensor(sorted({*ends, *(r for r in self.rows_of[slot] if r < length)}), dtype=torch.long)

    def selection_version(self, slot: int) -> int:
        return self.versions[slot]

    def reset(self, slot: int) -> None:
        self.choose(slot, set())

    def truncate(self, slot: int, length: int) -> None:
        self.choose(slot, {r for r in self.rows_of[slot] if r < length})


def streaming(sink: int, window: int) -> Retrieval:
    return Retrieval(View("streaming", 0, sink, window, max_new=6, shared_by_heads=True))


slots = st.integers(0, SLOTS - 1)
EVENTS = st.one_of(
    st.tuples(st.just("read"), slots, st.integers(1, 90)),
    st.tuples(st.just("feed"), slots, st.integers(1, 6)),
    st.tuples(st.just("choose"), slots, st.sets(st.integers(3, 120), min_size=8, max_size=8)),
    st.tuples(st.just("cut"), slots, st.floats(0, 1)),
    st.tuples(st.just("begin"), slots, st.none()),
)


@given(st.lists(EVENTS, max_size=14))
def test_a_repositioned_cache_has_the_selected_entries_and_keeps_all(events):
    """The selection and all tokens fed since, at contiguous positions, with keys as computed there."""
    chosen = ScriptedRetrieval()
    cache = make_repositioned_cache(RUNNER, SLOTS, 1000, 4, chosen, TRAINED)
    texts: list[list[int]] = [[], []]
    for name, slot, what in events:
        text = texts[slot]
        if name == "read":
            new = torch.randint(61, (what,)).tolist()
            read(cache, slot, new)
            text += new
        elif name == "feed":
            new = torch.randint(61, (what,)).tolist()
            before = len(text)
            cache.make_room(slot, what)
            rows = cache.store.lengths[slot]
            assert rows + what <= cache.retrieval.view.capacity
            if not cache.has_full_context(slot):
                # The selection as it was when it was gathered, and behind it what has been fed since.
                at = before - cache.full_store.lengths[slot]
                selected = chosen.kv_indices(slot, before - at).tolist()
                assert_holds(cache, slot, [text[r] for r in selected] + text[before - at :])
            else:
                assert_holds(cache, slot, text)
            feed(cache, slot, new)
            text += new
        elif name == "choose":
            chosen.choose(slot, what)
        elif name == "cut":
            length = int(what * len(text))
            chosen.truncate(slot, length)
            cache.truncate(slot, length)
            del text[length:]
        else:
            chosen.reset(slot)
            cache.truncate(slot)
            text.clear()
        for s, own in enumerate(texts):
            assert cache.full_store.lengths[s] <= len(own) and cache.store.lengths[s] <= TRAINED
            flushed = cache.full_store.lengths[s]
            if flushed:
                keys, values = computed(own[:flushed])
                assert torch.allclose(cache.full_store.values[0, s, :, :flushed], values, atol=2e-5)
                # What is kept has no position: turned to where it came from, it is what the model computes there.
                far = KeyRotation(RUNNER, max(flushed, 8))
                assert torch.allclose(
                    far.rotate(cache.full_store.keys[0, s, :, :flushed], torch.arange(flushed)), keys, atol=1e-4
                )


def test_prefill_attends_to_sink_and_window():
    """No position exceeds the trained length, and every chunk attends to sink and window at least."""
    cache = make_repositioned_cache(RUNNER, 1, 400, 4, streaming(3, 5), 40)
    seen: list[tuple[int, int]] = []
    text = [i % 61 for i in range(300)]
    at = 0
    while at < len(text):
        count = cache.begin_chunk(0, len(text) - at)
        seen.append((cache.store.lengths[0], count))
        feed(cache, 0, text[at : at + count])
        at += count
    assert all(n + count <= 40 for n, count in seen)
    assert all(n >= 8 for n, _ in seen[1:])
    assert len(seen) == 300 / max(count for _, count in seen)


@given(st.integers(2, 9), st.lists(st.integers(1, 9), min_size=1, max_size=99), st.integers(0, 40))
def test_a_window_holds_the_last_tokens(size, pieces, begin):
    """From any start position; and the first entry that a query of any depth attends to."""
    store = KVStore(KVShape(1, 1, 4, torch.float32), 1, size + draft_cache.SPARE_ENTRIES + 1)
    cache, position = DraftCache(store, 0, size), begin
    cache.truncate(0, begin)
    for n in pieces:
        n = min(n, size)
        k = torch.arange(position, position + n).float().view(1, 1, n, 1).expand(1, 1, n, 4)
        cache.append(0, k, -k)
        position += n
    last = list(range(max(begin, position - size), position))
    first, end = cache.window_start(0), store.lengths[0]
    assert cache.context_len(0) == cache.next_position(0) == position and cache.window_start(0, depth=1) == max(
        0, end - size + 1
    )
    assert store.keys[0, 0, 0, first:end].tolist() == [[p] * 4 for p in last]
    assert store.values[0, 0, 0, first:end].tolist() == [[-p] * 4 for p in last]
    cache.truncate(0, position - 1)
    assert cache.context_len(0) == position - 1
