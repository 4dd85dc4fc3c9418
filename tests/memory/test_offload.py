"""Offload: the same tokens from a store that is not in the device's memory, which stays free, and a disk that does."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import PromptCache, Sampling, Speculator
from longdraft.attention.block import Block
from longdraft.errors import CapabilityError, CheckpointError, MemoryBudgetError
from longdraft.memory import disk_store, offload, sizes
from longdraft.memory.disk_store import DiskStore
from longdraft.memory.host_store import HostStore
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from tests import elsewhere
from tests.drafts import random_draft
from tests.forwards import forward
from tests.tiny import tiny_model

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=3, dtype=torch.float64)
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [i % 11 for i in range(40)], [8]]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class LazySide:
    """A side stream that copies as late as it may: whoever does not wait finds nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.began = False
        self.bytes_to_host = self.bytes_to_device = 0

    def begin(self) -> None:
        self.began = True

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.began, "a copy must wait for what was computed before"
        assert to.is_contiguous() and source.is_contiguous() and to.shape == source.shape
        self.asked.append((to, source))

    def mark(self) -> int:
        self.began = False
        return len(self.asked)

    def wait(self, mark: int) -> None:
        for to, source in self.asked[self.done : mark]:
            to.copy_(source)
        self.done = max(self.done, mark)

    def settle(self) -> None:
        self.wait(len(self.asked))


def made(kind: str, slots: int, capacity: int, folder: Path, shape: KVShape = SHAPE, **options) -> KVStore:
    """A store of a kind; what it holds at first is noise or zeros."""
    if kind == "host":
        options.pop("transposed_keys", None)
        return HostStore(shape, slots, capacity, "cpu", side=LazySide(), **options)
    store = DiskStore(folder, shape, slots, capacity, **options) if kind == "disk" else None
    return store or KVStore(shape, slots, capacity, **options)


@pytest.fixture(params=["disk", "host"])
def kind(request):
    return request.param


@pytest.fixture
def offloaded(kind, tmp_path, monkeypatch):
    """From here on all targets offload; to the host as if the CPU were a GPU with a lazy stream."""

    def new_store(asked, shape, slots, capacity, device, transposed=False, layers=(), size=0):
        options = {"transposed_keys": transposed, "feature_layers": layers, "feature_size": size}
        return made(kind, slots, capacity, tmp_path, shape, **options)

    def start() -> None:
        monkeypatch.setattr(offload, "new_store", new_store)

    return start


# --- the same as a KVStore, operation by operation ---

BLOCK = 6
OPERATIONS = st.one_of(
    st.tuples(st.just("forward"), st.sets(st.integers(0, 2), min_size=1), st.sets(st.integers(0, BLOCK - 1))),
    st.tuples(st.just("levels"), st.sets(st.integers(0, 2), min_size=1), st.sets(st.integers(0, BLOCK - 1))),
    st.tuples(st.just("truncate"), st.integers(0, 2), st.floats(0, 1)),
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("read"), st.integers(-1, SHAPE.layers - 1), st.just(None)),
)


def same_rows(plain: KVStore, other: KVStore, layer: int) -> None:
    for a, b in zip(plain.layer(layer), other.layer(layer), strict=True):
        for slot in range(plain.slots):
            rows = plain.readable(slot)
            assert torch.equal(a[slot, :, :rows], b[slot, :, :rows])


