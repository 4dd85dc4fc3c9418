"""Compares the next-token distributions of int8 arithmetic with those of float32 arithmetic on the same weights.

    python benchmarks/arithmetic_quality.py --model coder-0.5b=PATH.gguf [--model NAME=PATH ...] --texts FILE.jsonl...
        [--windows 8] [--window 512] [--threads N] [--json OUT]

Texts are cut into windows. In each window 255 positions are scored, those that predict its last 255 tokens; the tokens
before are context. With windows of 512 tokens these are the positions that llama-perplexity scores.

mean  mean over all scored positions of KL(P || Q) in nats, P by float32 arithmetic and Q by int8 arithmetic
p99   99th percentile of the same numbers
top1  share of positions at which P and Q have the same top-1 token

A file is loaded twice, with arithmetic="float32" and "int8". A window is computed by a prefill; with --written the
scored positions are computed as decoding computes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import longdraft
from longdraft.bench import machine
from longdraft.bench.tasks import read_samples
from longdraft.engine.chat import encode
from longdraft.model.runner import TargetRunner

SCORED = 256


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSONL files whose rows have `text`")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 6, 7], help="rows of each file that are used")
    parser.add_argument("--windows", type=int, default=8, help="how many, spread over the texts")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window, above 256")
    parser.add_argument("--written", action="store_true", help="scored positions are computed as decoding does")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    found: dict[str, dict[str, float]] = {}
    for name, path in (each.split("=", 1) for each in args.model):
        found[name] = figures(args, Path(path))
        print(f"{name}:", *(f"{figure} {value:.5g}" for figure, value in found[name].items()), flush=True)
    if args.json:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "settings": str(args)}
        args.json.write_text(json.dumps(about | {"models": found}, indent=1) + "\n", encoding="utf-8")


def windows_of(args: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids (windows, window) as llama-perplexity cuts them, each with BOS first if the tokenizer adds it.

    The beginnings of the texts are joined, each of equal length; a spare window makes up for tokens lost by joining.
    """
    samples = [read_samples([file])[row] for file in args.texts for row in args.rows]
    length = -(-(args.windows + 1) // len(samples)) * args.window
    parts = [tokenizer.decode(encode(tokenizer, s.document)[:length], skip_special_tokens=True) for s in samples]
    token_ids = encode(tokenizer, "\n\n".join(parts))
    if len(token_ids) < args.windows * args.window:
        count = len(token_ids) // args.window
        raise SystemExit(f"The texts give {count} windows, not {args.windows}: give more or longer ones.")
    windows = torch.tensor(token_ids[: args.windows * args.window]).view(args.windows, args.window)
    if token_ids[0] == tokenizer.bos_token_id:
        windows[:, 0] = token_ids[0]
    return windows


def figures(args: Any, path: Path) -> dict[str, float]:
    """The figures of a GGUF file."""
    exact, rounded = (longdraft.load(path, device="cpu", arithmetic=kind) for kind in ("float32", "int8"))
    divergences, same = [], []
    for window in windows_of(args, exact.tokenizer).tolist():
        p, q = (scored(TargetRunner(each.model), window, not args.written) for each in (exact, rounded))
        divergences.append(divergence(p, q))
        same.append(p.argmax(-1) == q.argmax(-1))
    apart, alike = torch.cat(divergences), torch.cat(same).double()
    p99 = float(apart.quantile(0.99))
    return {"mean": float(apart.mean()), "p99": p99, "top1": float(alike.mean()), "rows": len(apart)}


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) at each position of two logits (positions, vocabulary), in nats."""
    exact, other = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1)


def scored(runner: TargetRunner, window: list[int], prompt: bool) -> torch.Tensor:
    """Logits of a window's scored positions."""
    store, context = runner.new_store(1, len(window)), window[:-SCORED]
    runner.forward(store.make_forward_batch([0], [context], is_prefill=True), store, logits="none")
    store.commit(0, range(len(context)))
    logits = runner.forward(store.make_forward_batch([0], [window[-SCORED:]], is_prefill=prompt), store).logits
    assert logits is not None
    return logits[0, :-1]


if __name__ == "__main__":
    main()
