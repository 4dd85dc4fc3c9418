"""What rounding the KV cache costs in quality: what the model says next, on rounded KV and on its own.

Each prompt is answered greedily on KV as it is. Then it is read once for each dtype, and the answer behind it in one
forward: how many of its tokens are the likeliest again, and how far the distributions are apart (Kullback-Leibler
divergence from the exact one, in nats: mean, and largest of any token). Last, each dtype answers by itself: the
share of the answer before the first difference.

    python benchmarks/kv_dtypes.py govreport_4K.jsonl pg19_4K.jsonl --limit 2 --context 4000 --max-tokens 64
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import longdraft
from longdraft import Speculator
from longdraft.bench.data import fitted, read
from longdraft.bench.ties import first_difference


def said(spec: Speculator, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """(tokens of the answer, vocabulary) log-probabilities of what the answer's tokens stand for."""
    runner = spec.runner()
    store, chunk = runner.new_store(1, len(prompt) + len(answer)), 1024
    for start in range(0, len(prompt) - 1, chunk):
        piece = prompt[start : min(start + chunk, len(prompt) - 1)]
        runner.forward(store.block([0], [piece], prompt=True), store, logits="none")
        store.commit(0, range(len(piece)))
    out = runner.forward(store.block([0], [[prompt[-1], *answer[:-1]]]), store)
    assert out.logits is not None
    return out.logits[0].log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=4, help="rows of each file")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rope-factor", type=float, default=None)
    parser.add_argument("--kv-dtypes", nargs="+", default=["bfloat16", "int8"])
    args = parser.parse_args()
    model, tokenizer = longdraft.load(rope_factor=args.rope_factor)
    specs = {name: Speculator("ar", model, tokenizer, kv_dtype=name) for name in (None, *args.kv_dtypes)}
    rows = {name: list[tuple[float, float, float, float]]() for name in args.kv_dtypes}
    for file in args.files:
        for sample in read([file], args.limit)[: args.limit]:
            prompt = fitted(sample, tokenizer, args.context)
            answer = specs[None].generate(prompt, max_new_tokens=args.max_tokens)[0].token_ids
            exact = said(specs[None], prompt, answer)
            for name, found in rows.items():
                other = said(specs[name], prompt, answer)
                apart = (exact.exp() * (exact - other)).sum(-1)
                same = float((other.argmax(-1) == exact.argmax(-1)).float().mean())
                free = specs[name].generate(prompt, max_new_tokens=args.max_tokens)[0].token_ids
                first = first_difference(answer, free)
                share = 1.0 if first is None else first / len(answer)
                found.append((same, float(apart.mean()), float(apart.max()), share))
                print(
                    f"{file.name} {len(prompt):,} tokens, {name}: " + ", ".join(f"{x:.4f}" for x in found[-1]),
                    flush=True,
                )
    print(f"{'':10} same top token, KL mean, KL largest, share of the answer before the first difference")
    for name, found in rows.items():
        same, apart, largest, share = (torch.tensor(column) for column in zip(*found, strict=True))
        figures = f"{same.mean():.4f}  {apart.mean():.5f}  {largest.max():.4f}  {share.mean():.2f}"
        print(f"{name:10} {figures}  ({len(found)} prompts)")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
