"""Prompts on disk: there after a restart, bounded, and never damaged."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.memory import snapshot
from longdraft.serve import prefixes
from tests.serve.kept_texts import HEAD, NEW, OLD, POINTS, ROW, Texts, files

TEXT = list(range(100))


def kept(folder: Path, *texts: list[int]) -> Path:
    """A folder with a file a text, all but the last one older."""
    cache = Texts(folder)
    for text in texts:
        cache.read(text)
        assert cache.keep_all() == 1
    return files(folder)[0]


# --- what is read ---


def test_a_prompt_is_there_after_a_restart(tmp_path):
    kept(tmp_path, TEXT)
    assert Texts(tmp_path).read([*TEXT[:60], 7, 7]) == 60
    assert Texts(tmp_path).read([7, *TEXT]) == 0


def test_the_last_token_is_read_again_and_only_whole_pieces_are_not(tmp_path):
    kept(tmp_path, TEXT)
    assert Texts(tmp_path).read(TEXT) == 99
    assert Texts(tmp_path).read([*TEXT[:60], 7], piece=25) == 50


def test_no_more_of_a_file_is_read_than_is_shared(tmp_path):
    """So that the file of a long text serves slots with room for short ones."""
    kept(tmp_path, TEXT)
    assert Texts(tmp_path, rows=20).read([*TEXT[:15], 7]) == 15


def test_a_file_is_not_read_for_what_slots_have_too(tmp_path, monkeypatch):
    cache = Texts(tmp_path)
    cache.read(TEXT)
    cache.keep_all()
    monkeypatch.setattr(snapshot, "load", None)
    assert cache.read([*TEXT[:60], 7], slot=1) == 60  # from slot 0
    assert cache.read([*TEXT[:63], 7], slot=0) == 63
    assert cache.read([*TEXT[:66], 7], slot=0) == 63  # three tokens are not worth reading a file
    monkeypatch.undo()
    assert cache.read([*TEXT[:80], 7], slot=0) == 80


def test_the_file_that_has_most_of_it_is_read(tmp_path):
    kept(tmp_path, TEXT[:20], [*TEXT[:50], 8, 8, 8, 8], [*TEXT[:30], 9, 9, 9, 9])
    assert Texts(tmp_path).read([*TEXT, 7]) == 50


# --- what is written ---


def test_one_text_at_a_time_the_longest_first(tmp_path):
    cache = Texts(tmp_path, slots=3)
    for slot, n in enumerate((20, 40, 30)):
        cache.read([slot, *range(n)], slot)
    found = []
    while cache.keep():
        found.append(sum(map(snapshot.token_count, files(tmp_path))))
    assert found == [41, 41 + 31, 41 + 31 + 21] and not cache.keep()


def test_what_is_on_disk_already_or_short_is_not_written(tmp_path):
    cache = Texts(tmp_path, slots=4)
    for slot, text in enumerate((TEXT, TEXT[:30], [*TEXT[:50], 7, 7, 7], [1, 2, 3])):
        cache.read(text, slot)
    assert cache.keep_all() == 1
    assert Texts(tmp_path).keep_all() == 0  # nor where nothing was decoded


def test_a_longer_text_takes_the_place_of_its_beginning(tmp_path):
    kept(tmp_path, TEXT[:20], [*TEXT[:30], 7, 7, 7, 7], TEXT[:60], TEXT)
    assert sorted(map(snapshot.token_count, files(tmp_path))) == [34, 100]


def test_a_text_that_is_being_decoded_is_left_alone(tmp_path):
    cache = Texts(tmp_path)
    cache.read(TEXT)
    cache.store.commit(0, range(3))
    assert not cache.keep()


# --- bounds ---


def test_the_text_not_used_for_longest_goes(tmp_path):
    texts = [[i, *TEXT[:59]] for i in range(4)]
    most = 3 * (60 * ROW + HEAD)
    cache = Texts(tmp_path, most)
    for text in texts[:3]:
        cache.read(text)
        cache.keep_all()
    cache.read(texts[2])
    Texts(tmp_path).read(texts[0])  # by another start, and so the second is the oldest one
    cache = Texts(tmp_path, most)
    cache.read(texts[3])
    cache.keep_all()
    assert [Texts(tmp_path).read(text) for text in texts] == [59, 0, 59, 59]


def test_a_text_in_use_in_its_slot_is_used_on_disk_too(tmp_path):
    cache = Texts(tmp_path, 2 * (60 * ROW + HEAD))
    for i, slot in ((0, 0), (1, 1)):
        cache.read([i, *TEXT[:59]], slot)
        cache.keep()
    cache.read([0, *TEXT[:59]], 0)
    cache.read([2, *TEXT[:59]], 1)
    cache.keep()
    assert [Texts(tmp_path).read([i, *TEXT[:59]]) for i in range(3)] == [59, 0, 59]


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 90), st.integers(0, 2), st.booleans()), max_size=12),
)
def test_slots_hold_their_prompts_and_files_what_they_may_whatever_comes(tmp_path_factory, most, asked):
    folder, most = tmp_path_factory.mktemp("kept"), most * 1000 + HEAD
    save = snapshot.save

    def bounded(store, slot, tokens, target, path):
        """There is room before anything is written."""
        assert sum(f.stat().st_size for f in files(folder)) + len(tokens) * ROW <= most
        save(store, slot, tokens, target, path)

    cache = Texts(folder, most, slots=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "save", bounded)
        for family, length, slot, restarts in asked:
            cache.read([min(x, 30 * family) for x in TEXT[:length]], slot)  # which checks what is held
            cache.keep()
            assert sum(f.stat().st_size for f in files(folder)) <= most
            if restarts:
                cache = Texts(folder, most, slots=3)


def test_a_text_that_is_larger_than_all_may_be_is_not_kept_and_shorter_ones_are(tmp_path, caplog):
    cache = Texts(tmp_path, 40 * ROW + HEAD)
    cache.read(TEXT, 0)
    cache.read([7, *TEXT[:30]], 1)
    assert cache.keep_all() == 1 and not cache.keep()
    assert [snapshot.token_count(f) for f in files(tmp_path)] == [31]
    assert caplog.text.count("more than all snapshots may") == 1


# --- disks that are full, files that are not as they should be ---


def test_a_full_disk_is_said_once_and_nothing_is_lost(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prefixes, "_PAUSE", 0.0)
    cache = Texts(tmp_path, 2 * (60 * ROW + HEAD))
    for text in (TEXT[:20], [7, *TEXT[:59]]):
        cache.read(text)
        cache.keep()
    before = files(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        for text in (TEXT, [8, *TEXT]):
            cache.read(text)
            assert not cache.keep()
            assert files(tmp_path) == before and cache.read([*text, 1]) == len(text)
    assert caplog.text.count("not kept") == 1
    assert cache.keep()  # there is room again


def test_writing_that_fails_leaves_nothing_behind_but_what_was_there(tmp_path, caplog):
    """By a limit of the system for files; after that nothing is tried for a while."""
    resource = pytest.importorskip("resource")
    cache = Texts(tmp_path)
    cache.read(TEXT[:20])
    cache.keep()
    before = files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    cache.read(TEXT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        assert not cache.keep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Could not write" in caplog.text
    assert [*tmp_path.iterdir()] == before and not cache.keep()
    assert Texts(tmp_path).read(TEXT) == 20


@pytest.mark.parametrize("end", [0, 5, 50, 1000, -1])
def test_damaged_files_are_deleted_and_said(tmp_path, caplog, end):
    file = kept(tmp_path, TEXT)
    file.write_bytes(file.read_bytes()[:end])
    assert Texts(tmp_path).read(TEXT) == 0
    assert not files(tmp_path) and "damaged" in caplog.text


def test_files_that_are_no_snapshots_are_damaged_or_somebody_elses(tmp_path):
    file = kept(tmp_path, TEXT)
    file.write_bytes(b"nonsense" * 100)
    other = tmp_path / "other.kv.safetensors"
    save_file({}, other, metadata={"format": "other"})
    assert Texts(tmp_path).read(TEXT) == 0
    assert files(tmp_path) == [other]


@pytest.mark.parametrize("end", [-1, 0, None])
def test_a_file_that_is_damaged_or_gone_after_the_start_is_not_used(tmp_path, caplog, end):
    file = kept(tmp_path, TEXT)
    cache = Texts(tmp_path)
    cache.read([*TEXT[:10], 9])
    whole = file.read_bytes()
    file.unlink() if end is None else file.write_bytes(whole[:end])
    assert cache.read([*TEXT, 7]) == 0  # the ten of the slot are lost: it could have been overwritten
    assert not files(tmp_path) and "snapshot" in caplog.text


def test_a_file_that_may_not_be_read_is_left_alone(tmp_path, caplog, monkeypatch):
    file = kept(tmp_path, TEXT)

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot, "head", forbidden)
    assert Texts(tmp_path).read(TEXT) == 0
    assert files(tmp_path) == [file] and "Permission denied" in caplog.text


def test_targets_share_a_folder_and_its_bytes_and_no_files(tmp_path):
    most = 2 * (60 * ROW + HEAD)
    for target in ("one", "two"):
        cache = Texts(tmp_path, most, target=target)
        assert cache.read(TEXT[:60]) == 0
        cache.keep_all()
    assert [Texts(tmp_path, target=target).read(TEXT[:60]) for target in ("one", "two")] == [59, 59]
    cache.read([7, *TEXT[:59]])
    cache.keep_all()
    assert [Texts(tmp_path, target=target).read(TEXT[:60]) for target in ("one", "two")] == [0, 59]


def test_hidden_states_that_are_wanted_come_with_a_file_or_it_is_not_read(tmp_path):
    kept(tmp_path, TEXT)
    cache = Texts(tmp_path, layers=(1, 2))
    assert cache.read(TEXT) == 0
    assert cache.keep_all() == 1 and len(files(tmp_path)) == 1  # the one with more in it
    assert Texts(tmp_path, layers=(1, 2)).read(TEXT) == 99
    assert Texts(tmp_path).read(TEXT) == 99
    assert Texts(tmp_path, layers=(0, 2)).read(TEXT) == 0


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be kept in"):
        Texts(tmp_path / "file" / "folder")


# --- kill -9 ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_leaves_no_damaged_file_in_use(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    subprocess.run(
        [sys.executable, "-m", "tests.serve.kept_texts", str(tmp_path)],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    for point in POINTS:
        cache = Texts(tmp_path / point)
        assert not list((tmp_path / point).glob("*.part")), point
        assert cache.read(OLD) == 39, point
        assert cache.read(NEW) == (119 if point == "with its name" else 60), point
    assert not caplog.text  # and none was damaged: renaming is the last thing