@pytest.mark.parametrize(
    ("where", "transposed"), [("disk", False), ("disk", True), ("host", False)], ids=["disk", "disk, by column", "host"]
)
@given(st.lists(OPERATIONS, max_size=12))
def test_any_sequence_of_operations_leaves_what_a_store_in_memory_holds(
    tmp_path_factory, where, transposed, operations
):
    capacity = 200
    plain = KVStore(SHAPE, 3, capacity, transposed_keys=transposed)
    other = made(where, 3, capacity, tmp_path_factory.getbasetemp(), transposed_keys=transposed)
    for name, what, more in operations:
        if name in ("forward", "levels"):
            slots = sorted(what, reverse=True)
            size = BLOCK if name == "forward" else BLOCK // 3
            for behind in range(0, BLOCK, size):
                block = Block.make(slots, [plain.lengths[s] for s in slots], size, offset=behind)
                for layer in range(SHAPE.layers):
                    k, v = torch.randn(2, len(slots), SHAPE.kv_heads, size, SHAPE.head_dim, dtype=SHAPE.dtype)
                    plain.write(layer, k, v, block), other.write(layer, k, v, block)
                    # What attention sees: prefix and tree of the sequences in the forward.
                    for a, b in zip(plain.layer(layer), other.layer(layer), strict=True):
                        for slot in slots:
                            end = plain.lengths[slot] + block.width
                            assert torch.equal(a[slot, :, :end], b[slot, :, :end])
                plain.write_features({}, block), other.write_features({}, block)
            same_rows(plain, other, SHAPE.layers - 1)
            for slot in slots:
                plain.commit(slot, sorted(more)), other.commit(slot, sorted(more))
        elif name == "truncate":
            length = int(plain.lengths[what] * more)
            plain.truncate(what, length), other.truncate(what, length)
        elif name == "put":
            k, v = torch.randn(2, SHAPE.layers, SHAPE.kv_heads, more, SHAPE.head_dim, dtype=SHAPE.dtype)
            for store in (plain, other):
                store.put_rows(what, store.lengths[what], k, v)
                store.unverified[what] = more
        else:
            same_rows(plain, other, what)
        assert plain.lengths == other.lengths and plain.unverified == other.unverified
    for layer in range(SHAPE.layers):
        same_rows(plain, other, layer)
    for slot, n in enumerate(plain.lengths):
        for a, b in zip(plain.stored(slot, slice(None)), other.stored(slot, slice(None)), strict=True):
            assert torch.equal(a[:, :, :n], b[:, :, :n])


def test_rows_that_do_not_fit_are_refused(kind, tmp_path):
    store, rows = made(kind, 1, 8, tmp_path), torch.zeros(4, 2, 3, 3, dtype=torch.float64)
    store.put_rows(0, 5, rows, rows)
    with pytest.raises(ValueError, match=r"rows \[6, 9\) do not lie in a slot of 8 rows"):
        store.put_rows(0, 6, rows, rows)


def test_only_what_is_missing_travels():
    """Of a round: two directions, the new rows up, and down each layer once, but the two that are still there."""
    side = LazySide()
    shape, n, new = KVShape(5, 1, 2, torch.float32), 90, 4
    store = HostStore(shape, 1, 200, "cpu", side=side)
    rows = torch.randn(5, 1, n, 2)
    store.put_rows(0, 0, rows, rows)
    store.lengths[0] = n
    copied = []
    for _ in range(2):
        block = Block.make([0], store.lengths, new)
        for layer in range(5):
            x = torch.randn(1, 1, new, 2)
            store.write(layer, x, x, block)
            store.layer(layer)
        store.commit(0, range(new))
        side.settle()
        # A copy's first dimension is its rows; keys and values are two copies.
        ups = sum(len(to) for to, _ in side.asked if to.untyped_storage().nbytes() == store._host[0].nbytes) // 2
        copied.append((ups, sum(len(to) for to, _ in side.asked) // 2 - ups))
        side.asked, side.done = [], 0
    # First round: layer 0 is fetched, then 1 to 4, and 0 again for the round to come. Second: 0 lacks the new rows.
    assert copied == [(5 * new, 6 * n), (5 * new, 5 * (n + new) + new)]


# --- the same tokens ---


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "longspec"])
def test_a_ragged_batch_has_the_same_tokens(tmp_path, offloaded, method, sampling):
    model = tiny_model(vocab=11, dtype=torch.float64)
    options = {"branches": 3, "min_n": 1} if method == "prompt-lookup" else {}
    options = {"draft": random_draft(tmp_path / "draft", model)} if method == "longspec" else options
    spec = Speculator(method, target=model, **options)
    settings = {"max_new_tokens": 30, "sampling": sampling, "seed": 5}
    expected = spec.generate(PROMPTS, **settings)
    offloaded()
    got = spec.generate(PROMPTS, **settings)
    assert [(r.token_ids, r.accepted) for r in got] == [(r.token_ids, r.accepted) for r in expected]


@pytest.mark.parametrize("method", ["prompt-lookup", "longspec"])
@pytest.mark.parametrize("layers", [1, 2])
def test_targets_of_few_layers(tmp_path, offloaded, layers, method):
    model = tiny_model(vocab=11, layers=layers, dtype=torch.float64)
    options = {"draft": random_draft(tmp_path / "draft", model)} if method == "longspec" else {}
    spec = Speculator(method, target=model, **options)
    expected = [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=30)]
    offloaded()
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=30)] == expected


