"""The target's features, against transformers itself; the cache on disk."""

from __future__ import annotations

import json

import pytest
import torch

from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.training import corpus, feature_cache, features
from longdraft.training.documents import Document
from longdraft.training.feature_cache import FeatureCache, bytes_needed
from longdraft.training.features import FeatureReader, LiveFeatures, anchor_offset
from tests.tiny import FAMILIES, tiny_model

LAYERS = (0, 2)


def document(length: int, start: int, seed: int, begin: list[int] | None = None) -> Document:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (length,), generator=g).tolist()
    return Document((begin or []) + tokens[len(begin or []) :], start)


def reader(layers: tuple[int, ...] | None = (), dtype: torch.dtype = torch.float32, last: bool = False):
    return FeatureReader(TargetRunner(tiny_model()), dtype, layers, last=last)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("start", "offset"), [(1, 0), (1, 100), (17, 0), (17, 100), (39, 3)])
def test_features_are_the_models_own(family, start, offset, monkeypatch):
    monkeypatch.setattr(features, "CHUNK", 16)  # several forwards
    model = tiny_model(family)
    text = document(40, start, 1)
    by_kv, by_hidden = (FeatureReader(TargetRunner(model), torch.float32, x, last=True) for x in ((), LAYERS))
    found, hidden = by_kv.read(text, offset), by_hidden.read(text, offset).hidden
    assert by_kv.names == ("keys", "values", "last") and by_hidden.names == ("hidden",)  # which ends with it
    positions = torch.tensor([p if p < 4 else p + offset for p in range(40)])
    assert torch.equal(found.positions, positions)
    between = []  # the last entry of hidden_states is normed, so the layers are asked themselves
    hooks = [model.model.layers[i].register_forward_hook(lambda m, a, o: between.append(o)) for i in LAYERS]
    with torch.no_grad():
        out = model(torch.tensor([text.tokens]), position_ids=positions[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    last = out.past_key_values.layers[-1]
    torch.testing.assert_close(found.keys, last.keys[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.values, last.values[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(hidden, torch.cat([o[0] for o in between], -1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.last, between[-1][0], rtol=1e-3, atol=1e-4)
    assert torch.equal(found.likeliest, out.logits[0, start - 1 : -1].argmax(-1))
    assert by_hidden.bytes_per_token == 2 * 48 * 4 and reader(None).bytes_per_token == 0


def test_offsets_leave_the_anchors_and_stay_in_the_context():
    assert anchor_offset(7, 10).tolist() == [0, 1, 2, 3, 14, 15, 16]
    assert anchor_offset(3, 10).tolist() == [0, 1, 2]
    found = corpus.offsets([n for n in (100, 400, 600) for _ in range(200)], 300, 512, 0)
    assert [max(found[i : i + 200]) for i in (0, 200, 400)] == pytest.approx([298, 110, 0], abs=2)


def test_what_documents_share_is_read_once_and_is_the_same(forwards):
    begin = document(20, 1, 0).tokens
    texts = [document(30, 22, i, begin) for i in range(3)] + [document(30, 5, 4, begin), document(12, 3, 5)]
    sharing = reader(last=True)
    for offset in (0, 50):
        for i, text in enumerate(texts):
            forwards.clear()
            shared = sharing.read(text, offset)
            assert sum(f.rows for f in forwards) == len(text.tokens) - {1: 20, 2: 20, 3: 4}.get(i, 0)
            fresh = reader(last=True).read(text, offset)
            for name in ("keys", "values", "last"):
                torch.testing.assert_close(getattr(shared, name), getattr(fresh, name), rtol=1e-3, atol=1e-4)
            assert torch.equal(shared.likeliest, fresh.likeliest)


def test_live_features_depend_on_nothing_that_was_read_before(forwards):
    """Or a run that was killed would differ from one that was not, in the last bits."""
    begin = document(20, 1, 0).tokens
    live = LiveFeatures(reader(last=True), [document(30, 22, i, begin) for i in range(2)], [0, 0])
    first, again = live[0], (live[1], live[0])[1]
    assert torch.equal(first.keys, again.keys) and torch.equal(first.last, again.last)
    assert sum(f.rows for f in forwards) == 3 * 30


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.setattr(feature_cache, "SHARD", 4)
    begin = document(9, 1, 99).tokens  # shared, so that a reader that remembers has something to reuse
    return [document(20 + i, 1 + 5 * (i % 3), i, begin) for i in range(10)]


@pytest.fixture
def cache(tmp_path, texts):
    def make(documents=texts, identity="a target", folder="cache", layers=(), dtype=torch.float32, last=False, **fill):
        offsets = [3] * len(documents)
        made = FeatureCache(tmp_path / folder, documents, offsets, {"target": identity}, reader(layers, dtype, last))
        made.prepare()
        return made, made.fill(**fill)

    return make


@pytest.mark.parametrize(("layers", "dtype"), [((), torch.float32), (LAYERS, torch.bfloat16), (None, torch.float32)])
def test_from_disk_as_live(cache, texts, tmp_path, layers, dtype):
    told = []
    cached, complete = cache(
        progress=lambda done, total: told.append((done, total)), layers=layers, dtype=dtype, last=True
    )
    assert complete
    total = sum(len(t.tokens) for t in texts)
    assert told[-1] == (total, total)
    live = LiveFeatures(reader(layers, dtype, True), texts, [3] * 10)
    close = {torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    for i in range(10):
        computed, stored = live[i], cached[i]
        assert torch.equal(stored.tokens, computed.tokens) and (stored.start, stored.offset) == (computed.start, 3)
        for name, rows in computed.rows.items():
            torch.testing.assert_close(stored.rows[name], rows, rtol=close, atol=close)
        assert torch.equal(stored.likeliest, computed.likeliest)
    size = sum(cached.path(s).stat().st_size for s in cached.shards)
    needed = bytes_needed(texts, live.reader.bytes_per_token)
    assert needed < size < needed + 1000 * len(cached.shards)
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert set(index) == {"target", "lengths", "starts", "offsets", "names"}


def test_stopped_between_shards_and_gone_on(cache):
    whole, _ = cache(folder="whole")
    count = iter(range(100))
    cut, complete = cache(stop=lambda: next(count) == 5)
    assert not complete and [cut.path(s).exists() for s in cut.shards] == [True, False, False]
    (cut.folder / "shard-00001.part").write_bytes(b"left by a kill")
    before = cut.path(0).stat().st_mtime_ns
    again, complete = cache()
    assert complete and again.path(0).stat().st_mtime_ns == before
    for s in whole.shards:
        assert again.path(s).read_bytes() == whole.path(s).read_bytes()


def test_processes_share_the_shards_out(cache):
    whole, _ = cache(folder="whole")
    cache(share=(1, 2))
    half, _ = cache(share=(0, 2))
    for s in whole.shards:
        assert half.path(s).read_bytes() == whole.path(s).read_bytes()


def test_other_documents_or_another_target_are_refused(cache, texts):
    cache()
    for change in ({"identity": "another"}, {"documents": texts[:-1]}, {"last": True}):
        with pytest.raises(CheckpointError):
            cache(**change)
    texts[5] = Document([(t + 1) % 61 for t in texts[5].tokens], texts[5].start)  # as long, but another
    with pytest.raises(CheckpointError):
        cache()


def test_damaged_files(cache, tmp_path):
    made, _ = cache()
    made.path(1).write_bytes(made.path(1).read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="shard-00001"):
        cache()
    with pytest.raises(CheckpointError, match="shard-00001"):
        made[5]
    made.path(1).unlink()
    assert len(cache()[0][5].tokens) == 25
    (tmp_path / "cache" / "index.json").write_text("{")
    with pytest.raises(CheckpointError):
        cache()


def test_a_disk_that_is_too_small(cache, tmp_path, free_disk):
    free_disk(10**4)
    with pytest.raises(CheckpointError):
        cache()
    assert list((tmp_path / "cache").iterdir()) == []
