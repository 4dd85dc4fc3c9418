"""The prompt cache on disk: it survives restarts, stays in its limit, and never uses damaged files.

No engine runs: the KV of a token is the token's id.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longdraft import LoadedModel
from longdraft.errors import CheckpointError
from longdraft.memory import snapshot
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.serve.disk_prompt_cache import DiskPromptCache
from longdraft.serve.service import make_service
from longdraft.serve.settings import ServerSettings
from tests.support import elsewhere
from tests.support.tiny import tiny_model, tiny_tokenizer

SHAPE = KVShape(2, 1, 4, torch.float32)
# Bytes of a snapshot: for each token (keys, values, id), and at most its header.
TOKEN_BYTES, HEADER_BYTES = SHAPE.bytes_per_token + 8, 1024
TEXT = list(range(100))


class DiskCache(DiskPromptCache):
    """An open cache with slots of 200 tokens and ``min_tokens=4``."""

    def __init__(
        self, folder: Path, max_bytes: int = 1 << 30, slots: int = 2, rows: int = 200, target: str = "target",
        layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(folder, target, max_bytes, 4)
        config = StoreConfig(feature_layers=layers, feature_size=3)
        self.open(lambda slots, rows: KVStore(SHAPE, slots, rows, config=config), slots, rows)

    def read(self, prompt: list[int], slot: int = 0, chunk_size: int = 1) -> int:
        """Prefills a prompt as an engine does. Returns how many of its tokens were cached."""
        cached = self.reuse_prefix(slot, prompt, chunk_size)
        store = self.store
        assert store is not None and store.lengths[slot] == cached
        new = torch.tensor(prompt[cached:], dtype=torch.float32)[:, None]
        for tensor in (store.keys, store.values):
            tensor[:, slot, :, cached : len(prompt)] = new
        if store.features is not None:
            store.features[slot, cached : len(prompt)] = new.expand(-1, store.features.shape[2])
        store.commit(slot, range(len(prompt) - cached))
        self.record_tokens(slot, prompt)
        assert self.held(slot) == prompt
        return cached

    def held(self, slot: int) -> list[int]:
        """The tokens whose KV a slot holds."""
        store = self.store
        assert store is not None
        found = [store.keys[0, slot, 0, :, 0], store.values[-1, slot, 0, :, -1]]
        found += [] if store.features is None else [store.features[slot, :, -1]]
        first, *others = ([int(x) for x in rows[: store.lengths[slot]]] for rows in found)
        assert all(other == first for other in others)
        return first

    def save_all(self) -> int:
        """Saves all slots. Returns the number of files written."""
        written = 0
        while self.save_next():
            written += 1
        return written


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def kept(folder: Path, *texts: list[int], **options) -> Path:
    """Writes a file for each text, in this order. Returns the path of one of them."""
    cache = DiskCache(folder, **options)
    for text in texts:
        cache.read(text)
        assert cache.save_all() == 1
    return files(folder)[0]


def sizes(folder: Path) -> list[int]:
    """Number of tokens of each file, sorted."""
    return sorted(map(length, files(folder)))


def length(file: Path) -> int:
    return len(snapshot.try_read_header(file).tokens)


def family(i: int) -> list[int]:
    """A text of 60 tokens."""
    return [i, *TEXT[:59]]


def room_for(texts: int) -> int:
    """Bytes of this many texts of 60 tokens."""
    return texts * (60 * TOKEN_BYTES + HEADER_BYTES)


# --- reading ---


@pytest.mark.parametrize(
    ("prompt", "chunk_size", "capacity", "reused"),
    [
        ([*TEXT[:60], 7, 7], 1, 200, 60),
        ([7, *TEXT], 1, 200, 0),
        (TEXT, 1, 200, 99),  # the last token is read again
        ([*TEXT[:60], 7], 25, 200, 50),  # only complete chunks are reused
        ([*TEXT[:15], 7], 1, 20, 15),  # a long text's file serves short slots
    ],
)
def test_a_prompt_survives_a_restart(tmp_path, prompt, chunk_size, capacity, reused):
    kept(tmp_path, TEXT)
    assert DiskCache(tmp_path, rows=capacity).read(prompt, chunk_size=chunk_size) == reused


# --- writing ---


def test_a_text_that_is_on_disk_short_or_being_decoded_is_not_written(tmp_path):
    cache = DiskCache(tmp_path, slots=4)
    for slot, text in enumerate((TEXT, TEXT[:30], [*TEXT[:50], 7, 7, 7], [1, 2, 3])):
        cache.read(text, slot)
    assert cache.save_all() == 1
    assert DiskCache(tmp_path).save_all() == 0  # nor is an empty slot
    cache.read([9, *TEXT])
    cache.store.commit(0, range(3))
    assert not cache.save_next()


# --- limits ---


def test_the_least_recently_used_text_is_deleted(tmp_path):
    kept(tmp_path, *map(family, range(3)), max_bytes=room_for(3))
    DiskCache(tmp_path).read(family(0))  # in another run, which makes the second one the oldest
    kept(tmp_path, family(3), max_bytes=room_for(3))
    assert [DiskCache(tmp_path).read(family(i)) for i in range(4)] == [59, 0, 59, 59]


@settings(max_examples=20)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 90), st.integers(0, 2), st.booleans()), max_size=12),
)
def test_slots_hold_their_prompts_and_files_stay_in_their_limit_whatever_comes(tmp_path_factory, max_bytes, requests):
    folder, max_bytes = tmp_path_factory.mktemp("kept"), max_bytes * 1000 + HEADER_BYTES
    save = snapshot.save

    def used():
        return sum(file.stat().st_size for file in files(folder))

    def bounded(store, slot, tokens, target, path, kind):
        """There is room before anything is written."""
        assert used() + len(tokens) * TOKEN_BYTES <= max_bytes
        save(store, slot, tokens, target, path, kind)

    cache = DiskCache(folder, max_bytes, slots=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "save", bounded)
        for family, length, slot, restarts in requests:
            cache.read([min(x, 30 * family) for x in TEXT[:length]], slot)  # compares what the slot holds
            cache.save_next()
            assert used() <= max_bytes
            if restarts:
                cache = DiskCache(folder, max_bytes, slots=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int4], ids=str)
def test_rounded_kv_takes_the_room_on_disk_that_it_takes_in_memory(dtype, tmp_path):
    shape = KVShape(2, 1, 16, torch.float32)
    bytes_per_token = replace(shape, dtype=dtype).bytes_per_token
    limit = 60 * (bytes_per_token + 8) + HEADER_BYTES

    def opened() -> tuple[DiskPromptCache, KVStore]:
        cache = DiskPromptCache(tmp_path, "target", limit, 4)
        return cache, cache.open(lambda slots, n: KVStore(shape, slots, n, config=StoreConfig(dtype=dtype)), 1, 200)

    cache, store = opened()
    cache.reuse_prefix(0, family(0))
    store.write_entries(0, 0, *torch.randn(2, 2, 1, 60, 16))
    store.commit(0, range(60))
    cache.record_tokens(0, family(0))
    assert cache.save_next() and 60 * bytes_per_token < files(tmp_path)[0].stat().st_size <= limit
    again, other = opened()
    assert again.reuse_prefix(0, family(0)) == 59
    for x, y in zip((store.keys, store.values), (other.keys, other.values), strict=True):
        assert torch.equal(x[:, :, :, :59].to(torch.float32), y[:, :, :, :59].to(torch.float32))


def test_a_text_that_is_larger_than_the_limit_is_not_kept_and_shorter_ones_are(tmp_path, caplog):
    cache = DiskCache(tmp_path, 40 * TOKEN_BYTES + HEADER_BYTES)
    cache.read(TEXT, 0)
    cache.read([7, *TEXT[:30]], 1)
    assert cache.save_all() == 1 and not cache.save_next()
    assert sizes(tmp_path) == [31] and len(caplog.records) == 1


# --- full disks, damaged files ---


@pytest.mark.parametrize("how", ["no room", "a failing write"])
def test_a_full_disk_is_reported_once_and_nothing_is_lost(tmp_path, caplog, free_disk, how):
    cache = DiskCache(tmp_path)
    for text in (TEXT[:20], family(7)):
        cache.read(text)
        cache.save_next()
    before, (soft, hard) = [*tmp_path.iterdir()], resource.getrlimit(resource.RLIMIT_FSIZE)
    for text in (TEXT, [8, *TEXT]):
        cache.read(text)
        if how == "no room":
            free_disk(0)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        try:
            assert not cache.save_next()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [*tmp_path.iterdir()] == before and cache.read([*text, 1]) == len(text)
    free_disk(None)
    assert len(caplog.records) == 1
    assert cache.save_next()  # there is room again


def with_metadata(**changed: str) -> Callable[[Path], object]:
    """A function that changes a file's metadata."""

    def change(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            save_file(load_file(path), path, metadata=file.metadata() | changed)

    return change


# Each is a cache miss. "damaged" files are deleted with a warning.
CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "damaged: cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "damaged: half of its head": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "damaged: empty": lambda path: path.write_bytes(b""),
    "damaged: nonsense": lambda path: path.write_bytes(b"nonsense" * 100),
    "damaged: a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-5] + b"\7" + path.read_bytes()[-4:]),
    "another text's": lambda path: path.write_bytes(kept(path.parent / "other", [7] * 100).read_bytes()),
    "another program's": lambda path: save_file({}, path, metadata={"format": "other"}),
    **{f"metadata {next(iter(each))}": with_metadata(**each) for each in (
        {"feature_layers": "one"}, {"target": ""}, {"format": "longdraft-kv-9"}, {"checksums": "[" * 100_000},
        {"kind": "another"}, {"checksum": "9" * 5000},
    )},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_what_was_written_is_not_used(tmp_path, caplog, change):
    for when in ("before", "after"):  # the cache is opened
        folder = tmp_path / when
        file = kept(folder, TEXT)
        cache = DiskCache(folder)
        if when == "after":
            cache.read([*TEXT[:10], 9])
            CHANGES[change](file)
        else:
            CHANGES[change](file)
            cache = DiskCache(folder)
        assert cache.read([*TEXT, 7]) == 0  # the slot's ten tokens are lost too: their KV could have been overwritten
        assert not change.startswith("damaged") or (not files(folder) and "snapshot" in caplog.text)


def test_a_file_that_may_not_be_read_is_left_alone(tmp_path, caplog, monkeypatch):
    file = kept(tmp_path, TEXT)

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot, "read_header", forbidden)
    assert DiskCache(tmp_path).read(TEXT) == 0
    assert files(tmp_path) == [file] and "Permission denied" in caplog.text