def test_a_prompt_cache_grows_and_is_taken_up_again(tmp_path, offloaded):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec, cache = Speculator("prompt-lookup", target=model), PromptCache()
    prompts = [PROMPTS[0], [*PROMPTS[0], 4, 4, 1], PROMPTS[0] * 3, [8, 9], PROMPTS[0]]
    expected = [spec.generate([p], max_new_tokens=20)[0].token_ids for p in prompts]
    first = spec.generate([prompts[0]], max_new_tokens=20, cache=cache)[0]  # in memory, then taken over
    offloaded()
    got = [spec.generate([p], max_new_tokens=20, cache=cache)[0].token_ids for p in prompts[1:]]
    assert [first.token_ids, *got] == expected
    assert type(cache.store) is not KVStore


def test_a_snapshot_goes_to_a_file_and_back(tmp_path, offloaded):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec, cache = Speculator("ar", target=model), PromptCache()
    expected = spec.generate([PROMPTS[0]], max_new_tokens=20)[0].token_ids
    offloaded()
    spec.generate([PROMPTS[0]], max_new_tokens=20, cache=cache)
    cache.save(tmp_path / "kv", "target")
    again = spec.generate([PROMPTS[0]], max_new_tokens=20, cache=PromptCache.restored(tmp_path / "kv", "target"))[0]
    assert again.token_ids == expected


def test_custom_generate_and_a_long_prompt_in_chunks(tmp_path):
    model = tiny_model(dtype=torch.float64, context=3000)
    ids = torch.arange(1500)[None] % 61
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    spec = Speculator("prompt-lookup", offload=tmp_path)
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, custom_generate=spec))
    assert list(tmp_path.iterdir()) == []


def test_features_lie_beside_an_offloaded_store(kind, tmp_path, offloaded):
    runner = TargetRunner(tiny_model(dtype=torch.float64))
    stores = [runner.new_store(1, 30, (0, 2))]
    offloaded()
    stores.append(runner.new_store(1, 30, (0, 2)))
    for store in stores:
        forward(runner, [[1, 2, 3, 4, 5]], store, [0])
        store.commit(0, [0, 2, 3])
    assert torch.equal(stores[0].features[0, :3], stores[1].features[0, :3])


# --- what is said ---


def test_what_can_be_asked_for(tmp_path):
    assert offload.parse(None) is None and offload.parse("host") == "host"
    assert offload.parse(str(tmp_path)) == tmp_path and offload.parse("disk").is_dir()
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        Speculator("ar", offload=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("asked", "device", "said"),
    [
        ("host", "cpu", "on cpu: offload to disk"),
        ("disk", "cuda:0", "on cuda:0: offload to host"),
        ("host", "mps", "on mps: leave the option out"),
    ],
)
def test_a_device_that_cannot_is_refused(asked, device, said):
    with pytest.raises(CapabilityError, match=said):
        offload.check(offload.parse(asked), torch.device(device))


def test_a_small_store_can_stay_on_the_device(tmp_path):
    runner = TargetRunner(tiny_model(), offload=tmp_path)
    assert type(runner.new_store(1, 10)) is DiskStore
    assert type(runner.new_store(1, 10, resident=True)) is KVStore


