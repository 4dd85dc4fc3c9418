"""Checkpoints in bfloat16 and float16: kept in half the bytes, computed in float32; and models of a user's in those."""

from __future__ import annotations

import mmap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from longdraft import huge_pages, load
from longdraft.errors import CapabilityError
from longdraft.model.layers.skinny_gemm import patch_linears
from longdraft.model.quant.stored import StoredEmbedding, StoredLinear
from longdraft.model.quant.stored_model import dequantize_model, is_repacked
from longdraft.model.runner import TargetRunner
from tests.native.levels import needs_kernels
from tests.support.forwards import forward
from tests.support.gguf_files import write_gguf
from tests.support.slow_marks import rotate_pairs
from tests.support.tiny import FAMILIES, tiny_model, tiny_tokenizer

HALVES = (torch.bfloat16, torch.float16)
IDS = torch.arange(3, 23)[None]


def folder(path, family="llama", dtype=torch.bfloat16, **options):
    tiny_model(family, hidden=64, head_dim=32, heads=2, kv_heads=2, dtype=dtype, **options).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@needs_kernels
@pytest.mark.parametrize(("family", "dtype"), rotate_pairs(FAMILIES, HALVES))
@torch.no_grad()
def test_a_folder_in_halves_stays_in_halves_and_computes_in_float32(family, dtype, tmp_path):
    place = folder(tmp_path, family, dtype, tie=family == "llama")
    model = load(place, device="cpu").model
    assert model.dtype == torch.float32
    kinds = {type(m) for m in model.modules()}
    assert StoredLinear in kinds and StoredEmbedding in kinds and nn.Linear not in kinds
    plain = load(place, device="cpu", weights="float32").model
    assert type(plain.lm_head) is nn.Linear
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight) and torch.equal(plain.state_dict()[name], weight)
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    # By our kernels the same to the bit.
    found = []
    for each in (model, plain):
        runner = TargetRunner(each)
        assert runner.execution_model.fused.stack is not None
        found.append(forward(runner, [[4, 5, 6, 7]], runner.new_store(1, 8), [0]).logits)
    assert torch.equal(*found)


def test_stored_weights_are_saved_once_they_are_unpacked(tmp_path):
    model = load(folder(tmp_path / "a"), device="cpu", weights="stored").model
    with pytest.raises(CapabilityError):
        model.save_pretrained(tmp_path / "b")
    dequantize_model(model, torch.float32).save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items())


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_a_layer_in_halves_is_computed_in_its_own_dtype_and_rounded_once(dtype, bias):
    layer = nn.Linear(96, 40, bias=bias, dtype=dtype)
    x = torch.randn(5, 96, dtype=dtype)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    patch_linears(layer)
    found = layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
    # A row is the same whatever stands beside it.
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), found)


@needs_kernels
def test_matrices_are_laid_out_where_memory_allows_or_was_begun_before_and_give_the_same_bits(tmp_path, free_memory):
    pytest.importorskip("gguf")
    file = tmp_path / "a.gguf"
    write_gguf(file, hidden=64)
    models = [load(file).model]
    held = sum(m.data.nbytes for m in models[0].modules() if isinstance(m, StoredLinear) and m.int8)
    free_memory(2 * held - 1)
    models.append(load(file).model)
    assert held and [is_repacked(model) for model in models] == [True, False]
    if hasattr(mmap, "MADV_HUGEPAGE"):  # on Linux
        huge_pages.prefault(file, 1 << 40, min_bytes=1)
        models.append(load(file).model)
        assert is_repacked(models[2]) and huge_pages.take_prefaulted(0) is None  # another cannot have it
    runners = [TargetRunner(model) for model in models]
    for size in (1, 3, 10):
        tokens = [[1, 5, 2, 7, 3, 4, 6, 2, 8, 1][:size]]
        found = [forward(run, tokens, run.new_store(1, 16), [0], is_prefill=True).logits for run in runners]
        assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is begun on Linux")
def test_memory_that_was_begun_is_whole_when_it_is_taken(tmp_path):
    file = tmp_path / "large.gguf"
    with file.open("wb") as made:
        made.truncate(300 << 20)
    for path, free in ((None, 1 << 40), (tmp_path, 1 << 40), (tmp_path / "none.gguf", 1 << 40), (file, 500 << 20)):
        huge_pages.prefault(path, free)
        assert huge_pages.take_prefaulted(0) is None
    huge_pages.prefault(file, 600 << 20)
    assert huge_pages.take_prefaulted(301 << 20) is None and huge_pages.take_prefaulted(0) is None
    huge_pages.prefault(file, 600 << 20)
    memory = huge_pages.take_prefaulted(300 << 20)
    assert memory is not None and not any(memory[:: 1 << 20])
    memory[:: 1 << 20] = b"\1" * 300
    huge_pages.prefault(file, 600 << 20)
    huge_pages.drop_prefaulted()
    assert all(memory[:: 1 << 20]) and huge_pages.take_prefaulted(0) is None
