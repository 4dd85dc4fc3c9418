"""Attention to a quantized KV cache on a GPU's path equals attention to the dequantized cache."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from longdraft.attention import dispatch, prefix, quantized_kv
from longdraft.attention.quantized_kv import accept_quantized_kv
from longdraft.native.quantized_kv import INT4, Int4KV
from tests.attention.cases import case
from tests.native.cases import quantized
from tests.support import torch_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # one is to be seen with `-m gpu` alone


FORMATS = pytest.mark.parametrize("kv_dtype", [torch.int8, INT4], ids=str)


@FORMATS
@pytest.mark.parametrize("path", ["hybrid", "sdpa"])
@pytest.mark.parametrize("lengths", [[20, 3], [70]])
def test_quantized_kv_is_dequantized_up_to_the_context_and_float_kv_is_unchanged(path, lengths, kv_dtype):
    with torch_kernels.registered() if path == "hybrid" else nullcontext():
        q, keys, values, batch, scale = case(lengths, 4)
        small, behind = (quantized(keys, kv_dtype, True), quantized(values, kv_dtype, False)), max(lengths) + 4
        for x in small:  # rows behind the texts may hold anything
            x[:, :, behind:] = torch.full((), torch.nan).expand(x[:, :, behind:].shape)
        for way in (lambda attend: attend, prefix.make_prefix_attention):
            attend, either = (
                way(path_fn) for path_fn in (dispatch.PATHS[path], accept_quantized_kv(dispatch.PATHS[path]))
            )
            found = either(q, *small, batch, scale)
            assert torch.equal(found, attend(q, *(x.to(q.dtype) for x in small), batch, scale))
            output = either(q, keys, values, batch, scale)
            assert torch.equal(output, attend(q, keys, values, batch, scale)) and not torch.equal(output, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [24, 80, 128])
@pytest.mark.parametrize(("kv_dtype", "is_keys"), [(torch.int8, True), (INT4, True), (INT4, False)], ids=str)
def test_the_dequantize_kernel_equals_its_reference(dtype, d, kv_dtype, is_keys):
    """In Triton's interpreter, and on a GPU by ``make test-gpu``."""
    kernel = pytest.importorskip("longdraft.attention.quantized_kv_kernel")
    rows = torch.randn(3, 2, 90, d, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    small, slots = quantized(rows, kv_dtype, is_keys), torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for kv in (small, small.transpose(1, 2)[:, :80].transpose(1, 2)):
        if isinstance(kv, Int4KV):
            name, args = "dequantize_int4_kv", (kv.data, slots, 77, d, is_keys, dtype)
        else:
            name, args = "dequantize_int8_kv", (*kv.tensors, slots, 77, dtype)
        found, expected = (getattr(module, name)(*args) for module in (kernel, quantized_kv))
        assert found.shape == (2, 2, 77, d) and found.dtype == dtype
        step = torch.finfo(dtype).eps  # Triton's interpreter cuts, where a GPU rounds
        torch.testing.assert_close(found, expected, rtol=step, atol=0)
