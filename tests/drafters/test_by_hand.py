"""What an engine may tell a drafter that reads its target's rows: it drafts as its definition says all the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longdraft import Speculator
from longdraft.engine.sequence import Sequence
from tests.drafters.by_hand import Decoding
from tests.drafters.test_definitions import target
from tests.support import definitions as said
from tests.support.definitions import weights_of
from tests.support.drafts import random_draft, random_eagle3
from tests.support.events import prefill_event, query_event, rewrite_event
from tests.support.forwards import forward
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
MAKE = {"eagle3": random_eagle3, "longspec": random_draft}
TREES = {"eagle3": {"tree": "dynamic", "depth": 2, "top_k": 3}, "longspec": {"widths": (2, 3)}}
RETRIEVAL = {"retrieval": True, "chunk": 2, "chunks": 4, "every": 2, "sink": 2, "recent": 4}
TEXT = [i % 11 for i in range(0, 50, 2)]


def decoding(
    folder: Any, kind: str, text: list[int] = TEXT, prompt: int = 12, options: Any = None, **settings: Any
) -> Decoding:
    model = target() if kind != "longspec" else target(layers=3)
    folder = MAKE[kind](folder / kind, model, **settings)
    spec = Speculator(folder, target=model, **TREES[kind], **(options or {}))
    if kind == "longspec":
        exact, weights = copy.deepcopy(model).double(), weights_of(folder, torch.float64)
        return Decoding(spec, text, prompt, lambda *rows: said.longspec(exact, weights, 8, None, *rows))
    window = None if options else settings.get("window")
    return Decoding(spec, text, prompt, lambda *seen: said.eagle3(model, spec.draft(), window, *seen))


@pytest.fixture(params=[None, 8, "covering"], ids=str)
def there(request, tmp_path) -> Decoding:
    """One with retrieval too, whose working cache always holds the whole text."""
    if request.param == "covering":
        return decoding(tmp_path, "eagle3", options=RETRIEVAL | {"chunks": 30}, head_dim=16)
    return decoding(tmp_path, "eagle3", window=request.param, head_dim=16)


@pytest.mark.usefixtures("small_chunks")
def test_many_rows_at_once_and_refreshed_ones_are_read_again(there):
    """The last rows were inexact when the drafter read them, as after a partial verification."""
    there.check()
    there.go_on(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
    there.check()
    there.go_on(3, 1, 4, 1, 5)
    start = there.draft_from_inexact_rows(5)
    there.store.lengths[0] = start + 5
    there.drafter.observe(rewrite_event(there.s, start))
    there.check()


# --- retrieval ---


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {}), ("eagle3", {"settings": {"rope_factor": 4.0, "rope_original_length": 16}}),
        ("eagle3", {"window": 40}),
    ],
    ids=str,
)  # fmt: skip
def test_retrieved_rows_are_seen_as_if_they_stood_together(tmp_path, kind, settings):
    """Gathered with an offset, turned by a wrong angle, or one row off, a key would show."""
    there = decoding(tmp_path, kind, [i % 11 for i in range(0, 120, 2)], 40, RETRIEVAL, **settings)
    s, retrieval, cache = there.s, there.drafter.retrieval, there.drafter.cache

    def gathered() -> list[int]:
        """The rows that are seen now: new ones stand behind what is gathered."""
        end = len(s.tokens) - 1
        new = min(end - cache.context_len(0), cache.max_new_entries)
        return [*retrieval.kv_indices(0, end - new).tolist(), *range(end - new, end)]

    there.check(gathered())  # nothing scored: the latest chunks
    there.go_on(2)
    chosen, layer = [], there.runner.num_layers - 1
    for _ in range(3):
        for _ in range(RETRIEVAL["every"]):
            there.drafter.observe(query_event(s, {layer: 9 * torch.randn(6, 16)}))
        chosen.append(retrieval.selected_chunks(0))
        seen = gathered()
        assert len(seen) < len(s.tokens) - 10
        for token in (3, 1, 4):
            there.check(seen)
            seen.append(len(s.tokens) - 1)
            there.go_on(token)
    assert chosen[0] != chosen[1] != chosen[2]
    # What was gathered from inexact rows is gathered again.
    start = there.draft_from_inexact_rows(5)
    there.store.lengths[0] = start + 5
    there.go_on(2)
    there.drafter.observe(rewrite_event(s, start))
    there.check(gathered())


def test_the_room_of_a_window_decides_how_much_is_retrieved(tmp_path):
    def retrieved(folder: Any, **options: Any) -> Any:
        spec = Speculator(folder, target=target(), retrieval=True, **options)
        return spec.recipe().drafter().retrieval.view.num_chunks

    bounded = random_eagle3(tmp_path / "bounded", target(), window=512)
    unbounded = random_eagle3(tmp_path / "unbounded", target())
    assert retrieved(bounded) == 8 and retrieved(bounded, depth=2, sink=0, recent=32, chunk=16) == 27
    assert retrieved(unbounded) == 64
    assert retrieved(bounded, chunks=64) == 64  # more than fits: the draft warns when it drafts
    for folder, options in ((bounded, {"recent": 512}), (unbounded, {"window": 64})):
        with pytest.raises(ValueError, match=r"chunks|sink|window"):
            retrieved(folder, **options)


# --- memory and work ---


@pytest.mark.parametrize("kind", MAKE)
def test_windows_bound_the_memory(tmp_path, kind):
    sizes = set()
    for length in (60, 200):
        there = decoding(tmp_path / f"{length}", kind, [i % 11 for i in range(length)], length - 1, window=16)
        there.drafter.propose([there.s])
        sizes.add(there.drafter.cache.store.keys.numel())
    assert len(sizes) == 1


def test_prefill_reads_the_last_window_alone(tmp_path):
    model = tiny_model(context=1024)
    folder, rows = random_draft(tmp_path / "draft", model, window=16), []

    def count(module: Any, given: Any, out: Any) -> None:
        if given[0].dim() == 1:  # the target embeds (B, T) ids, the draft a flat list
            rows.append(len(given[0]))

    model.get_input_embeddings().register_forward_hook(count)
    spec = Speculator(folder, target=model, widths=(2, 4, 4))
    drafter, store = spec.recipe().drafter(), spec.runner().new_store(1, 960)
    drafter.bind(spec.runner(), store)
    s = Sequence(0, [i % 61 for i in range(900)], 20)
    forward(spec.runner(), [s.prompt], store, [0], logits="none")
    store.commit(0, range(900))
    s.append(5)
    rows.clear()
    drafter.observe(prefill_event(s))
    drafter.propose([s])
    assert rows == [16, 1, 2, 4]  # the window; then the root and each level that is expanded


# --- what is said once, and what is refused ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"widths": (2,) * 8}), ("eagle3", {"depth": 8}), ("eagle3", {"window": 3, "depth": 3}),
        ("eagle3", {"tree": "beam", "depth": 3}), ("eagle3", {"tree": "dynamic", "widths": (2,)}),
        ("longspec", {"widths": (2,) * 8}),
    ],
    ids=str,
)  # fmt: skip
def test_trees_that_make_no_sense_are_refused(tmp_path, kind, options):
    folder = MAKE[kind](tmp_path / "draft", target(), window=8)
    with pytest.raises(ValueError, match=r"widths|nodes|window|depth|top_k|tree|levels"):
        Speculator(folder, target=target(), **options)


@pytest.mark.parametrize(
    ("settings", "options", "new", "said"),
    [
        ({"trained_length": 20, "rope_original_length": 20}, {"window": 12}, 18, 0),
        ({"trained_length": 20, "rope_original_length": 20}, {}, 18, 1),
        ({"trained_length": 30, "rope_original_length": 30}, RETRIEVAL | {"depth": 2}, 40, 0),
        ({"trained_length": 30, "rope_original_length": 30}, RETRIEVAL | {"depth": 2, "chunks": 12}, 40, 1),
    ],
)
def test_texts_beyond_the_trained_length_are_mentioned_once(tmp_path, caplog, settings, options, new, said):
    folder = random_eagle3(tmp_path / "draft", target(), settings=settings)
    Speculator(folder, target=target(), **options).generate([[1, 2, 3], [4, 4]], max_new_tokens=new)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == said