def test_targets_share_a_folder_and_its_limit_and_no_files(tmp_path):
    def reused():
        return [DiskCache(tmp_path, target=target).read(TEXT[:60]) for target in ("one", "two")]

    for target in ("one", "two"):
        kept(tmp_path, TEXT[:60], max_bytes=room_for(2), target=target)
    assert len(files(tmp_path)) == 2 and reused() == [59, 59]
    kept(tmp_path, family(7), max_bytes=room_for(2), target="two")
    assert reused() == [0, 59]
    cache = DiskCache(tmp_path, target="two", layers=(1, 2))
    assert cache.read(TEXT[:60]) == 0  # a file is read only if it has the hidden states that are needed
    assert cache.save_all() == 1
    for layers, reuse in (((1, 2), 59), ((), 59), ((0, 2), 0)):
        assert DiskCache(tmp_path, target="two", layers=layers).read(TEXT[:60]) == reuse


def test_a_server_whose_folder_cannot_be_written_does_not_start(tmp_path):
    model = LoadedModel(tiny_model(context=64), tiny_tokenizer(chat=True))
    settings = ServerSettings("m", ("ar",), slots=1, context=64, prefix_cache_bytes=0, snapshots=tmp_path / "kept")
    assert make_service(model, settings, {}, {}).settings.context == 64 and (tmp_path / "kept").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        make_service(model, replace(settings, snapshots=tmp_path / "file" / "kept"), {}, {})


