"""Which acceptance keeps more of a draft when text is drawn: one draw from the target a node, or residuals.

    python benchmarks/residual.py FILE [--method small-lm|specextend|heads|tokenswift] [--draft DIR] [--context N]
        [--limit 8] [--max-tokens 64] [--temperature 1] [--shapes 1,1,1,1 2,2,2 4,2] [--dtype bfloat16] [--seeds 2]

FILE is JSONL as `longdraft bench --data` takes it. Each shape is a tree whose nodes have so many children, level by
level. With `draw` the children are the draft's likeliest tokens, and each node's token is drawn from the target; with
`residual` they are drawn from the draft, and accepted by what they were drawn from. Both are exact; a row of the table
says the mean accepted length (new tokens / verifications, bonus included) and the share of rounds in which the first d
levels were accepted, of those that the token budget had room for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import longdraft
from longdraft.bench.data import fitted, read


def measure(spec: longdraft.Speculator, prompts: list[list[int]], limit: int, temperature: float, seeds: int) -> dict:
    """Counts over all prompts, decoded one by one, each ``seeds`` times."""
    depths: list[tuple[int, int]] = []  # accepted tokens, and for how many there was room
    tokens = 0
    for number, prompt in enumerate(prompts * seeds):
        run = spec.stream(prompt, max_new_tokens=limit, sampling=longdraft.Sampling(temperature), seed=number)
        emitted = 0
        for step in run:
            if step.mode != "prefill":
                depths.append((step.accepted, limit - emitted - 1))
                tokens += len(step.token_ids)
            emitted += len(step.token_ids)
    reached = []
    for d in range(1, 6):
        able = [accepted for accepted, room in depths if room >= d]
        reached.append(sum(accepted >= d for accepted in able) / max(1, len(able)))
    return {"rounds": len(depths), "mean_accepted_length": tokens / max(1, len(depths)), "by_depth": reached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", default="small-lm", help="any whose draft can be drawn from")
    parser.add_argument("--draft", help="draft folder; the shipped one by default")
    parser.add_argument("--context", type=int, help="tokens to cut prompts to")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--shapes", nargs="*", default=["1,1,1,1", "2,2,2", "4,2"])
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each prompt")
    options = parser.parse_args()
    model, tokenizer = longdraft.load(dtype=options.dtype)
    prompts = [fitted(s, tokenizer, options.context) for s in read([options.file], options.limit)]
    draft = {"draft": options.draft} if options.draft else {}
    results = []
    print(f"{'shape':10} {'nodes':>5} {'acceptance':10} {'accepted':>8} {'rounds':>6}  by depth")
    for shape in options.shapes:
        widths = tuple(int(w) for w in shape.split(","))
        for acceptance in ("draw", "residual"):
            tree = {"widths": widths} if acceptance == "residual" else {"widths": widths, "tree": "static"}
            spec = longdraft.Speculator(
                options.method, target=model, tokenizer=tokenizer, plan="fixed", acceptance=acceptance, **draft, **tree
            )
            found = measure(spec, prompts, options.max_tokens, options.temperature, options.seeds)
            nodes = sum(_products(widths))
            results.append({"shape": shape, "nodes": nodes, "acceptance": acceptance} | found)
            mean, rounds = found["mean_accepted_length"], found["rounds"]
            shares = " ".join(f"{share:.2f}" for share in found["by_depth"][: len(widths)])
            print(f"{shape:10} {nodes:5} {acceptance:10} {mean:8.2f} {rounds:6}  {shares}", flush=True)
    print(json.dumps(results))


def _products(widths: tuple[int, ...]) -> list[int]:
    found = [1]
    for width in widths:
        found.append(found[-1] * width)
    return found[1:]


if __name__ == "__main__":
    main()
