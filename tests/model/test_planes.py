"""Quantised weights on a GPU: planes of GGUF's blocks, their kernel in Triton's interpreter, models that keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("triton")

from longdraft import LoadedModel, Speculator
from longdraft.drafts import draft_models
from longdraft.errors import CapabilityError
from longdraft.model.gguf.loading import load_gguf
from longdraft.model.gpu import planes_kernel
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.quant import planes
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import describe_target, shared_parts
from longdraft.native.quantized_matrix import QUANT_SIZES, QuantizedMatrix
from tests.support.gguf_files import HALVES, write_gguf
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.slow_marks import rotate_pairs
from tests.support.tiny import tiny_model

FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROMPT = [3, 9, 4, 7, 2, 5] * 8


def random_matrix(name: str, out: int, size: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(len(name) + out)
    block_weights, block_bytes = QUANT_SIZES[name]
    data = torch.randint(256, (out, size // block_weights, block_bytes), generator=generator, dtype=torch.uint8)
    for start in HALVES.get(name, (0,)):
        scales = torch.rand(out, size // block_weights, 1, generator=generator) / 100
        data[..., start : start + 2] = scales.half().view(torch.uint8)
    return QuantizedMatrix(data.flatten(1), name)


@pytest.mark.parametrize(("name", "dtype"), rotate_pairs(FORMATS, DTYPES))
def test_the_kernel_multiplies_with_ggmls_weights(name, dtype):
    for out, size, rows in ((37, 512, 5), (32, 256 if name.endswith("K") else 96, 70)):
        matrix = random_matrix(name, out, size)
        sorted_planes = planes.planes_of(matrix)
        assert torch.equal(planes.dequantize(sorted_planes), matrix.dequantize())
        generator = torch.Generator().manual_seed(rows)
        x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, size), (out,)))
        p = sorted_planes
        arguments = p.quants, p.block_scales, p.group_scales, bias if rows == 5 else None, p.interleave, p.zero
        found, expected = (f(x, *arguments) for f in (planes_kernel.planes_linear, planes.planes_linear))
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=4 * step, atol=4 * step * float(expected.abs().max()))
        alone = planes_kernel.planes_linear(x[2:3], *arguments)
        assert torch.equal(alone[0], planes_kernel.planes_linear(x[:9], *arguments)[2])


def test_a_matrix_of_many_rows_is_dequantised_in_pieces(monkeypatch):
    layer = planes.PlanesLinear(planes.planes_of(random_matrix("Q4_K", 300, 256)), torch.ones(300))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    monkeypatch.setattr(planes, "DEQUANTIZED_ROWS", 128)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("rows", [40, torch.tensor([5, 0, 41])], ids=["first", "some"])
def test_a_draft_keeps_some_rows_of_a_head(rows):
    model = tiny_model(hidden=64, heads=4)
    head = planes.PlanesLinear(planes.planes_of(random_matrix("Q8_0", 61, 64)))
    model.set_output_embeddings(head)
    kept = draft_models.fit_head(model, rows).get_output_embeddings()
    assert torch.equal(kept.weight, head.weight[:rows] if isinstance(rows, int) else head.weight[rows])


def test_other_blocks_are_unpacked():
    assert planes.planes_of(random_matrix("Q5_0", 4, 64)) is None


def mixed(name: str) -> str:
    """Kinds of a file that llama.cpp calls Q4_K_M, and of one layer more."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_K", "ffn_up": "Q5_1", "attn_k": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def loaded(file: Path, keep: bool) -> LoadedModel:
    return load_gguf(file, torch.bfloat16, None, None, lambda line: None, keep_planes=keep)


@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", False)])
def test_a_model_keeps_its_blocks_and_computes_as_the_unpacked_one(family, tie, tmp_path, simulated_gpu):
    file = tmp_path / "model.gguf"
    write_gguf(file, family, mixed, words="Q6_K", tie=tie, hidden=256, intermediate=512, heads=4, kv_heads=2)
    kept, unpacked = (loaded(file, keep) for keep in (True, False))
    layer = kept.model.model.layers[0]
    # Rows of queries and keys have another order in a file of the Llama kind.
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert isinstance(getattr(layer.self_attn, name), planes.PlanesLinear)
    assert type(layer.mlp.up_proj) is nn.Linear and type(kept.model.get_input_embeddings()) is nn.Embedding
    head, weight = shared_parts(kept.model).head, unpacked.model.get_output_embeddings().weight
    assert isinstance(head, planes.Planes) and torch.equal(planes.dequantize(head).bfloat16(), weight)
    ids = torch.tensor([5, 0, 41])
    assert torch.equal(planes.dequantize(head.select_rows(ids)).bfloat16(), weight[ids])
    assert TargetRunner(kept.model).vocab_size == len(weight)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(kept.model(ids).logits, unpacked.model(ids).logits)
    assert describe_target(kept.model) == describe_target(unpacked.model)  # the same drafts fit
    with pytest.raises(CapabilityError, match="cannot be saved"):
        kept.model.save_pretrained(tmp_path / "saved")
    expected = Speculator("ar", target=unpacked.model).generate([PROMPT], max_new_tokens=12, eos_token_ids=[])
    spec = Speculator("prompt-lookup", target=to_simulated_gpu(kept.model), plan="fixed", min_n=1)
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    found = spec.generate([PROMPT], max_new_tokens=12, eos_token_ids=[])
    assert [r.token_ids for r in found] == [r.token_ids for r in expected] and recorder.replays > 0
    assert 0 < found[0].accepted < found[0].drafted
