"""Retrieval: selected chunks, times of selection, and invariants after any sequence of operations."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Speculator
from longdraft.drafters.shared.retrieval import RetrievalOptions, make_retrieval
from longdraft.errors import CheckpointError
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.views.retrieval import Retrieval
from longdraft.views.scorers import SCORERS
from tests.support.drafts import random_eagle3, small_lm
from tests.support.tiny import tiny_model

SHAPE = KVShape(2, 2, 8, torch.float32)
CHOOSING = [name for name, each in SCORERS.items() if each is not None]
SMALL = {"chunk": 4, "chunks": 3, "refresh": 3, "sink": 4, "recent": 8}


def filled(length: int, slots: int = 1, shape: KVShape = SHAPE, transposed: bool = False) -> KVStore:
    store = KVStore(shape, slots, 200, config=StoreConfig(transposed))
    store.keys.copy_(torch.randn(store.keys.shape))
    store.values.copy_(torch.randn(store.values.shape))
    store.lengths = [length] * slots
    return store


def peaked(store: KVStore, slot: int, *chunks: int, chunk: int = 4) -> torch.Tensor:
    """A query that attends to these chunks most, in this order."""
    query = torch.randn(4, store.shape.head_dim)
    for rank, c in enumerate(chunks):
        keys = query.view(2, 2, -1).sum(1) * (20 - 2 * rank) / 8
        store.keys[-1, slot, :, c * chunk : (c + 1) * chunk] = keys[:, None]
    return query


def look(retrieval: Retrieval, store: KVStore, slot: int, query: torch.Tensor) -> None:
    (layer,) = retrieval.scoring_layers(store.shape.layers)
    retrieval.observe(store, slot, {layer: query[:, None]})


# --- which ---


@pytest.mark.parametrize("transposed", [False, True])
def test_the_best_chunks_between_sink_and_recent_window_are_chosen(transposed):
    store, retrieval = filled(80, transposed=transposed), make_retrieval(**SMALL)
    # Chunk 0 is the sink, and 18 and 19 are recent: they are there anyway.
    look(retrieval, store, 0, peaked(store, 0, 0, 19, 13, 2, 18, 9))
    assert retrieval.selected_chunks(0) == [2, 9, 13]
    rows = retrieval.kv_indices(0, 80).tolist()
    assert rows == [*range(4), *range(8, 12), *range(36, 40), *range(52, 56), *range(72, 80)]


# --- when ---


def test_chunks_are_scored_at_the_interval():
    store, retrieval = filled(80), make_retrieval(**SMALL)
    assert retrieval.selected_chunks(0) is None
    versions = []
    for chunk in (2, 3, 4, 5, 6, 7):
        look(retrieval, store, 0, peaked(store, 0, chunk))
        versions.append((retrieval.selection_version(0), chunk in retrieval.selected_chunks(0)))
    first = versions[0][0]
    assert [v for v, _ in versions[:3]] == [first] * 3 and versions[0][1]
    assert [v for v, _ in versions[3:]] == [first + 1] * 3 and versions[3][1]
    # The same choice is no new version.
    retrieval, query = make_retrieval(**SMALL | {"refresh": 1}), peaked(store, 0, 3, 7, 8)
    for _ in range(2):
        look(retrieval, store, 0, query)
    version = retrieval.selection_version(0)
    look(retrieval, store, 0, query)
    assert retrieval.selection_version(0) == version
    retrieval.reset(0)  # another text in the slot
    assert retrieval.selection_version(0) > version and retrieval.selected_chunks(0) is None


# --- properties ---

sizes = st.fixed_dictionaries(
    {"chunk": st.integers(1, 5), "chunks": st.integers(1, 8), "sink": st.integers(0, 2), "recent": st.integers(1, 3)}
).filter(lambda s: s["chunks"] >= s["sink"] + s["recent"])
changes = st.lists(st.tuples(st.sampled_from(["read", "look", "reset"]), st.integers(1, 9)), max_size=25)


@given(sizes, st.integers(1, 60), changes, st.sampled_from(CHOOSING))
def test_kv_indices_are_ascending_and_within_the_context(given_sizes, length, events, scorer):
    chunk = given_sizes["chunk"]
    sink, recent = given_sizes["sink"] * chunk, given_sizes["recent"] * chunk
    torch.manual_seed(0)
    retrieval = make_retrieval(chunk, given_sizes["chunks"], 2, sink, recent, scorer=scorer)
    store = filled(length)
    for event, n in [("look", 1), *events]:
        length = store.lengths[0]
        if event == "read":
            store.lengths[0] = min(length + n, 150)
        elif event == "reset":
            retrieval.reset(0)
        else:
            look(retrieval, store, 0, torch.randn(4, 8))
        length = store.lengths[0]
        rows = retrieval.kv_indices(0, length).tolist()
        assert rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] == length - 1
        assert set(range(min(sink, length))) <= set(rows) and set(range(max(0, length - recent), length)) <= set(rows)
        assert len(rows) <= retrieval.view.capacity - retrieval.view.max_new
        chosen = retrieval.selected_chunks(0)
        for c in chosen or ():
            assert set(range(c * chunk, (c + 1) * chunk)) <= set(rows)
        if length <= sink + recent + given_sizes["chunks"] * chunk:
            assert rows == list(range(length))
        elif chosen is None:
            assert rows[sink:] == list(range(length - len(rows) + sink, length))  # the latest
            assert len(rows) >= sink + recent + given_sizes["chunks"] * chunk


# --- options ---


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (lambda: RetrievalOptions(chunks=3, refresh=2).build(object()), "retrieval=True"),
        (lambda: make_retrieval(**SMALL, layer=30).scoring_layers(30), "30"),
    ],
)
def test_sizes_that_make_no_retrieval_are_refused(made, word):
    with pytest.raises(ValueError, match=word):
        made()


# --- whose attention ranks ---


def test_chunks_are_ranked_by_the_layer_that_was_asked_for():
    store = filled(80)
    store.keys.zero_()
    last = peaked(store, 0, 3, 13, 14)  # of the last layer alone
    first = store.keys[0]
    first.copy_(store.keys[1].roll(16, dims=2))  # the first one's peaks lie four chunks further on
    for layer, chosen in ((None, [3, 13, 14]), (1, [3, 13, 14]), (0, [7])):
        retrieval = make_retrieval(**SMALL, layer=layer)
        look(retrieval, store, 0, last)
        assert set(chosen) <= set(retrieval.selected_chunks(0))


@pytest.mark.parametrize("method", ["eagle3", "specextend"])
def test_a_folder_may_name_the_layer(tmp_path, method):
    model = tiny_model(vocab=11, layers=6)
    folder = random_eagle3(tmp_path, model) if method == "eagle3" else small_lm(tmp_path, 11)
    sizes = SMALL | ({} if method == "specextend" else {"retrieval": True})
    file = folder / "config.json"
    config = json.loads(file.read_text())

    def layers(**options):
        spec = Speculator(method, target=model, draft=folder, **sizes, **options)
        assert len(spec.generate([list(range(11)) * 6], max_new_tokens=4)[0].token_ids) == 4
        return spec.recipe().drafter().needs(spec.runner()).query_layers

    assert layers() == (5,) and layers(layer=2) == (2,)
    file.write_text(json.dumps(config | {"retrieval_layer": 3}))
    assert layers() == (3,) and layers(layer=2) == (2,)
    for wrong in (-1, "last", 2.5):
        file.write_text(json.dumps(config | {"retrieval_layer": wrong}))
        with pytest.raises(CheckpointError):
            layers()
