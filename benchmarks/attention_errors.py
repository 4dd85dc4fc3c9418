"""Measures the error of each attention path against the definition in float32, by dtype and length.

    python benchmarks/attention_errors.py [--lengths 64 1024 8192 32768] [--dtypes float32 bfloat16 float16]
        [--nodes 16] [--heads 8 2] [--head-dim 64] [--paths hybrid ...] [--device cpu]

Two sequences, one of the length and one of a third of it, with a tree of --nodes nodes each; queries, keys and values
are normally distributed and rounded to the dtype before either side sees them. Printed is the largest difference of an
output, and the largest output: averages of many values are small.

On a CPU the kernels of the hybrid path are stand-ins (tests/torch_kernels.py): they round as the real ones do (weights
and outputs to the dtype, sums in float32), so what is checked is all the rest: folding, places, tree and merge. With
TRITON_INTERPRET=1 the Triton path runs in Triton's interpreter, which multiplies bfloat16 in float32.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from longdraft.attention import dispatch, reference
from longdraft.attention.block import Block
from tests import torch_kernels


def case(
    length: int, nodes: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block]:
    """q, keys, values, and a block of binary trees."""
    g = torch.Generator().manual_seed(length)
    mask = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        mask[i] |= mask[(i - 1) // 2]
    q, keys, values = (
        torch.randn(2, h, n, head_dim, generator=g).to(device, dtype)
        for h, n in ((heads[0], nodes), (heads[1], length + nodes), (heads[1], length + nodes))
    )
    return q, keys, values, Block.make([1, 0], [length, length // 3], nodes, mask.expand(2, -1, -1), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 8192, 32768])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 2])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--paths", nargs="+", default=["hybrid", "flash", "triton", "sdpa", "cpu"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device, scale = torch.device(args.device), args.head_dim**-0.5
    cpu = device.type == "cpu"
    print(f"| path | dtype | {' | '.join(f'{n:,}' for n in args.lengths)} |\n|---|---|{'---|' * len(args.lengths)}")
    sizes = dict.fromkeys(args.lengths, 0.0)
    with torch.inference_mode(), torch_kernels.registered() if cpu else nullcontext():
        for name in args.paths:
            for dtype in (getattr(torch, d) for d in args.dtypes):
                if dispatch.unavailable(name, device, dtype, args.head_dim) is not None and not (
                    cpu and name == "hybrid"
                ):
                    continue
                attend, errors = import_module(dispatch.PATHS[name]).attend, []
                for length in args.lengths:
                    *tensors, block = case(length, args.nodes, args.heads, args.head_dim, dtype, device)
                    expected = reference.attend(*(t.float() for t in tensors), block, scale)
                    off = (attend(*tensors, block, scale).float() - expected).abs().max()
                    errors.append(f"{float(off):.1e}")
                    sizes[length] = float(expected.abs().max())
                print(f"| `{name}` | {str(dtype).removeprefix('torch.')} | {' | '.join(errors)} |", flush=True)
    print(f"| largest output | | {' | '.join(f'{x:.2f}' for x in sizes.values())} |")


if __name__ == "__main__":
    main()