def test_a_full_disk_is_refused_with_the_bytes_needed_and_free(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(disk_store.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(MemoryBudgetError, match=r"A cache of 50 tokens needs 32\.0 KiB .* 1000 B .*another disk"):
        DiskStore(tmp_path, SHAPE, 1, 50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room cannot be reserved here")
def test_a_disk_that_fills_up_in_between_is_refused(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError, match="Name a folder on another disk"):
        DiskStore(tmp_path, SHAPE, 1, 50)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_reserves_nothing_gets_a_file_all_the_same(tmp_path, monkeypatch):
    def unsupported(descriptor, offset, size):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    store = DiskStore(tmp_path, SHAPE, 1, 50)
    store.keys.fill_(1), store.values.fill_(2)
    assert store.keys.sum() * 2 == store.values.sum()


def test_a_folder_that_takes_no_file_is_refused(tmp_path, monkeypatch):
    def denied(**options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk_store.tempfile, "TemporaryFile", denied)
    with pytest.raises(CheckpointError, match="Name another folder to offload to"):
        DiskStore(tmp_path, SHAPE, 1, 50)


def test_memory_is_asked_for_two_layers_and_the_features(kind, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sizes, "require", lambda needed, device, what: asked.append(needed))
    monkeypatch.setattr(disk_store, "in_memory", lambda folder: False)
    shape = KVShape(6, 2, 4, torch.float32)
    made(kind, 1, 4096, tmp_path, shape, feature_layers=(0,), feature_size=8)
    total, features = 6 * 2 * 2 * 4 * 4096 * 4, 8 * 4096 * 4
    assert asked == ([total, total // 3 + features] if kind == "host" else [total // 3 + features])


def test_a_folder_in_memory_counts_as_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "in_memory", lambda folder: True)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: KVStore.bytes_for(SHAPE, 1, 4096) - 1)
    with pytest.raises(MemoryBudgetError, match="offloaded to"):
        DiskStore(tmp_path, SHAPE, 1, 4096)


@LINUX
def test_folders_in_memory_are_known():
    assert not disk_store.in_memory(Path("/var"))
    if Path("/dev/shm").is_dir():
        assert disk_store.in_memory(Path("/dev/shm"))


# --- what stays in memory, and on the disk ---


def resident(folder: Path) -> int:
    """Bytes of the files of a folder that are mapped and in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = [i for i, line in enumerate(lines) if f" {folder}/" in line]
    return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in at) * 1024


def most_resident(folder: Path, columns: bool, n: int) -> tuple[int, int]:
    """Bytes of a layer, and of the file at most, while five chunks of ``n`` tokens are written and read."""
    most, x = 0, torch.ones(1, 4, n, 64)
    store = DiskStore(folder, KVShape(20, 4, 64, torch.float32), 1, 5 * n, transposed_keys=columns)
    for chunk in range(5):
        block = Block.make([0], store.lengths, n)
        for layer in range(20):
            store.write(layer, x * layer, x * chunk, block)
            k, v = store.layer(layer)
            total = float(k[0, :, : store.lengths[0] + n].sum() + v[0, :, : store.lengths[0] + n].sum())
            rows = 4 * 64 * n
            assert total == rows * (layer * (chunk + 1) + chunk * (chunk + 1) / 2), (layer, chunk, total)
            most = max(most, resident(folder))
        store.commit(0, range(n))
    store.truncate(0, 4 * n)
    store.commit(0, [1, 5, 7])
    store.put_rows(0, 4 * n + 9, torch.ones(20, 4, 3, 64), torch.ones(20, 4, 3, 64))
    return store._layer_bytes, max(most, resident(folder))


@LINUX
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("chunk", [512, pytest.param(2048, marks=pytest.mark.slow)], ids=["100 MiB", "400 MiB"])
def test_two_layers_at_most_are_resident(tmp_path, layout, chunk):
    if disk_store.in_memory(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    layer, most = most_resident(tmp_path, layout == "columns", chunk)
    assert layer * 20 == 204_800 * chunk and 0 < most <= 2 * layer
    assert list(tmp_path.iterdir()) == []


@LINUX
def test_the_room_on_the_disk_is_given_back_with_the_store(tmp_path):
    def mapped() -> bool:
        return f"{tmp_path}/" in Path("/proc/self/maps").read_text()

    store = DiskStore(tmp_path, SHAPE, 1, 5000)
    assert mapped() and list(tmp_path.iterdir()) == []
    del store
    assert not mapped()
    with pytest.raises(KeyboardInterrupt):
        _interrupted(tmp_path)
    assert not mapped()


def _interrupted(folder: Path) -> None:
    store = DiskStore(folder, SHAPE, 1, 5000)
    assert store.capacity == 5000
    raise KeyboardInterrupt


def _fill_and_wait(folder: Path) -> None:
    folder.mkdir()
    store = DiskStore(folder, KVShape(2, 2, 4, torch.float32), 1, 9999)
    store.keys.fill_(1)
    print("ready", flush=True)
    time.sleep(60)


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_killed_process_leaves_no_file(tmp_path):
    said = tmp_path / "said"
    process = elsewhere.start(said, _fill_and_wait, tmp_path / "store")
    while not said.exists() or said.read_text() != "ready\n":
        time.sleep(0.02)
        assert process.is_alive(), said.read_text()
    os.kill(process.pid, signal.SIGKILL)
    assert elsewhere.ended(process, 10) == -signal.SIGKILL
    assert list((tmp_path / "store").iterdir()) == []
