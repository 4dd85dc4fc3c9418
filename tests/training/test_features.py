"""The target's features, against transformers itself; the cache on disk."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.training import features
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from tests.support.tiny import FAMILIES, tiny_model

LAYERS = (0, 2)


def document(length: int, start: int, seed: int, begin: list[int] | None = None) -> Document:
    g = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, 61, (length,), generator=g).tolist()
    return Document((begin or []) + token_ids[len(begin or []) :], start)


def reader(layers: tuple[int, ...] | None = (), dtype: torch.dtype = torch.float32, last: bool = False, *cache):
    return FeatureReader(TargetRunner(tiny_model()), dtype, layers, last, *cache)


@pytest.mark.parametrize(
    ("family", "start", "offset"),
    zip(cycle(FAMILIES), (1, 1, 17, 17, 39), (0, 100, 0, 100, 3), strict=False),
)
def test_features_are_the_models_own(family, start, offset, monkeypatch):
    monkeypatch.setattr(features, "PREFILL_CHUNK", 16)  # several forwards
    model = tiny_model(family)
    text = document(40, start, 1)
    by_kv, by_hidden = (FeatureReader(TargetRunner(model), torch.float32, x, with_last=True) for x in ((), LAYERS))
    found, hidden = by_kv.read(text, offset), by_hidden.read(text, offset).hidden
    assert by_kv.tensor_names == ("keys", "values", "last") and by_hidden.tensor_names == (
        "hidden",
    )  # which ends with it
    positions = torch.tensor([p if p < 4 else p + offset for p in range(40)])
    assert torch.equal(found.positions, positions)
    between = []  # the last entry of hidden_states is normed, so the layers are asked themselves
    hooks = [model.model.layers[i].register_forward_hook(lambda m, a, o: between.append(o)) for i in LAYERS]
    with torch.no_grad():
        out = model(torch.tensor([text.token_ids]), position_ids=positions[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    last = out.past_key_values.layers[-1]
    torch.testing.assert_close(found.keys, last.keys[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.values, last.values[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(hidden, torch.cat([o[0] for o in between], -1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.last, between[-1][0], rtol=1e-3, atol=1e-4)
    assert torch.equal(found.target_argmax, out.logits[0, start - 1 : -1].argmax(-1))
    labels = torch.tensor(text.token_ids[start:])
    own_loss = torch.nn.functional.cross_entropy(out.logits[0, start - 1 : -1].float(), labels)
    assert by_kv.target_loss(text, offset) == pytest.approx(float(own_loss), rel=1e-4)


TEXTS = [document(20 + i, 1 + 5 * (i % 3), i) for i in range(6)]


@pytest.fixture
def cached(tmp_path):
    def make(documents=TEXTS, identity="a target", layers=(), dtype=torch.float32, last=False, offset=0):
        made = reader(layers, dtype, last, tmp_path / "c", identity)
        return [made.read(each, offset) for each in documents]

    return make


def files(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*.safetensors")}


@pytest.mark.parametrize(("layers", "dtype"), [((), torch.float32), (LAYERS, torch.bfloat16), (None, torch.float32)])
def test_from_disk_as_live_to_the_bit(cached, tmp_path, forwards, layers, dtype):
    written = cached(layers=layers, dtype=dtype, last=True)
    forwards.clear()
    stored = cached(layers=layers, dtype=dtype, last=True)
    assert not forwards and len(files(tmp_path)) == 6
    live = reader(layers, dtype, True)
    for i, pair in enumerate(zip(written, stored, strict=True)):
        computed = live.read(TEXTS[i])
        for found in pair:
            assert torch.equal(found.token_ids, computed.token_ids) and (found.start, found.offset) == (
                computed.start,
                0,
            )
            assert found.tensors.keys() == computed.tensors.keys() and torch.equal(
                found.target_argmax, computed.target_argmax
            )
            assert all(torch.equal(tensors, computed.tensors[name]) for name, tensors in found.tensors.items())


@pytest.mark.parametrize(
    "other",
    [{"identity": "another"}, {"last": True}, {"layers": LAYERS}, {"layers": (1, 2)},
     {"documents": [Document([(t + 1) % 61 for t in d.token_ids], d.start) for d in TEXTS]},
     {"documents": [Document(d.token_ids, d.start + 1) for d in TEXTS]}],
)  # fmt: skip
def test_others_features_lie_beside(cached, tmp_path, other):
    if other == {"layers": (1, 2)}:
        cached(layers=LAYERS)
    else:
        cached()
    before = files(tmp_path)
    cached(**other)
    after = files(tmp_path)
    assert len(after) == 12 and before.items() <= after.items()


def test_a_text_has_one_file_for_all_offsets(cached, tmp_path):
    cached()
    before = files(tmp_path)
    assert [found.offset for found in cached(offset=4)] == [4] * 6
    assert files(tmp_path) == before


def test_a_damaged_file(cached, tmp_path):
    cached()
    path = next(iter(files(tmp_path)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=path.name):
        cached()
    path.unlink()
    cached()
