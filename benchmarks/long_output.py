"""Accepted length and speed along one long answer, beside plain decoding behind the same tokens.

    python -m benchmarks.long_output --model coder-1.5b.gguf --data pg19.jsonl --new 30000 -t 1
    python -m benchmarks.long_output --data pg19.jsonl --new 6000 --methods self:lookup=true,tokenswift

The end of the first row's document is continued as it stands, without a chat's template. A line for each part of the
answer: where it ends, tokens/s, accepted length, the share of drafted tokens that were accepted, and tokens/s over
those of plain decoding (``ar``), which goes on for a few tokens from each part's end, from the same KV. The answer goes
on to its last token, whatever the model ends. ``distinct``: different runs of eight tokens over all of them, in the
part; near 0 the answer repeats itself, and any lookup is right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import longdraft
from longdraft import Speculator
from longdraft.bench.data import read
from longdraft.cli.method_options import contender_options
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.chat import encode

NGRAM = 8


def distinct(tokens: list[int]) -> float:
    """Different runs of :data:`NGRAM` tokens over all of them."""
    runs = list(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return len(set(runs)) / len(runs) if runs else 1.0


def parts_of(run: Any, size: int) -> tuple[list[int], list[dict[str, float]]]:
    """Decodes an answer; its tokens and the figures of each part of about ``size`` tokens."""
    answer: list[int] = []
    parts, begun = [], 0
    seconds, rounds, drafted, accepted = 0.0, 0, 0, 0
    for step in run:
        answer += step.token_ids
        if step.mode == "prefill":
            begun = len(answer)
            continue
        seconds, rounds = seconds + step.seconds, rounds + 1
        drafted, accepted = drafted + step.drafted, accepted + step.accepted
        new = len(answer) - begun
        if new >= size or step.finish_reason:
            parts.append({
                "end": len(answer), "tokens_per_second": new / seconds, "accepted_length": new / rounds,
                "right": accepted / drafted if drafted else 0.0, "distinct": distinct(answer[begun:]),
            })  # fmt: skip
            print(f"  {len(answer):,} tokens, {new / seconds:.1f} tokens/s", flush=True)
            begun, seconds, rounds, drafted, accepted = len(answer), 0.0, 0, 0, 0
    return answer, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; the embedded model if left out")
    parser.add_argument("--data", type=Path, required=True, help="JSONL; the first row is taken")
    parser.add_argument("--methods", default="self:lookup=true", help="with commas between")
    parser.add_argument("--context", type=int, default=1000, help="tokens of the text that is continued (1000)")
    parser.add_argument("--new", type=int, default=30_000, help="new tokens (30000)")
    parser.add_argument("--part", type=int, default=4096, help="tokens of a part (4096)")
    parser.add_argument("--plain", type=int, default=32, help="tokens that ar decodes behind each part (32)")
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    parser.add_argument("--rope-factor", type=float, default=None)
    args = parser.parse_args()
    model, tokenizer = longdraft.load(args.model, rope_factor=args.rope_factor, progress=print)
    (sample,) = read([args.data], 1)
    prompt = encode(tokenizer, sample.document)[-args.context :]
    names = args.methods.split(",")
    options = contender_options(names)
    for name in names:
        spec = Speculator(name.partition(":")[0], model, tokenizer, **options.get(name, {}))
        plain = Speculator("ar", model, tokenizer)
        spec.planner()
        cache = PromptCache(spec.feature_layers())
        settings: dict[str, Any] = {"temperature": args.temperature, "seed": 0, "eos_token_ids": (), "cache": cache}
        print(name, flush=True)
        answer, parts = parts_of(spec.stream([prompt], max_new_tokens=args.new, **settings), args.part)
        # From the last on: the kept KV is cut to what each needs.
        for part in reversed(parts):
            before = [*prompt, *answer[: part["end"] - args.plain - 1]]
            (result,) = plain.generate([before], max_new_tokens=args.plain, **settings)
            rate = (result.new_tokens - 1) / result.decode_seconds
            part["ar_tokens_per_second"], part["speedup"] = rate, part["tokens_per_second"] / rate
        for part in parts:
            print(json.dumps({"method": name} | {key: round(x, 3) for key, x in part.items()}), flush=True)


if __name__ == "__main__":
    main()
