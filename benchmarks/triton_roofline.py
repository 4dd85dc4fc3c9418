"""Lower bounds of the Triton kernels' times, from the bytes and products of their launches. No GPU is needed.

    python benchmarks/triton_roofline.py [--heads 32 8] [--head-dim 128] [--prefix 32768] [--nodes 64] [--batch 1 8]
        [--card TB_A_SECOND TFLOPS PROCESSORS]

For one layer's attention in bfloat16, with the splits that the backend chooses for the card's number of processors. A
byte counts once a kernel, whatever the caches hold between two of them. Keys that several tiles of query rows read
count once too, since these tiles run side by side. Time is that of the slower of memory and tensor cores at their peak:
no launch is in it, no softmax, and no tile that is not full. It is a bound, not a forecast.
"""

from __future__ import annotations

import argparse
from itertools import product
from math import prod

import torch
import triton_compiled as compiled

from longdraft.attention import triton_backend

# TB/s of memory, bfloat16 TFLOP/s of the tensor cores, as the vendor states them, and processors.
CARDS = {"A100": (2.04, 312, 108), "H100": (3.35, 989, 132)}
COLUMNS = "card", "batch", "nodes", "kernel", "programs", "MiB read", "MiB written", "GFLOP", "microseconds at least"


def work(launch: compiled.Launch, prefix: int) -> tuple[str, int, int, int]:
    """A launch's kernel, bytes that it reads and writes, and operations: two products of 2 d for each query head, row
    and key."""
    name = launch.name
    if name == "merge":
        parts, out = launch.args[0], launch.args[2]
        read = 4 * (parts.numel() + parts.shape[0] * out.numel() // out.shape[3])
        return name, read, out.numel() * out.element_size(), 0
    q, keys = launch.args[:2]
    batch, heads, size, d = q.shape
    seen, parts = (prefix, launch.grid[2]) if name == "prefix" else (size, 1)
    read = 2 * batch * keys.shape[1] * seen * d * keys.element_size() + q.numel() * q.element_size()
    read += batch * size * size if name == "block" else 0  # the mask
    return name, read, 4 * parts * batch * heads * size * (d + 1), 4 * batch * heads * size * seen * d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--card", type=float, nargs=3, metavar=("TB/s", "TFLOP/s", "PROCESSORS"), help="another card")
    args = parser.parse_args()
    cards = {"card": tuple(args.card)} if args.card else CARDS
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for (card, (bandwidth, speed, processors)), batch, nodes in product(cards.items(), args.batch, args.nodes):
        triton_backend._processors = lambda device, n=int(processors): n
        compiled.recorded.clear()
        heads = tuple(args.heads)
        made = compiled.inputs(torch.bfloat16, args.head_dim, nodes, nodes > 1, heads, batch, args.prefix)
        triton_backend.attend(*made, 1.0)
        total = 0.0
        for launch in compiled.recorded:
            name, read, written, flops = work(launch, args.prefix)
            total += (least := max((read + written) / bandwidth, flops / speed) / 1e6)
            sizes = f"{prod(launch.grid)} | {read / 2**20:.2f} | {written / 2**20:.2f} | {flops / 1e9:.2f}"
            print(f"| {card} | {batch} | {nodes} | {name} | {sizes} | {least:.1f} |")
        print(f"| {card} | {batch} | {nodes} | together | | | | | {total:.1f} |")


if __name__ == "__main__":
    main()
