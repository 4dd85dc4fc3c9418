"""Compiles the Triton kernels and prints their registers, spills and shared memory. No GPU is needed.

    python benchmarks/triton_compiled.py [--targets 80 90 100] [--dtypes bfloat16 float16 float32] [--heads 64 128]
                                         [--sizes 1 4 8 64] [--defaults] [--json FILE]

The launches are those of the backend itself: it is called on tensors without storage (device "meta"), its launches are
recorded instead of made, and Triton compiles exactly what it would at that launch.
Every tile that the tuner may try is among them, unless --defaults. It ends with code 1 where a kernel spills, does not
fit a processor, or does not compile.

A cell says registers a thread, shared memory a program in KiB, and how many programs a processor holds at once. A tile
is query rows x keys, and for the merge output rows x parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Read when triton is imported: a kernel that the interpreter runs is none that a compiler can take.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from longdraft.attention import triton_backend, triton_tuning
from longdraft.attention.block import Block, Scoring
from longdraft.attention.triton_tuning import Kind
from longdraft.native.scaled import Scaled

KIB = 1024
KERNELS = ("prefix", "block", "merge")
REGISTERS, THREADS, TENSOR_COLUMNS = 65536, 2048, 512  # of a processor
QUERY_HEADS, KV_HEADS = 32, 8
# So many rows that a slot's offset does not fit 32 bits any more: the larger of two kinds of offset is compiled.
CAPACITY, PREFIX = 2**22 + 64, 32768
# Rows of a tree: with the heads of a group folded, a tile of 16 rows (for one row and for several), 32 and 64.
SIZES = (1, 4, 8, 64)
SPLITS = (1, 3, 7, 15, 31, 63)
# What a kernel computes besides, and the flag that says so.
MORE = {"int8": "SCALED", "windows": "WINDOWED", "caps": "CAPPED", "sinks": "WITH_SINKS"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


# Bytes a thread that the kernels below may spill: two registers.
SPILLED = 8
# Bytes of shared memory that one program may have; a processor has a KiB more.
SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel as the backend asks for it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Launches with the same key share one compiled kernel."""
        kinds = [str(a.dtype) if isinstance(a, torch.Tensor) else _kind(a) for a in self.args]
        return self.kernel.__name__, *kinds, *sorted((n, str(v)) for n, v in self.options.items())


def _kind(value: int | float) -> str:
    if isinstance(value, float):
        return "float"
    return "1" if value == 1 else f"{'long' if value >= 2**31 else 'int'}{' of 16' if value % 16 == 0 else ''}"


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target; bytes a program, ``spills`` in bytes a thread."""

    kernel: str
    target: int
    dtype: str
    head_dim: int
    tile: str
    mask: str
    more: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    tensor_columns: int
    product: str

    @property
    def programs(self) -> int:
        """Programs that a processor holds at once."""
        threads = 32 * self.warps
        # Registers are given out to warps by 256, and each program's shared memory has a KiB more for the system's use.
        of_a_program = (self.registers * 32 + 255) // 256 * 256 * self.warps
        most = [THREADS // threads, REGISTERS // of_a_program]
        most.append((SHARED[self.target] + KIB) // (self.shared + KIB))
        if self.tensor_columns:
            most.append(TENSOR_COLUMNS // self.tensor_columns)
        return min(most)

    @property
    def wrong(self) -> str:
        """Problems that keep the kernel from running, or from running well."""
        # float32 is there to check by, and one merge of head size 256 spills; for sm_100 two kernels that read eight
        # bits and cap scores do.
        may = self.dtype == "float32" or (self.target, self.more) == (100, "int8 caps")
        found = [f"spills {self.spills} bytes a thread"] if self.spills > SPILLED * may else []
        if self.shared > SHARED[self.target]:
            found.append(f"{self.shared} bytes of shared memory")
        elif not self.programs:
            found.append(f"{self.registers} registers for {32 * self.warps} threads")
        return ", ".join(found)


class Recorder:
    """In a kernel's place: keeps what would be launched."""

    def __init__(self, kernel: Any, into: list[Launch]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._into.append(Launch(self._kernel, grid, args, options))


class Offline:
    """In the driver's place: a GPU to compile for that is not there."""

    def __init__(self, target: int) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target, 32)


