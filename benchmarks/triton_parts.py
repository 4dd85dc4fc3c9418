"""Compiles the Triton kernels of a layer's parts and prints registers, spills and shared memory. No GPU is needed.

    python benchmarks/triton_parts.py [--targets 80 90 100] [--dtypes bfloat16 float16 float32] [--json FILE]

The launches are those of a layer of Llama-3.1-8B, of Qwen3-8B (heads with norms) and of QwQ-32B. It ends with code 1
where a kernel spills, does not fit a processor, or does not compile.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton_compiled import (
    CAPACITY,
    REGISTERS,
    SHARED,
    SPILLED,
    Launch,
    Offline,
    Recorder,
    usage,
)  # before triton is imported

import torch  # isort: skip
from triton.runtime import driver

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

recorded: list[Launch] = []
FIXED_ORDER = "prefix_sums", "path_sums", "join"
for _module, _names in (
    (gpu_kernels, ("norm", "rope", "silu")),
    (tree_kernel, ("tree",)),
    (fixed_order_kernel, FIXED_ORDER),
):
    for _name in _names:
        setattr(_module, f"{_name}_kernel", Recorder(getattr(_module, f"{_name}_kernel"), recorded))


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Each different launch of a layer, with the first model that makes it."""
    seen = set()
    for name, sizes in MODELS.items():
        recorded.clear()
        for rows in ROWS:
            _layer(dtype, rows, *sizes)
        for launch in recorded:
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


def compiled(launch: Launch, target: int) -> dict[str, Any]:
    """Compiles for one target, as the launch on such a GPU would."""
    driver.set_active(Offline(target))
    made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    registers, spills = usage(made.asm["cubin"])
    warps, shared = made.metadata.num_warps, made.metadata.shared
    fits = registers * 32 * warps <= REGISTERS and shared <= SHARED[target]
    dtype = str(launch.args[0].dtype).removeprefix("torch.")
    row = {"kernel": launch.kernel.__name__, "dtype": dtype, "target": target, "warps": warps, "registers": registers}
    row["fma"] = len(re.findall(r"fma\.rn\.(?:bf16|f16)", made.asm["ptx"]))  # these do not round the product
    return row | {"spills": spills, "shared": shared, "wrong": spills > SPILLED or not fits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, failed = [], []
    print("| kernel | dtype | model | target | warps | registers | spills | shared |\n" + "|---" * 8 + "|")
    for dtype in args.dtypes:
        for model, launch in launches(getattr(torch, dtype)):
            for target in args.targets:
                try:
                    row = compiled(launch, target) | {"model": model}
                except Exception as error:  # whatever a compiler may say
                    failed.append(f"sm_{target} {launch.key}: {error}")
                    print(failed[-1], file=sys.stderr)
                    continue
                rows.append(row)
                cells = ("kernel", "dtype", "model", "target", "warps", "registers", "spills", "shared")
                print("| " + " | ".join(str(row[cell]) for cell in cells) + " |")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "failed": failed}, indent=1))
    return int(bool(failed) or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
