"""From which length hybrid tree attention pays: prefix without a mask, tree with one, against one masked attention.

    python benchmarks/hybrid_attention.py [--heads 9 3] [--head-dim 64] [--nodes 50] [--dtype float32]
        [--context 64 256 1024 2048 4096 8192] [--device cpu] [--repeats N] [--json FILE]

Milliseconds of one layer's attention over a tree of --nodes nodes: medians of runs that take turns.
    hybrid    this machine's path (`longdraft doctor` names it): K and V read once per KV head, a mask on the tree alone
    masked    torch's scaled_dot_product_attention over all of it under one boolean mask, K and V repeated for the
              heads of a group, as transformers does it
SpecExtend switches to hybrid attention above 4K tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from longdraft.attention import dispatch
from longdraft.attention.block import Block


def ancestors(nodes: int) -> torch.Tensor:
    """(1, nodes, nodes) mask of a binary tree in breadth-first order."""
    mask = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        mask[i] |= mask[(i - 1) // 2]
    return mask[None]


def timed(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    heads, kv_heads = args.heads
    path, attend = dispatch.resolve(device, dtype, args.head_dim)
    scale = args.head_dim**-0.5
    rows = []
    for context in args.context:
        capacity = context + args.nodes
        q = torch.randn(1, heads, args.nodes, args.head_dim, dtype=dtype, device=device)
        k, v = (torch.randn(1, kv_heads, capacity, args.head_dim, dtype=dtype, device=device) for _ in range(2))
        own = k
        if dispatch.prefers_transposed_keys(path, dtype):
            own = k.transpose(2, 3).contiguous().transpose(2, 3)
        block = Block.make([0], [context], args.nodes, ancestors(args.nodes), device)
        seen = torch.cat([torch.ones(args.nodes, context, dtype=torch.bool), ancestors(args.nodes)[0]], 1).to(device)

        def hybrid(own: torch.Tensor = own, q: torch.Tensor = q, v: torch.Tensor = v, b: Block = block) -> torch.Tensor:
            return attend(q, own, v, b, scale)

        def masked(
            k: torch.Tensor = k, q: torch.Tensor = q, v: torch.Tensor = v, seen: torch.Tensor = seen
        ) -> torch.Tensor:
            all_k, all_v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            return F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=seen, scale=scale)

        with torch.inference_mode():
            torch.testing.assert_close(hybrid(), masked(), atol=3e-2 if dtype != torch.float32 else 1e-4, rtol=1e-2)
            times: dict[str, list[float]] = {"hybrid": [], "masked": []}
            for turn in range(args.repeats + 2):
                for name, call in (("hybrid", hybrid), ("masked", masked)):
                    taken = timed(call, device)
                    if turn > 1:
                        times[name].append(taken)
        found = {name: statistics.median(t) for name, t in times.items()}
        rows.append({"context": context, **found, "ratio": found["masked"] / found["hybrid"]})

    table = Table(title=f"{path}, {args.dtype}, {heads}/{kv_heads} heads of {args.head_dim}, {args.nodes} nodes")
    for head in ("context", "hybrid, ms", "masked, ms", "masked / hybrid"):
        table.add_column(head, justify="right")
    for r in rows:
        table.add_row(f"{r['context']:,}", f"{r['hybrid']:.2f}", f"{r['masked']:.2f}", f"{r['ratio']:.2f}")
    console = Console()
    console.print(table)
    losing = [r["context"] for r in rows if r["ratio"] < 1]
    console.print(
        f"Hybrid attention is slower up to {max(losing):,} tokens." if losing else "Hybrid attention is never slower."
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