recorded: list[Launch] = []
for _name in (f"{kernel}_kernel" for kernel in KERNELS):
    setattr(triton_backend, _name, Recorder(getattr(triton_backend, _name), recorded))
triton_backend._processors = lambda device: 132


def inputs(
    dtype: torch.dtype,
    head_dim: int,
    size: int,
    tree: bool,
    heads: tuple[int, int] = (QUERY_HEADS, KV_HEADS),
    batch: int = 1,
    prefix: int = PREFIX,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block]:
    """q as a model has it (heads inside rows), keys and values as the store has them, and the block."""
    q = torch.empty(batch, size, heads[0], head_dim, dtype=dtype, device="meta").transpose(1, 2)
    keys = torch.empty(batch, heads[1], CAPACITY, head_dim, dtype=dtype, device="meta")
    mask = torch.ones(batch, size, size, dtype=torch.bool) if tree else None
    return q, keys, keys, Block.make(range(batch), [prefix] * batch, size, mask, "meta")


def in_int8(rows: torch.Tensor) -> Scaled:
    """Rows like these of a store in eight bits."""
    return Scaled(rows.to(torch.int8), torch.empty(rows.shape[:-1], device="meta"))


def launches(dtype: torch.dtype, head_dim: int, sizes: list[int], defaults: bool) -> list[Launch]:
    """Every launch that the backend may make for a dtype and a head size, each once."""
    recorded.clear()
    # In float32, which is there to check by, heads of 256 spill with eight bits: slow, and not wrong.
    with_int8 = dtype != torch.float32 or head_dim <= 128
    for size in sizes:
        q, keys, values, block = inputs(dtype, head_dim, size, tree=size > 1)
        launched = triton_backend.Inputs(q, keys, values, block.slots_t, block.lengths_t, 1.0)
        default = triton_backend._choice(launched)
        kind = Kind("", head_dim, launched.tiles[0], str(dtype), triton.__version__)
        # float32 is never tuned.
        tuned = [default] if defaults or q.element_size() != 2 else triton_tuning.candidates(kind, default)
        for choice in tuned:
            with replaced("_choice", lambda inputs, choice=choice: choice):
                triton_backend.attend(q, keys, values, block, 1.0)
        if with_int8:
            triton_backend.attend(q, in_int8(keys), in_int8(values), block, 1.0)
        q, keys, values, block = inputs(dtype, head_dim, size, tree=False)
        triton_backend.attend(q, keys, values, block, 1.0)
        if with_int8:
            triton_backend.attend(q, in_int8(keys), in_int8(values), block, 1.0)
        scoring = Scoring(30.0, torch.empty(QUERY_HEADS, device="meta"))
        for tree in {False, size > 1}:
            q, keys, values, block = inputs(dtype, head_dim, size, tree)
            windows = torch.zeros(1, size, dtype=torch.int32, device="meta")
            triton_backend.attend(q, keys, values, replace(block, begins=windows), 1.0, scoring)
            if with_int8:
                triton_backend.attend(q, in_int8(keys), in_int8(values), block, 1.0, scoring)
    if 1 in sizes:  # Triton makes constants of numbers that are 1: all at once
        q, keys, values, block = inputs(dtype, head_dim, 1, tree=False, heads=(1, 1))
        with replaced("_choose_splits", lambda *args: 1):
            triton_backend.attend(q, keys, values, replace(block, offset=1), 1.0)
    q, keys, values, block = inputs(dtype, head_dim, sizes[-1], tree=True)
    for splits in () if defaults else SPLITS:
        with replaced("_choose_splits", lambda *args, splits=splits: splits):
            triton_backend.attend(q, keys, values, block, 1.0)
        triton_backend.prefix_attention(q, keys, values, block.slots_t, block.lengths_t, 1.0, PREFIX, splits)
    return list({launch.key: launch for launch in recorded}.values())


