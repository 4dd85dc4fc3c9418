"""Snapshots on disk: what replaces them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.memory import snapshot
from longdraft.memory.store import KVShape, KVStore

TOKENS = [5, 3, 8, 8, 1]


def store(slots: int = 3, capacity: int = 16) -> KVStore:
    """Random numbers in every row; slot 1 holds five committed rows."""
    made = KVStore(KVShape(2, 3, 4, torch.float32), slots, capacity)
    for tensor in (made.keys, made.values):
        tensor.copy_(torch.randn(tensor.shape))
    made.lengths[1] = len(TOKENS)
    return made


def test_saving_replaces_an_older_snapshot_and_makes_the_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "kv"
    saved = store()
    snapshot.save(saved, 1, TOKENS, "target", path)
    saved.truncate(1, 2)
    snapshot.save(saved, 1, TOKENS[:2], "target", path)
    assert len(snapshot.known(path).tokens) == 2
    assert [p.name for p in path.parent.iterdir()] == ["kv"]


def test_tokens_that_are_not_one_a_row_are_refused(tmp_path):
    with pytest.raises(ValueError, match="4 tokens for 5 committed rows"):
        snapshot.save(store(), 1, TOKENS[:4], "target", tmp_path / "kv")


def other_target(path):
    snapshot.save(store(), 1, TOKENS, "the other", path)


def longer_than_the_slot(path):
    snapshot.save(store(), 1, TOKENS, "target", path)


def something_else(path):
    save_file({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (other_target, r"another target \(the other; this one is target\)"),
        (longer_than_the_slot, "holds 5 tokens, the slot has room for 4"),
        (something_else, "is not a KV snapshot"),
        (lambda path: None, "Could not read the snapshot"),
    ],
    ids=["another target's", "longer than the slot", "something else", "missing"],
)
def test_a_file_that_does_not_fit_is_refused_and_the_slot_stays_as_it_is(write, message, tmp_path):
    write(tmp_path / "kv")
    loaded = store(2, 4)
    loaded.lengths[1] = 3
    keys = loaded.keys.clone()
    with pytest.raises(CheckpointError, match=message):
        snapshot.load(loaded, 1, "target", tmp_path / "kv")
    assert loaded.lengths == [0, 3] and torch.equal(loaded.keys, keys)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "kv"
    snapshot.save(store(), 1, TOKENS, "target", path)
    path.write_bytes(path.read_bytes()[:keep])
    loaded = store()
    with pytest.raises(CheckpointError):
        snapshot.load(loaded, 0, "target", path)
    assert loaded.lengths == [0, 5, 0]
    assert snapshot.known(path) is None


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
    with pytest.raises(raised, match=r"\(1000 bytes\)" if raised is CheckpointError else None):
        snapshot.save(store(), 1, TOKENS, "target", path)
    assert [p.name for p in tmp_path.iterdir()] == ["kv"] and path.read_bytes() == before
