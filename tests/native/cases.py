"""Inputs of kernels: trees, keys and values, and weights in every format."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from longdraft.native.quantized_kv import INT4, Int4KV, Int8KV, KVTensor, QuantizedKV
from longdraft.native.quantized_matrix import HALF_DTYPES, QUANT_SIZES, QuantizedMatrix

# Prefixes beside the borders of blocks (128 keys) and segments (512 keys), where a path crosses into the next one.
PREFIXES = st.one_of(st.integers(0, 40), st.integers(110, 135), st.integers(490, 520), st.integers(1000, 1100))
BLOCKS = [kind for kind in QUANT_SIZES if kind not in HALF_DTYPES]

# Offsets of the float16 scales and mins in a quant block.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q4_K", "Q5_K", "Q5_1"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)},
}
# MXFP4's scale is a byte, the exponent of a power of two.
EXPONENTS = {"MXFP4": 0}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(size: int, seed: int, deep: float = 0.5) -> tuple[list[int], torch.Tensor]:
    """Parents and ancestor mask (size, size) of a random tree.

    Args:
        deep: how often a node hangs under the one before it: 1 makes a chain.
    """
    g = generator(seed)
    parents, mask = [-1], torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        chain = float(torch.rand((), generator=g)) < deep
        parents.append(node - 1 if chain else int(torch.randint(node, (), generator=g)))
        mask[node] |= mask[parents[node]]
    return parents, mask


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values stored transposed, as keys are."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def keys_and_values(dtype: torch.dtype, *shape: int, by_row: bool = False, seed: int = 0) -> tuple[KVTensor, KVTensor]:
    """Random keys and values (..., n, d), entries of very different magnitudes, as views of larger tensors."""
    g, (*outer, n, d) = generator(seed), shape
    k, v = (
        torch.randn(*outer, n + 9, d, generator=g) * (0.1 + torch.rand(*outer, n + 9, 1, generator=g)) for _ in "kv"
    )
    if dtype in (torch.int8, INT4):
        k, v = quantized(k, dtype, is_keys=True), quantized(v, dtype, is_keys=False)
        k = k.map(lambda x: transposed(x) if x.dim() == len(shape) else x)  # scales of int8 have no last dimension
    else:
        k, v = (k if by_row else transposed(k.to(dtype))), v.to(dtype)
    first_n = *[slice(None)] * len(outer), slice(n), slice(None)
    return k[first_n], v[first_n]


def quantized(x: torch.Tensor, dtype: torch.dtype, is_keys: bool) -> QuantizedKV:
    return Int4KV.quantize(x, is_keys) if dtype == INT4 else Int8KV.quantize(x)


def rows_of(x: KVTensor, rows: torch.Tensor, keys: bool = False) -> KVTensor:
    """Some entries of (heads, n, d), in the same layout."""
    own = x.index_select(1, rows)
    if not keys or (isinstance(x, torch.Tensor) and x.stride(-1) == 1):
        return own
    if isinstance(own, torch.Tensor):
        return transposed(own)
    return own.map(lambda x: transposed(x) if x.dim() == 3 else x)


def attention(q, k, v, seen, scale, softcap=None, sinks=None):
    """The definition, in float64: q (Hq, T, d), keys and values (Hkv, n, d), seen (T, n)."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.to(torch.float32).double().repeat_interleave(group, 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).float()


def stored(kind: str, outs: int, size: int, seed: int = 0, int8: bool = False) -> QuantizedMatrix:
    """Random bytes, with scales of moderate magnitude."""
    weights, length = QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if kind in HALF_DTYPES:
        halves = torch.from_numpy(rng.standard_normal((outs, size)).astype(np.float16))
        return QuantizedMatrix((halves.bfloat16() if kind == "BF16" else halves).view(torch.uint8), kind, int8)
    data = rng.integers(0, 256, (outs, size // weights, length), dtype=np.uint8)
    for at in SCALES.get(kind, ()):
        data[..., at : at + 2] = rng.standard_normal((outs, size // weights, 1)).astype(np.float16).view(np.uint8)
    if (at := EXPONENTS.get(kind)) is not None:
        data[..., at] = rng.integers(118, 130, (outs, size // weights), dtype=np.uint8)
    return QuantizedMatrix(torch.from_numpy(data.reshape(outs, -1)), kind, int8)


def dequantized_by_gguf(w: QuantizedMatrix) -> torch.Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[w.format]
    return torch.from_numpy(gguf.dequantize(w.data.numpy(), kind).reshape(w.shape).astype(np.float32))


def matrix(form: str, outs: int, size: int, seed: int = 0):
    """A matrix (outs, size) in one of :data:`FORMS`; quantized ones need a multiple of 256."""
    if form == "float32":
        return torch.randn(outs, size, generator=generator(seed))
    kind, _, arithmetic = form.partition(" in ")
    return stored(kind, outs, size, seed, int8=arithmetic == "int8")


FORMS = ["float32", *QUANT_SIZES, *(f"{kind} in int8" for kind in BLOCKS)]
