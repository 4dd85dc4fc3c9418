"""Offload: the same tokens from a store in host memory, and refusals."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Speculator
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import CapabilityError, RequestError
from longdraft.memory import offload as offloading
from longdraft.memory.offload import OffloadedKVStore
from longdraft.memory.store import KVShape, KVStore
from tests.support.lazy_side import LazyCopyStream
from tests.support.tiny import tiny_model


@pytest.mark.parametrize(("resident", "ups", "downs"), [(0, 8, 8), (2, 6, 6), (5, 3, 3), (7, 1, 0), (8, 0, 0)])
def test_layers_that_the_device_keeps_do_not_travel(resident, ups, downs):
    """Counts copied entries of layers: to and from the device in a later round, with nothing in the staging buffers."""
    shape, n, new = KVShape(8, 1, 2, torch.float32), 90, 4
    plain, store = (
        KVStore(shape, 1, 200),
        OffloadedKVStore(shape, 1, 200, "cpu", copy_stream=(side := LazyCopyStream()), num_resident=resident),
    )
    kv = torch.randn(8, 1, n, 2)
    for s in (plain, store):
        s.write_entries(0, 0, kv, kv)
        s.lengths[0] = n
    for path in ([0, 2, 3], [1, 3], [0, 1]):
        side.synchronize()
        side.queue, side.done = [], 0
        batch = ForwardBatch.make([0], store.lengths, new)
        for layer in range(8):
            x = torch.randn(1, 1, new, 2)
            for s in (plain, store):
                s.write(layer, x, x, batch)
            end = store.lengths[0] + new
            for expected, actual in zip(plain.layer(layer), store.layer(layer), strict=True):
                assert torch.equal(expected[:, :, :end], actual[:, :, :end])
        side.synchronize()
        moved = [len(to) for to, _ in side.queue]
        length = store.lengths[0]
        assert sum(size == new for size in moved) == 2 * ups
        assert sum(size > new for size in moved) <= 2 * (downs + 1) and max(moved, default=0) <= length
        for s in (plain, store):
            s.commit(0, path)
    assert resident < 1 or 7 not in store.streamed_layers  # drafts read the last layer


@pytest.mark.parametrize(("free", "resident"), [(0, 0), (9, 3), (13, 5), (100, 8)])
def test_as_many_layers_as_fit_stay_on_the_device(free, resident, free_memory):
    shape = KVShape(8, 1, 2, torch.float32)
    layer_bytes = shape.bytes_per_token * 200 // 8
    free_memory(free * layer_bytes, 1 << 40)
    store = OffloadedKVStore(shape, 1, 200, "cpu", copy_stream=LazyCopyStream(), num_resident=None)
    assert len(store.streamed_layers) == 8 - resident


@pytest.mark.parametrize("option", ["host", "host:2"])
def test_a_prompt_cache_grows_and_another_store_takes_its_place(option, cpu_offloads):
    model, cache = tiny_model(vocab=11, dtype=torch.float64), PromptCache()
    plain, spec = (Speculator("prompt-lookup", target=model, offload=offload) for offload in (None, option))
    text = [3, 9, 4, 7, 2, 5] * 8
    prompts = (text, [*text, 4, 4, 1], text * 3, text * 2, text)
    for prompt, own, is_reused in zip(prompts, (spec, spec, spec, plain, spec), (0, 1, 1, 0, 0), strict=True):
        (result,) = own.generate([prompt], max_new_tokens=20, cache=cache)
        assert result.token_ids == plain.generate([prompt], max_new_tokens=20)[0].token_ids
        assert (result.cached_tokens > 0) == is_reused and (type(cache.store) is KVStore) == (own is plain)


@pytest.mark.parametrize(
    ("option", "device", "error", "message"),
    [
        ("host", "cpu", CapabilityError, "on cpu"),
        ("host", "mps", CapabilityError, "on mps"),
        ("host:some", "cuda:0", RequestError, "host:N"),
        ("/nowhere", "cpu", RequestError, "nowhere"),
    ],
)
def test_what_cannot_is_refused(option, device, error, message):
    with pytest.raises(error, match=message):
        offloading.check(offloading.parse(option), torch.device(device))
