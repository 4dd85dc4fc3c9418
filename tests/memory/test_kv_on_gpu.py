"""Quantized KV on a simulated GPU: every method writes what plain decoding on that KV writes, from CUDA graphs too."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from longdraft.errors import CapabilityError
from longdraft.memory import memory_info
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from tests.support.methods import EXACT, SpeculatorsByMethod
from tests.support.simulated_gpu import SimulatedGraphs, patch_cuda, to_simulated_gpu
from tests.support.slow_marks import slow, slow_except
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 4, [8, 1, 1, 6] * 5]
SETTINGS = {"max_new_tokens": 9, "eos_token_ids": []}
QUICK = ("prompt-lookup", "longspec")


def tokens(spec: Speculator) -> list[list[int]]:
    return [list(r.token_ids) for r in spec.generate(PROMPTS, **SETTINGS)]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("method", slow_except((*EXACT, "quantspec"), QUICK))
def test_every_method_writes_what_plain_decoding_on_that_kv_writes(method, kv_dtype, tmp_path, simulated_gpu):
    specs = SpeculatorsByMethod(tmp_path, torch.float32)
    options = specs.options(method)
    to_simulated_gpu(specs.model)
    expected = tokens(Speculator("ar", target=specs.model, kv_dtype=kv_dtype))
    spec = Speculator(method, target=specs.model, plan="fixed", kv_dtype=kv_dtype, **options)
    recorder = SimulatedGraphs(simulated_gpu)  # it refuses to capture a synchronisation
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    simulated_gpu.waits.clear()
    assert tokens(spec) == expected and recorder.replays > 0
    assert not [place for place in simulated_gpu.waits if "memory/" in place or "attention/" in place]
    if method in QUICK:  # other methods change their trees, or capture graphs for one request
        captures = recorder.captures
        assert tokens(spec) == expected and recorder.captures == captures  # the same memory serves


@pytest.mark.parametrize(
    ("dtype", "options", "least_accepted"),
    [slow(torch.float32, {}, 2), (torch.bfloat16, {}, 2), (torch.bfloat16, {"view_dtype": "int4"}, 1.5)],
    ids=str,
)
def test_a_view_of_all_entries_in_fewer_bits_drafts_for_a_target_that_keeps_its_own(
    dtype, options, least_accepted, simulated_gpu
):
    model = to_simulated_gpu(tiny_model(layers=2, dtype=dtype))
    spec = Speculator("quantspec", target=model, plan="fixed", **options)
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    found = spec.generate(PROMPTS, **SETTINGS)
    assert [list(r.token_ids) for r in found] == tokens(Speculator("ar", target=model))
    assert all(r.exact for r in found) and spec.runner().kv_dtype == dtype
    assert found[0].mean_accepted_length > least_accepted


def test_what_a_gpu_does_not_keep_is_refused_with_what_serves_instead(simulated_gpu):
    model = to_simulated_gpu(tiny_model(layers=1))
    with pytest.raises(CapabilityError, match="int8 or int4"):
        Speculator("ar", target=model, kv_dtype="bfloat16")
    with pytest.raises(CapabilityError, match="offloaded KV has the model"):
        Speculator("ar", target=model, kv_dtype="int8", offload="host")
    for other in ({"kv_dtype": "int8"}, {"offload": "host"}):
        with pytest.raises(CapabilityError, match="deterministic=True"):
            Speculator("ar", target=model, deterministic=True, **other)


def test_unused_memory_of_graphs_is_not_free(simulated_gpu, monkeypatch):
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 5 << 20, "allocated_size": 3 << 20}
        for device, pool in ((0, (0, 0)), (0, (0, 1)), (1, (0, 0)))
    ]
    patch_cuda(monkeypatch, mem_get_info=(1 << 20, 9 << 20), memory_snapshot=segments)
    assert memory_info.available_bytes(torch.device("cuda", 0)) == 3 << 20
