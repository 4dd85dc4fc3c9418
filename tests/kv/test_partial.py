"""The partial cache: what is selected, from where it is gathered, and that no position falls out of reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kv.partial import PartialCache, PartialLayout
from longdraft.kv.scorers import REDUCTIONS, SCORERS, LayerBlocks, block_scores
from longdraft.kv.store import KVShape, KVStore
from longdraft.kv.summaries import BlockSummaries

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)
LAYOUT = {"sink": 4, "window": 8, "block": 4, "margin": 3}


def filled(length: int, transposed: bool = False, seed: int = 0) -> KVStore:
    """A store whose values say layer, slot, head and position."""
    store = KVStore(SHAPE, 2, length + 40, transposed_keys=transposed)
    generator = torch.Generator().manual_seed(seed)
    store.keys.copy_(torch.randn(store.keys.shape, generator=generator))
    for layer in range(SHAPE.layers):
        for slot in range(2):
            for head in range(SHAPE.kv_heads):
                code = 1e6 * layer + 1e5 * slot + 1e4 * head + torch.arange(store.capacity)
                store.values[layer, slot, head] = code[:, None]
    store.lengths = [length, length]
    return store


def cache(full: KVStore, layout: PartialLayout) -> PartialCache:
    return PartialCache(full, lambda slots, capacity: KVStore(SHAPE, slots, capacity), layout, 5)


def queries(seed: int = 1, tokens: int = 3) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(4, tokens, 4, generator=generator) for layer in range(SHAPE.layers)}


def positions(found: PartialCache, slot: int, layer: int, head: int) -> list[int]:
    """Which positions a slot's rows hold, read from the values; keys are checked against them."""
    n = found.store.lengths[slot]
    values = found.store.values[layer, slot, head, :n, 0] - 1e6 * layer - 1e5 * slot - 1e4 * head
    rows = values.long()
    assert torch.equal(found.store.keys[layer, slot, head, :n], found.full.keys[layer, slot, head, rows])
    return [int(x) for x in rows]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(13, 120),
    blocks=st.integers(3, 12),
    selector=st.sampled_from(sorted(SCORERS)),
    reduction=st.sampled_from(REDUCTIONS),
    transposed=st.booleans(),
)
def test_sink_retrieval_and_window_come_from_where_they_lie(length, blocks, selector, reduction, transposed):
    layout = PartialLayout(4 * blocks, **LAYOUT, selector=selector, reduction=reduction)
    found = cache(filled(length, transposed), layout)
    found.refresh(1, queries())
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.kv_heads):
            rows = positions(found, 1, layer, head)
            # In the text's order, nothing twice.
            assert rows == sorted(set(rows))
            # The sink, and everything from a block's border on: the incomplete block and the window before it.
            assert rows[:4] == [0, 1, 2, 3]
            start = layout.window_start(length)
            assert rows[-(length - start) :] == list(range(start, length))
            assert length - start >= min(layout.window, length - 4) and start % 4 == 0
            # Between them whole blocks: those that were selected.
            inner = rows[4 : len(rows) - (length - start)]
            chosen = [row // 4 for row in inner[::4]]
            assert inner == [4 * b + i for b in chosen for i in range(4)]
            assert chosen == found.selected[1][layer, head].tolist()
            between = (start - 4) // 4
            assert len(chosen) == (0 if selector == "streaming" else min(blocks, between))
            assert layout.segment(length) == len(rows) or length <= layout.total


def scores_by_definition(name: str, q: torch.Tensor, keys: torch.Tensor, block: int) -> torch.Tensor:
    """(Hkv, G, M, blocks) of complete blocks, one loop an index."""
    heads, group, tokens, _ = q.shape
    count = keys.shape[1] // block
    out = torch.zeros(heads, group, tokens, count)
    for h in range(heads):
        for g in range(group):
            for m in range(tokens):
                one = q[h, g, m]
                mass = torch.softmax(keys[h] @ one * len(one) ** -0.5, -1)
                for b in range(count):
                    rows = keys[h, b * block : (b + 1) * block]
                    high, low = rows.max(0).values, rows.min(0).values
                    out[h, g, m, b] = {
                        "minmax": max(float(one @ high), float(one @ low)),
                        "quest": float(sum(max(x * u, x * v) for x, u, v in zip(one, high, low, strict=True))),
                        "mean-key": float(one @ rows.mean(0)),
                        "attention": float(mass[b * block : (b + 1) * block].sum()),
                    }[name]
    return out


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["minmax", "quest", "mean-key", "attention"])
def test_scores_are_what_their_definitions_say(name, reduction):
    store = filled(30)
    summaries = BlockSummaries(store, 4)
    summaries.update(0)
    q = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(5))
    each = scores_by_definition(name, q.view(2, 2, 3, 4), store.keys[0, 0, :, :30], 4)
    reduced = {"mean": each.mean(2), "max": each.amax(2), "last": each[:, :, -1]}[reduction].mean(1)
    # Candidates from the second block on, as behind a sink.
    parts = [x[0, 0, :, 1:7] for x in (summaries.largest, summaries.smallest, summaries.mean)]
    blocks = LayerBlocks(*parts, lambda: store.keys[0, 0, :, :30], first=1, block=4)
    scorer = SCORERS[name]
    assert scorer is not None
    torch.testing.assert_close(block_scores(scorer, reduction, q, blocks), reduced[:, 1:7])


