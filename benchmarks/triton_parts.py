"""Compiles the Triton kernels of a layer's parts and prints registers, spills and shared memory. No GPU is needed.

    python benchmarks/triton_parts.py [--targets 80 90 100] [--dtypes bfloat16 float16 float32] [--json FILE]

The launches are those of a layer of Llama-3.1-8B, of Qwen3-8B (heads with norms) and of QwQ-32B. It ends with code 1
where a kernel spills, does not fit a processor, or does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from triton_compiled import CAPACITY, Launch, compile_all, parser, record  # before triton is imported

import torch  # isort: skip
from longdraft.attention import fixed_order_kernel, tree_kernel
from longdraft.model import gpu_kernels

# Hidden size, MLP's size, query heads, KV heads, head size, norms of heads.
MODELS = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, False),
    "Qwen3-8B": (4096, 12288, 32, 8, 128, True),
    "QwQ-32B": (5120, 27648, 40, 8, 128, False),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, False),
}
ROWS = (1, 64)

recorded = (
    record(gpu_kernels, "norm", "rope", "silu"),
    record(tree_kernel, "tree"),
    record(fixed_order_kernel, "prefix_sums", "path_sums", "join"),
)


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Each different launch of a layer, with the first model that makes it."""
    seen = set()
    for name, sizes in MODELS.items():
        for rows in ROWS:
            _layer(dtype, rows, *sizes)
        for launch in (launch for own in recorded for launch in own):
            if launch.key not in seen:
                seen.add(launch.key)
                yield name, launch


def _layer(
    dtype: torch.dtype, rows: int, hidden: int, mlp: int, heads: int, kv_heads: int, d: int, normed: bool
) -> None:
    """Launches on tensors without storage, of one sequence."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, head = empty(1, rows, hidden), empty(hidden), empty(d) if normed else None
    gpu_kernels.rms_norm(x, weight, 1e-5)
    gpu_kernels.add_rms_norm(x, x, weight, 1e-5)
    gpu_kernels.silu_times(*empty(1, rows, 2 * mlp).split(mlp, dim=-1))
    keys, numbers = empty(1, kv_heads, CAPACITY, d), empty(1, dtype=torch.int32)
    qkv = empty(1, rows, (heads + 2 * kv_heads) * d).split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    cos = empty(1, rows, d)
    q = gpu_kernels.rope_write(*qkv, cos, cos, head, head, 1e-6, keys, keys, numbers, numbers, 0)
    in_int8, scales = keys.to(torch.int8), empty(1, kv_heads, CAPACITY, dtype=torch.float32)
    gpu_kernels.rope_write(*(*qkv, cos, cos, head, head, 1e-6, in_int8, in_int8, numbers, numbers, 0, scales, scales))
    if dtype == torch.float32:  # not launched
        return
    lse, hidden_rows = empty(1, heads, rows, dtype=torch.float32), empty(1, 1, 1, rows, rows, dtype=torch.float32)
    tree_kernel.with_tree(q, keys, keys, q, lse, empty(rows, dtype=torch.int32), hidden_rows, d**-0.5)
    paths, counts = empty(1, rows, rows, dtype=torch.int32), empty(1, rows, dtype=torch.int32)
    fixed_order_kernel.fixed_order_attention(q, keys, keys, numbers, numbers, paths, counts, 65536, d**-0.5)


if __name__ == "__main__":
    args = parser(__doc__).parse_args()
    sys.exit(compile_all((each for dtype in args.dtypes for each in launches(getattr(torch, dtype))), args))
