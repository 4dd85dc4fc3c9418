"""Compiles the Triton kernels and prints their registers, spills and shared memory. No GPU is needed.

    python benchmarks/triton_compiled.py [--targets 80 90 100] [--dtypes bfloat16 float16 float32] [--json FILE]

The launches are those of a layer of Llama-3.1-8B, Qwen3-8B (heads with norms), QwQ-32B and Llama-3.2-1B. The layer runs
on tensors without storage (device "meta"); its launches are recorded, not made, and Triton compiles for each what it
would compile at that launch. Exit code 1: a kernel spills, does not fit a processor, or does not compile.

shared: bytes of a program; programs: how many a processor holds; spills: bytes a thread. A tile is queries x keys.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

# Triton reads it when imported; kernels for the interpreter cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from longdraft.attention import fixed_order_kernel, quantized_kv_kernel, tree_attention_kernel
from longdraft.model.gpu import kernels as gpu_kernels
from longdraft.model.gpu import planes_kernel, top_p_kernel
from longdraft.native.quantized_kv import Int4KV

KIB = 1024
REGISTERS, THREADS, TENSOR_COLUMNS = 65536, 2048, 512  # of a processor
# So many KV entries that offsets exceed 32 bits: kernels with 64-bit offsets are compiled.
CAPACITY = 2**22 + 64
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes a thread that a float32 kernel, which serves for checks only, may spill: two registers.
SPILLED = 8
# Bytes of shared memory of one program at most; a processor has 1 KiB more.
SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}

# Hidden size, MLP's size, query heads, KV heads, head size, norms of heads.
MODELS = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, False),
    "Qwen3-8B": (4096, 12288, 32, 8, 128, True),
    "QwQ-32B": (5120, 27648, 40, 8, 128, False),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, False),
}
ROWS = (1, 64)
# Planes of matrices: bits of a stored weight, weights of a block and of a group (0: no groups), numbers of a scale, and
# how the two weights of a byte lie.
QUANTISED = ((4, 32, 0, 1, 16), (8, 32, 0, 1, 0), (4, 256, 32, 2, 32), (8, 256, 16, 1, 0), (4, 128, 128, 2, 64))

Row = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel with its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def key(self) -> tuple[Any, ...]:
        """Launches with the same key share one compiled kernel."""
        kinds = [str(a.dtype) if isinstance(a, torch.Tensor) else _kind(a) for a in self.args]
        return self.name, *kinds, *sorted((n, str(v)) for n, v in self.options.items())


def _kind(value: int | float) -> str:
    if isinstance(value, float):
        return "float"
    return "1" if value == 1 else f"{'long' if value >= 2**31 else 'int'}{' of 16' if value % 16 == 0 else ''}"


class Recorder:
    """Stands in for a kernel: records launches."""

    def __init__(self, kernel: Any, into: list[Launch]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._into.append(Launch(self._kernel, grid, args, options))


class Offline:
    """Stands in for the driver: a GPU to compile for, without hardware."""

    def __init__(self, target: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", target, 32)
        self.get_current_device = lambda: target
        self.get_current_stream = lambda device: 0


recorded: list[Launch] = []
for module, names in {
    gpu_kernels: ("norm", "rope", "silu"), tree_attention_kernel: ("tree_attention",),
    quantized_kv_kernel: ("dequantize_int8", "dequantize_int4"),
    fixed_order_kernel: ("prefix_attention", "path_attention", "merge_splits"),
    planes_kernel: ("linear",), top_p_kernel: ("top_p",),
}.items():  # fmt: skip
    for name in names:
        setattr(module, f"{name}_kernel", Recorder(getattr(module, f"{name}_kernel"), recorded))


def parts(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """The different launches of a layer's kernels, each with the first model that makes it."""
    recorded.clear()
    seen = set()
    for name, sizes in MODELS.items():
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
    gpu_kernels.silu_and_mul(*empty(1, rows, 2 * mlp).split(mlp, dim=-1))
    keys, numbers = empty(1, kv_heads, CAPACITY, d), empty(1, dtype=torch.int32)
    q, k, v = empty(1, rows, (heads + 2 * kv_heads) * d).split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    cos = empty(1, rows, d)
    top_p_kernel.top_p_threshold(empty(rows, 128_256, dtype=torch.float32), 0.9)
    q = gpu_kernels.rope_and_write_kv(q, k, v, cos, cos, head, head, 1e-6, keys, keys, numbers, numbers, 0)
    if dtype == torch.float32:  # not launched
        return
    # Q4_0, Q8_0, Q4_K, Q6_K; AWQ and GPTQ in groups of 128.
    for bits, block, group, fields, interleave in QUANTISED:
        quants = empty(hidden, hidden * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
        scales = empty(hidden, hidden // block, fields, dtype=torch.int16)
        groups = empty(hidden, hidden // group, fields, dtype=torch.int8) if group else None
        planes_kernel.planes_linear(
            x[0], quants, scales, groups, None, interleave, 8 if block == 32 and bits == 4 else 0
        )
    lse, hidden_rows = empty(1, heads, rows, dtype=torch.float32), empty(1, 1, 1, rows, rows, dtype=torch.float32)
    indices = empty(rows, dtype=torch.int32)
    tree_attention_kernel.merge_tree_attention(q, keys, keys, q, lse, numbers, indices, hidden_rows, d**-0.5)
    quantized_kv_kernel.dequantize_int8_kv(
        empty(1, kv_heads, CAPACITY, d, dtype=torch.int8),
        empty(1, kv_heads, CAPACITY, dtype=torch.float32),
        numbers,
        CAPACITY,
        dtype,
    )
    for is_keys in (True, False):
        data = empty(1, kv_heads, CAPACITY, Int4KV.bytes_of(d, is_keys), dtype=torch.uint8)
        quantized_kv_kernel.dequantize_int4_kv(data, numbers, CAPACITY, d, is_keys, dtype)
    paths, counts = empty(1, rows, rows, dtype=torch.int32), empty(1, rows, dtype=torch.int32)
    fixed_order_kernel.fixed_order_attention(q, keys, keys, numbers, numbers, paths, counts, 65536, d**-0.5)


def compiled(launch: Launch, target: int) -> Row:
    """Compiles a launch for a target. Returns a row of the table."""
    driver.set_active(Offline(target))
    made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    o, ptx, warps, shared = launch.options, made.asm["ptx"], made.metadata.num_warps, made.metadata.shared
    registers, spills = usage(made.asm["cubin"])
    dtype = str(launch.args[0].dtype).removeprefix("torch.")
    # Warps get registers in units of 256; the system adds 1 KiB to each program's shared memory.
    of_a_program = (registers * 32 + 255) // 256 * 256 * warps
    most = [THREADS // (32 * warps), REGISTERS // of_a_program, (SHARED[target] + KIB) // (shared + KIB)]
    if columns := getattr(made.metadata, "tmem_size", 0):
        most.append(TENSOR_COLUMNS // columns)
    return {
        "kernel": launch.name,
        "dtype": dtype,
        "head_dim": o.get("HEAD_DIM", ""),
        "tile": f"{o.get('BLOCK_R', o.get('BLOCK_M', ''))} x {o.get('BLOCK_N', '')}".strip(" x"),
        "target": target,
        "warps": warps,
        "stages": o.get("num_stages", ""),
        "registers": registers,
        "spills": spills,
        "shared": shared,
        "programs": min(most),
        "product": next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), ""),
        "fma": len(re.findall(r"fma\.rn\.(?:bf16|f16)", ptx)),  # these do not round the product
        "wrong": spills > SPILLED * (dtype == "float32") or shared > SHARED[target] or not min(most),
    }


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread; the latter are spills, as the kernels have no arrays."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(TOOLS / "cuobjdump"), "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtypes = [getattr(torch, name) for name in args.dtypes]
    rows: list[Row] = []
    failed: list[str] = []
    found = chain.from_iterable(map(parts, dtypes))
    for (name, launch), target in product(found, args.targets):
        try:
            row = compiled(launch, target) | {"model": name}
        except Exception as error:  # whatever a compiler may say
            failed.append(f"sm_{target} {launch.key}: {error}")
            print(failed[-1], file=sys.stderr)
            continue
        if not rows:
            print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
        rows.append(row)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows, "failed": failed}, indent=1))
    return int(bool(failed) or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
