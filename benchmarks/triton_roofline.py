"""Lower bounds of the Triton kernels' times, from the bytes and products of their launches. No GPU is needed.

    python benchmarks/triton_roofline.py [--heads 32 8] [--head-dim 128] [--prefix 32768] [--nodes 64] [--batch 1 8]
        [--card TB_A_SECOND TFLOPS PROCESSORS] [--json]

For one layer's attention in bfloat16, with the splits that the backend chooses for the card's number of processors. A
byte counts once a kernel, whatever the caches hold between two of them. Keys that several tiles of query rows read
count once too, since these tiles run side by side. Time is that of the slower of memory and tensor cores at their peak:
no launch is in it, no softmax, and no tile that is not full. It is a bound, not a forecast.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch
import triton_compiled as compiled

from longdraft.attention import triton_backend


@dataclass(frozen=True)
class Card:
    """Bytes a second of memory and bfloat16 operations a second of the tensor cores, as the vendor states them."""

    name: str
    processors: int
    bandwidth: float
    flops: float


CARDS = [Card("A100", 108, 2.04e12, 312e12), Card("H100", 132, 3.35e12, 989e12)]


@dataclass(frozen=True)
class Work:
    """Bytes that one launch reads and writes, and operations that it computes."""

    kernel: str
    programs: int
    read: int
    written: int
    flops: int

    def seconds(self, card: Card) -> float:
        return max((self.read + self.written) / card.bandwidth, self.flops / card.flops)

    def bound(self, card: Card) -> str:
        return "memory" if (self.read + self.written) / card.bandwidth > self.flops / card.flops else "tensor cores"


def work(launch: compiled.Launch, prefix: int) -> Work:
    """Bytes and operations of a launch: two products of 2 d operations for each query head, row and key."""
    name = launch.kernel.__name__.removesuffix("_kernel")
    programs = 1
    for size in launch.grid:
        programs *= size
    if name == "merge":
        parts, out = launch.args[0], launch.args[2]
        rows = out.numel() // out.shape[3]
        read = 4 * (parts.numel() + parts.shape[0] * rows)
        return Work(name, programs, read, out.numel() * out.element_size(), 0)
    q, keys = launch.args[:2]
    batch, heads, size, d = q.shape
    seen, parts = (prefix, launch.grid[2]) if name == "prefix" else (size, 1)
    read = 2 * batch * keys.shape[1] * seen * d * keys.element_size() + q.numel() * q.element_size()
    read += batch * size * size if name == "block" else 0  # the mask
    return Work(name, programs, read, 4 * parts * batch * heads * size * (d + 1), 4 * batch * heads * size * seen * d)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--card", type=float, nargs=3, metavar=("TB/s", "TFLOP/s", "PROCESSORS"), help="another card")
    parser.add_argument("--json", action="store_true", help="a list of the sums in seconds, not the table")
    args = parser.parse_args()
    cards = CARDS
    if args.card:
        cards = [Card("card", int(args.card[2]), 1e12 * args.card[0], 1e12 * args.card[1])]
    cells = [(card, batch, nodes) for card in cards for batch in args.batch for nodes in args.nodes]
    found = {cell: works(*cell, tuple(args.heads), args.head_dim, args.prefix) for cell in cells}
    if args.json:
        sums = [(cell, sum(w.seconds(cell[0]) for w in own)) for cell, own in found.items()]
        print(json.dumps([{"card": c.name, "batch": b, "nodes": n, "seconds": s} for (c, b, n), s in sums]))
        return
    columns = (
        "card, batch, nodes, kernel, programs, MiB read, MiB written, GFLOP, FLOP a byte, microseconds at least, bound"
    )
    print("| " + " | ".join(columns.split(", ")) + " |")
    print("|---" * 11 + "|")
    for (card, batch, nodes), own in found.items():
        for w in own:
            print(
                f"| {card.name} | {batch} | {nodes} | {w.kernel} | {w.programs} | {w.read / 2**20:.2f} "
                f"| {w.written / 2**20:.2f} | {w.flops / 1e9:.2f} | {w.flops / (w.read + w.written):.0f} "
                f"| {w.seconds(card) * 1e6:.1f} | {w.bound(card)} |"
            )
        total = sum(w.seconds(card) for w in own)
        print(f"| {card.name} | {batch} | {nodes} | together | | | | | | {total * 1e6:.1f} | |")


def works(card: Card, batch: int, nodes: int, heads: tuple[int, int], head_dim: int, prefix: int) -> list[Work]:
    """The work of the launches of one layer's attention on a card."""
    triton_backend._processors = lambda device: card.processors
    compiled.recorded.clear()
    q, keys, values, block = compiled.inputs(torch.bfloat16, head_dim, nodes, nodes > 1, heads, batch, prefix)
    triton_backend.attend(q, keys, values, block, 1.0)
    return [work(launch, prefix) for launch in compiled.recorded]


if __name__ == "__main__":
    main()
