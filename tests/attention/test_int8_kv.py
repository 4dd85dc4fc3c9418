"""Attention to an int8 KV cache on a GPU's path equals attention to the dequantized cache."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from longdraft.attention import dispatch, int8_kv, prefix
from longdraft.attention.int8_kv import accept_int8_kv
from longdraft.native.quantized_kv import Int8KV
from tests.attention.cases import case
from tests.support import torch_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # one is to be seen with `-m gpu` alone


@pytest.mark.parametrize("path", ["hybrid", "sdpa"])
@pytest.mark.parametrize("lengths", [[20, 3], [70]])
def test_int8_kv_is_dequantized_up_to_the_context_and_float_kv_is_unchanged(path, lengths):
    with torch_kernels.registered() if path == "hybrid" else nullcontext():
        q, keys, values, batch, scale = case(lengths, 4)
        small, behind = (Int8KV.quantize(keys), Int8KV.quantize(values)), max(lengths) + 4
        for x in small:  # rows behind the texts may hold anything
            x.scales[:, :, behind:] = torch.nan
        for way in (lambda attend: attend, prefix.make_prefix_attention):
            attend, either = (way(path_fn) for path_fn in (dispatch.PATHS[path], accept_int8_kv(dispatch.PATHS[path])))
            found = either(q, *small, batch, scale)
            assert torch.equal(found, attend(q, *(x.to(q.dtype) for x in small), batch, scale))
            output = either(q, keys, values, batch, scale)
            assert torch.equal(output, attend(q, keys, values, batch, scale)) and not torch.equal(output, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [24, 128])
def test_the_dequantize_kernel_equals_its_reference(dtype, d):
    """In Triton's interpreter, and on a GPU by ``make test-gpu``."""
    kernel = pytest.importorskip("longdraft.attention.int8_kv_kernel")
    rows = torch.randn(3, 2, 90, d, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    small, slots = Int8KV.quantize(rows), torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for quantized in (small, small.transpose(1, 2)[:, :80].transpose(1, 2)):
        args = quantized.quants, quantized.scales, slots, 77, dtype
        found, expected = kernel.dequantize_kv(*args), int8_kv.dequantize_kv(*args)
        assert found.shape == (2, 2, 77, d) and found.dtype == dtype
        step = torch.finfo(dtype).eps  # Triton's interpreter cuts, where a GPU rounds
        torch.testing.assert_close(found, expected, rtol=step, atol=0)