def test_a_file_that_memory_has_no_room_for_is_a_miss_and_stays(tmp_path, caplog):
    shape, path = KVShape(2, 1, 8192, torch.float32), tmp_path / "a.kv.safetensors"

    def opened() -> DiskPromptCache:
        cache = DiskPromptCache(tmp_path, "target", 1 << 30, 4)
        cache.open(lambda slots, rows: KVStore(shape, 1, 200), 1, 200)
        return cache

    whole = KVStore(shape, 1, 200)
    whole.lengths[0] = 100
    snapshot.save(whole, 0, TEXT, "target", path)
    cache = opened()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (4 << 20), hard))
    try:
        found, _ = cache.reuse_prefix(0, TEXT), DiskPromptCache(tmp_path, "target", 1 << 30, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert found == 0 and path.is_file() and path.name in caplog.text
    assert cache.reuse_prefix(0, TEXT) == opened().reuse_prefix(0, TEXT) == 99


# --- kill -9 ---


def kill_at_any_time(folder: Path) -> None:
    """Kills the process at any time, 12 times. The files left can be used."""
    for number in range(12):
        if not (child := os.fork()):
            # Growing texts and others, so that files are written and deleted all the time.
            cache = DiskCache(folder, max_bytes=20 * (HEADER_BYTES + 100 * TOKEN_BYTES))
            for i in range(1 << 30):
                cache.read([i // 8 % 50, *range(10 + i % 8 * 20)])
                cache.save_next()
        time.sleep(0.05 + 0.013 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cache = DiskCache(folder)
        assert files(folder) and not list(folder.glob("*.part"))
        for i in range(50):
            cache.read([i, *range(170)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_damaged_file_in_use(tmp_path):
    said = tmp_path / "said"
    assert elsewhere.wait_for_exit(elsewhere.start(said, kill_at_any_time, tmp_path / "kept"), 120) == 0, (
        said.read_text()
    )
    assert "snapshot" not in said.read_text()  # no file was damaged: renaming is the last thing
