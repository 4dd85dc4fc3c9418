"""Which rows a model sees of its own KV: by definition, in shape, and what makes no view."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.self_views import POOL, VIEWS, SparseView, sparse_view


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@given(
    kind=st.sampled_from(VIEWS),
    chunk=st.integers(1, 5),
    sink_chunks=st.integers(0, 3),
    window=st.integers(1, 9),
    more=st.integers(0, 30),
    beyond=st.integers(1, 60),
    told=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sink_window_and_as_many_others_as_the_budget_has(kind, chunk, sink_chunks, window, more, beyond, told, seed):
    sink = chunk * sink_chunks
    budget = sink + window + more + (chunk if kind == "chunks" else 0)
    view = SparseView(kind, budget, sink, window, chunk)
    n = budget + beyond
    rows = view.rows(random(2, n, 4, seed=seed), random(4, 3, 4, seed=seed + 1) if told else None)
    start = view.window_start(n)
    assert rows.shape[0] == 2 and rows.shape[1] <= view.most
    for head in rows.tolist():
        assert head == sorted(set(head))
        assert head[:sink] == list(range(sink)) and head[len(head) - (n - start) :] == list(range(start, n))
    assert window <= n - start < window + (chunk if kind == "chunks" else 1)
    inner = rows[:, sink : rows.shape[1] - (n - start)]
    count = budget - sink - window
    assert inner.shape[1] == {"streaming": 0, "chunks": count // chunk * chunk}.get(kind, count)
    if kind == "chunks":
        assert torch.equal(inner[:, ::chunk] % chunk, torch.zeros_like(inner[:, ::chunk]))
        whole = inner[:, ::chunk, None] + torch.arange(chunk)
        assert torch.equal(inner, whole.flatten(1))


def snapkv_by_definition(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """One loop an index: softmax, summed over the window, averaged over neighbours, summed over the group."""
    heads, n, d = keys.shape
    group = len(queries) // heads
    scores = torch.zeros(heads, n)
    for h in range(heads):
        for g in range(group):
            mass = sum(torch.softmax(keys[h] @ q / d**0.5, -1) for q in queries[h * group + g])
            for i in range(n):
                scores[h, i] += sum(mass[j] for j in range(i - POOL // 2, i + POOL // 2 + 1) if 0 <= j < n) / POOL
    return scores


def linear_by_definition(keys: torch.Tensor, queries: torch.Tensor, chunk: int) -> torch.Tensor:
    """q . mean(K) of the newest query, averaged over the group."""
    heads, n, _ = keys.shape
    group = len(queries) // heads
    return torch.stack(
        [
            torch.stack(
                [
                    sum(queries[h * group + g, -1] @ keys[h, a : a + chunk].mean(0) for g in range(group)) / group
                    for a in range(0, n - chunk + 1, chunk)
                ]
            )
            for h in range(heads)
        ]
    )


@pytest.mark.parametrize(("kind", "chunk"), [("snapkv", 1), ("chunks", 3), ("tokens", 1)])
def test_the_best_by_definition_are_chosen(kind, chunk):
    view = SparseView(kind, 21, 3, 6, chunk)
    keys, queries = random(2, 60, 4), random(6, 6, 4, seed=1)
    start = view.window_start(60)
    scores = (
        snapkv_by_definition(keys[:, :start], queries)
        if kind == "snapkv"
        else linear_by_definition(keys[:, :start], queries, chunk)
    )[:, 3 // chunk :]
    best = scores.topk(12 // chunk, dim=-1).indices.sort(-1).values
    expected = (3 + best[..., None] * chunk + torch.arange(chunk)).flatten(1)
    assert torch.equal(view.rows(keys, queries)[:, 3:15], expected)


@pytest.mark.parametrize("kind", ["snapkv", "chunks", "tokens"])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_kv_head_finds_its_own_needle(kind, transposed):
    keys, queries = 0.01 * random(2, 100, 4), torch.zeros(4, 1, 4)
    for head, needle in enumerate((37, 70)):
        keys[head, needle] = 9 * torch.eye(4)[head]
        queries[2 * head : 2 * head + 2, 0] = torch.eye(4)[head]
    if transposed:
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    rows = SparseView(kind, 24, 4, 4, 4).rows(keys.bfloat16() if transposed else keys, queries)
    assert 37 in rows[0] and 70 in rows[1]
    assert kind == "snapkv" or not (37 in rows[1] and 70 in rows[0])


def test_nobody_has_looked_yet():
    """The latest rows are there."""
    rows = SparseView("tokens", 10, 2, 3, 1).rows(random(2, 50, 4), None)
    assert rows[0].tolist() == [0, 1, *range(42, 50)]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("streaming", None, None, None, None), (512, 16, 496)),
        (("streaming", 100, None, None, None), (100, 16, 84)),
        (("streaming", None, 4, 30, None), (34, 4, 30)),
        (("streaming", 64, 4, 30, None), (64, 4, 30)),
        (("snapkv", None, None, None, None), (512, 16, 32)),
        (("chunks", 256, None, None, 6), (256, 18, 32)),
        (("tokens", 256, 0, 8, None), (256, 0, 8)),
    ],
    ids=str,
)
def test_sizes_that_were_not_given(options, sizes):
    view = sparse_view(*options)
    assert (view.budget, view.sink, view.window) == sizes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("some", None, None, None, None), "view must be streaming, snapkv, chunks or tokens"),
        (("snapkv", 40, None, None, None), r"at least sink \+ window \(48 tokens\), got 40"),
        (("streaming", 8, None, None, None), r"at least sink \+ window"),
        (("streaming", 20, 16, 8, None), r"at least sink \+ window \(24 tokens\), got 20"),
        (("tokens", 16, 8, 9, None), r"at least sink \+ window"),
        (("chunks", 50, None, None, None), r"sink \+ window \+ chunk \(56 tokens\)"),
        (("chunks", None, 12, None, 8), "sink must be a multiple of chunk"),
        (("chunks", None, None, None, 0), "chunk must be"),
        (("tokens", None, None, None, 8), "chunk shapes view=chunks"),
        (("tokens", None, -1, None, None), "sink must be a whole number"),
        (("tokens", None, None, 0, None), "window must be a whole number of at least 1"),
        (("streaming", "512", None, None, None), "budget must be a whole number"),
        (("snapkv", 512.0, None, None, None), "budget must be a whole number"),
        (("snapkv", True, None, None, None), "budget must be a whole number"),
    ],
    ids=str,
)
def test_sizes_that_make_no_view(options, says):
    with pytest.raises(ValueError, match=says):
        sparse_view(*options)