@contextmanager
def replaced(name: str, by: Callable[..., Any]) -> Iterator[None]:
    """The backend with one of its decisions made here."""
    own = getattr(triton_backend, name)
    setattr(triton_backend, name, by)
    try:
        yield
    finally:
        setattr(triton_backend, name, own)


def compile_for(launch: Launch, target: int) -> Compiled:
    """Compiles for one target, as the launch on such a GPU would."""
    driver.set_active(Offline(target))
    made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    o, ptx = launch.options, made.asm["ptx"]
    registers, spills = usage(made.asm["cubin"])
    merge = "BLOCK_P" in o
    return Compiled(
        kernel=launch.kernel.__name__.removesuffix("_kernel"),
        target=target,
        dtype=str(launch.args[2 if merge else 0].dtype).removeprefix("torch."),
        head_dim=o["HEAD_DIM"],
        tile=f"{o['BLOCK_R']} x {o['BLOCK_P']}" if merge else f"{o['BLOCK_M']} x {o['BLOCK_N']}",
        mask={None: "", True: "causal", False: "tree"}[o.get("CAUSAL")],
        more=" ".join(name for name, flag in MORE.items() if o.get(flag)),
        warps=made.metadata.num_warps,
        stages=o.get("num_stages", 0),
        registers=registers,
        spills=spills,
        shared=made.metadata.shared,
        tensor_columns=getattr(made.metadata, "tmem_size", 0) or 0,
        product=next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), ""),
    )


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread: of the latter a kernel without arrays has only what it spills."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(TOOLS / "cuobjdump"), "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def table(rows: list[Compiled]) -> Iterator[str]:
    """Markdown: kernels and tiles down, targets across. Of variants with the same tile (one row, several) the worst."""
    targets = sorted({row.target for row in rows})
    cells: dict[tuple[Any, ...], dict[int, Compiled]] = {}
    for row in sorted(rows, key=lambda row: (KERNELS.index(row.kernel), bool(row.wrong), row.registers)):
        own = (row.kernel, row.dtype, row.head_dim, row.tile, row.mask, row.more, row.warps, row.stages or "")
        cells.setdefault(own, {})[row.target] = row
    columns = [
        "kernel",
        "dtype",
        "head size",
        "tile",
        "mask",
        "besides",
        "warps",
        "stages",
        *(f"sm_{t}" for t in targets),
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for own in sorted(cells, key=lambda own: (KERNELS.index(own[0]), *own[1:3], [int(x) for x in own[3].split(" x ")])):
        found = [cells[own].get(target) for target in targets]
        yield "| " + " | ".join([*(str(x) for x in own), *("" if row is None else _cell(row) for row in found)]) + " |"


def _cell(row: Compiled) -> str:
    return f"{row.registers}, {row.shared / KIB:.0f} KiB, {row.programs}" + (f" **{row.wrong}**" if row.wrong else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--defaults", action="store_true", help="only what is launched where nothing was tuned")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, failed = [], []
    for dtype in args.dtypes:
        for head_dim in args.heads:
            for launch in launches(getattr(torch, dtype), head_dim, args.sizes, args.defaults):
                for target in args.targets:
                    try:
                        rows.append(compile_for(launch, target))
                    except Exception as error:  # whatever a compiler may say
                        failed.append(f"sm_{target} {launch.key}: {error}")
                        print(failed[-1], file=sys.stderr)
    print("\n".join(table(rows)))
    if args.json:
        content = [asdict(row) | {"programs": row.programs, "wrong": row.wrong} for row in rows]
        args.json.write_text(json.dumps({"triton": triton.__version__, "rows": content, "failed": failed}, indent=1))
    return int(bool(failed) or any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
