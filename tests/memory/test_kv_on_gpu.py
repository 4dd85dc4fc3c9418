"""KV in int8 on a simulated GPU: every method writes what plain decoding on that KV writes, from CUDA graphs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longdraft import Speculator
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from tests.support.methods import EXACT, SpeculatorsByMethod
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.slow_marks import slow, slow_except
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 4, [8, 1, 1, 6] * 5]
SETTINGS = {"max_new_tokens": 9, "eos_token_ids": []}
QUICK = ("prompt-lookup", "longspec")
GPU_PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def tokens(spec: Speculator) -> list[list[int]]:
    return [list(r.token_ids) for r in spec.generate(PROMPTS, **SETTINGS)]


@pytest.mark.parametrize("method", slow_except((*EXACT, "quantspec"), QUICK))
def test_every_method_writes_what_plain_decoding_on_that_kv_writes(method, tmp_path, simulated_gpu):
    specs = SpeculatorsByMethod(tmp_path, torch.float32)
    options = specs.options(method)
    to_simulated_gpu(specs.model)
    expected = tokens(Speculator("ar", target=specs.model, kv_dtype="int8"))
    spec = Speculator(method, target=specs.model, plan="fixed", kv_dtype="int8", **options)
    recorder = SimulatedGraphs(simulated_gpu)  # it refuses to capture a synchronisation
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    simulated_gpu.waits.clear()
    assert tokens(spec) == expected and recorder.replays > 0
    assert not [place for place in simulated_gpu.waits if "memory/" in place or "attention/" in place]
    if method in QUICK:  # other methods change their trees, or capture graphs for one request
        captures = recorder.captures
        assert tokens(spec) == expected and recorder.captures == captures  # the same memory serves


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_a_view_of_all_entries_in_eight_bits_drafts_for_a_target_that_keeps_its_own(dtype, simulated_gpu):
    model = to_simulated_gpu(tiny_model(layers=2, dtype=dtype))
    spec = Speculator("quantspec", target=model, plan="fixed")
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    found = spec.generate(PROMPTS, **SETTINGS)
    assert [list(r.token_ids) for r in found] == tokens(Speculator("ar", target=model))
    assert all(r.exact for r in found) and spec.runner().kv_dtype == dtype
    assert found[0].mean_accepted_length > 2


def test_the_page_says_how_many_bytes_it_takes():
    shape, row = KVShape(32, 8, 128, torch.bfloat16), "| 8B shape | {:.2f} GB | {:.2f} GB |"
    own, small = KVStore(shape, 1, 61440, "meta"), KVStore(shape, 1, 61440, "meta", StoreConfig(dtype=torch.int8))
    found = [
        sum(x.numel() * x.itemsize for x in tensors) / 1e9
        for tensors in ((own.keys, own.values), (x for r in (small.keys, small.values) for x in (r.quants, r.scales)))
    ]
    assert row.format(*found) in GPU_PAGE.read_text(), found


def test_what_a_gpu_does_not_keep_is_refused_with_what_serves_instead(simulated_gpu):
    model = to_simulated_gpu(tiny_model(layers=1))
    with pytest.raises(CapabilityError, match="in int8"):
        Speculator("ar", target=model, kv_dtype="bfloat16")
    with pytest.raises(CapabilityError, match="offloaded KV has the model"):
        Speculator("ar", target=model, kv_dtype="int8", offload="host")
    with pytest.raises(CapabilityError, match="deterministic=True"):
        Speculator("ar", target=model, kv_dtype="int8", deterministic=True)
