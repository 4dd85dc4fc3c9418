"""Snapshots on disk: what replaces them, and what is refused; damage is tried in tests/exact/outside."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.memory import snapshot
from longdraft.memory.store import KVShape, KVStore

TOKENS = [5, 3, 8, 8, 1]


def store(slots: int = 3, capacity: int = 16) -> KVStore:
    """A store of random numbers; slot 1 holds five committed entries."""
    made = KVStore(KVShape(2, 3, 4, torch.float32), slots, capacity)
    for tensor in (made.keys, made.values):
        tensor.copy_(torch.randn(tensor.shape))
    made.lengths[1] = len(TOKENS)
    return made


def test_saving_replaces_an_older_snapshot_and_makes_the_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "kv"
    saved = store()
    with pytest.raises(ValueError, match="6 tokens for 5 committed entries"):
        snapshot.save(saved, 1, [*TOKENS, 1], "target", path)
    snapshot.save(saved, 1, TOKENS, "target", path)
    saved.truncate(1, 2)
    snapshot.save(saved, 1, TOKENS[:2], "target", path)
    assert len(snapshot.try_read_header(path).tokens) == 2
    assert [p.name for p in path.parent.iterdir()] == ["kv"]


# Content of the file, and what the refusal names.
REFUSED = {
    "another target's": (lambda path: snapshot.save(store(), 1, TOKENS, "the other", path), r"the other.*target"),
    "longer than the slot": (lambda path: snapshot.save(store(), 1, TOKENS, "target", path), "5 tokens.* 4"),
    "something else": (lambda path: save_file({"weight": torch.zeros(3)}, path), "is not a KV snapshot"),
    "cut short": (lambda path: path.write_bytes(b"\x08\0\0\0"), "kv"),
    "missing": (lambda path: None, "kv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_fit_is_refused_and_the_slot_stays_as_it_is(name, tmp_path):
    write, named = REFUSED[name]
    write(tmp_path / "kv")
    loaded = store(2, 4)
    loaded.lengths[1] = 3
    keys = loaded.keys.clone()
    with pytest.raises(CheckpointError, match=named):
        snapshot.load(loaded, 1, "target", tmp_path / "kv")
    assert loaded.lengths == [0, 3] and torch.equal(loaded.keys, keys)


@pytest.mark.parametrize(
    ("fault", "raised"), [(OSError(28, "No space left"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_save_that_fails_leaves_the_older_snapshot_and_nothing_else(fault, raised, tmp_path, monkeypatch):
    path = tmp_path / "kv"
    snapshot.save(store(), 1, TOKENS, "target", path)
    before = path.read_bytes()

    def fail(tensors, filename, metadata=None):
        filename.write_bytes(b"half of it")
        raise fault

    monkeypatch.setattr(snapshot, "save_file", fail)
    with pytest.raises(raised):
        snapshot.save(store(), 1, TOKENS, "target", path)
    assert [p.name for p in tmp_path.iterdir()] == ["kv"] and path.read_bytes() == before
