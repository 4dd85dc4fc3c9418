"""The entries of a view: ascending, with sink and window, never more than its capacity."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.views.scorers import REDUCTIONS, SCORERS
from longdraft.views.view import View


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@given(
    scorer=st.sampled_from(list(SCORERS)),
    reduction=st.sampled_from(REDUCTIONS),
    chunk=st.integers(1, 5),
    sink_chunks=st.integers(0, 3),
    window=st.integers(1, 9),
    chosen=st.integers(0, 30),
    length=st.integers(1, 110),
    shared=st.booleans(),
    told=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sink_window_and_whole_chunks_between(
    scorer, reduction, chunk, sink_chunks, window, chosen, length, shared, told, seed
):
    view = View(scorer, chosen, chunk * sink_chunks, window, chunk, 0, reduction, shared)
    keys, queries = random(2, length, 4, seed=seed), random(4, 3, 4, seed=seed + 1)
    rows = view.select_kv_indices(keys, queries if told else None)
    start = view.window_start(length)
    assert rows.shape[0] == (1 if shared else 2) and rows.shape[1] <= view.capacity - view.max_new
    sink = min(view.sink, length)
    for head in rows.tolist():
        assert head == sorted(set(head)) and head[-1] == length - 1
        assert set(range(sink)) | set(range(max(0, length - window), length)) <= set(head)
        inner = head[sink : len(head) - (length - start)]
        assert head[len(head) - (length - start) :] == list(range(start, length))
        assert inner == [row + i for row in inner[::chunk] for i in range(chunk)]
        assert all(row % chunk == 0 for row in inner[::chunk])
        between = (start - sink) // chunk if start > sink else 0
        assert len(inner) == chunk * min(0 if scorer == "streaming" else chosen // chunk, between)
        if not told:
            assert inner == list(range(start - len(inner), start))  # the latest
    if length <= view.sink + view.window or (length <= view.size and chosen % chunk == 0 and scorer != "streaming"):
        assert rows[0].tolist() == list(range(length))


def test_a_view_that_grows_selects_a_share_of_the_context():
    view = View("mean-key", 64, 4, 8, 4, min_selected=16)
    assert view.size == 28 and view.capacity == 4 + 64 + 8 + 3
    lengths, queries = (60, 128, 320, 640, 2000), random(4, 3, 4)
    selected = [view.select_kv_indices(random(2, n, 4), queries).shape[1] - 12 for n in lengths]
    assert selected == [16, 16, 40, 64, 64]