@pytest.mark.parametrize("selector", ["minmax", "quest", "mean-key", "attention"])
def test_a_block_that_the_queries_point_at_is_retrieved(selector):
    """Each KV head has a needle of its own; a gather with the sink's offset forgotten would miss both."""
    full = filled(100)
    full.keys.mul_(0.01)
    q = torch.zeros(4, 1, 4)
    for head, needle in enumerate((37, 70)):
        direction = torch.eye(4)[head]
        full.keys[:, 0, head, needle] = 9 * direction
        q[2 * head : 2 * head + 2, 0] = direction
    found = cache(full, PartialLayout(12, **LAYOUT, selector=selector))
    found.refresh(0, dict.fromkeys(range(SHAPE.layers), q))
    for layer in range(SHAPE.layers):
        for head, needle in enumerate((37, 70)):
            assert needle in positions(found, 0, layer, head)


def test_quests_bound_is_one():
    store = filled(64)
    summaries = BlockSummaries(store, 4)
    summaries.update(0)
    q = torch.randn(4, 5, 4)
    parts = [x[0, 0, :, :16] for x in (summaries.largest, summaries.smallest, summaries.mean)]
    bound = SCORERS["quest"](q.view(2, 2, 5, 4), LayerBlocks(*parts, lambda: store.keys[0, 0], 0, 4))  # type: ignore[misc]
    each = torch.einsum("hgmd,hnd->hgmn", q.view(2, 2, 5, 4), store.keys[0, 0, :, :64])
    assert bool((each.unflatten(-1, (16, 4)).amax(-1) <= bound + 1e-5).all())


def test_summaries_follow_commits_and_truncations():
    store = filled(30)
    summaries = BlockSummaries(store, 4)
    summaries.update(0)
    assert summaries.count(0) == 7
    store.truncate(0, 10)
    summaries.truncate(0)
    assert summaries.count(0) == 2
    store.keys[:, 0, :, 8:30] += 1
    store.lengths[0] = 29
    summaries.update(0)
    fresh = BlockSummaries(store, 4)
    fresh.update(0)
    for name in ("largest", "smallest", "mean"):
        own, wanted = (getattr(x, name)[:, 0, :, :7] for x in (summaries, fresh))
        assert torch.equal(own, wanted)


def test_what_waits_is_shown_to_drafters_and_gone_at_the_refresh():
    full = filled(60)
    found = cache(full, PartialLayout(12, **LAYOUT))
    found.refresh(0, queries())
    segment = found.store.lengths[0]
    # A tree of four rows, of which the first and the third are accepted; then one row more.
    for rows, path, numbers in ((4, [0, 2], [11.0, 12.0, 13.0, 14.0]), (1, [0], [15.0])):
        start = found.store.lengths[0]
        found.store.values[:, 0, :, start : start + rows] = torch.tensor(numbers)[:, None]
        found.store.keys[:, 0, :, start : start + rows] = torch.tensor(numbers)[:, None]
        found.keep(0, path)
    assert (found.waiting(0), found.store.lengths[0]) == (3, segment + 3)
    assert (full.lengths[0], full.unverified[0], full.readable(0)) == (60, 3, 63)
    assert full.values[0, 0, 0, 60:63, 0].tolist() == [11.0, 13.0, 15.0] == full.keys[1, 0, 1, 60:63, 2].tolist()
    full.lengths[0] = 61
    found.refresh(0, queries())
    assert found.waiting(0) == 0 and found.store.lengths[0] == PartialLayout(12, **LAYOUT).segment(61)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"budget": 8}, "budget must be at least sink"),
        ({"budget": 30}, "multiple of block"),
        ({"sink": 3}, "multiple of block"),
        ({"window": 0}, "window must hold"),
        ({"margin": 0}, "margin"),
        ({"block": 0}, "block"),
        ({"selector": "best"}, "selector must be one of minmax"),
        ({"reduction": "sum"}, "reduction must be one of mean"),
    ],
)
def test_layouts_that_cannot_be(options, word):
    with pytest.raises(ValueError, match=word):
        PartialLayout(**{"budget": 32, **LAYOUT} | options)
