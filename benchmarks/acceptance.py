"""Acceptance of a draft by tree depth and by context length.

    python benchmarks/acceptance.py FILE... [--method longspec|eagle3] [--draft DIR] [--context N ...]
        [--rope-factor 2] [--temperature 1] [--dtype bfloat16] [--nodes N] [-o name=value ...]
        [--widths 4,16 | --depth 7 --top-k 10 | --tree opt --threshold 0.7]

Each FILE is JSONL as `longdraft bench --data` takes it; prompts are cut to each --context. A row of the table:
mean accepted length (new tokens / verifications, bonus included), and for each depth d the share of rounds in which
the first d levels of the tree were accepted. Rounds that the token budget cut short of d levels do not count for d.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import longdraft
from longdraft.bench.data import fitted, read
from longdraft.cli.options import method_options


def measure(spec: longdraft.Speculator, prompts: list[list[int]], depth: int, limit: int, temperature: float) -> dict:
    """Counts over all prompts, decoded one by one."""
    reached, possible = Counter(), Counter()
    rounds = tokens = 0
    for seed, prompt in enumerate(prompts):
        sampling = longdraft.Sampling(temperature=temperature) if temperature else None
        run = spec.stream([prompt], max_new_tokens=limit, sampling=sampling, seed=seed)
        emitted = 0
        for step in run:
            if step.mode != "prefill":
                left = limit - emitted - 1  # levels that the budget had room for
                for d in range(1, min(depth, left) + 1):
                    possible[d] += 1
                    reached[d] += step.accepted >= d
                rounds += 1
                tokens += len(step.token_ids)
            emitted += len(step.token_ids)
    return {
        "prompts": len(prompts),
        "rounds": rounds,
        "mean_accepted_length": tokens / max(1, rounds),
        "by_depth": [reached[d] / max(1, possible[d]) for d in range(1, depth + 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--method", default="longspec", help="any that drafts")
    parser.add_argument("--draft", help="draft folder; the shipped one by default")
    parser.add_argument("--context", type=int, nargs="*", default=[None], help="tokens to cut prompts to")
    parser.add_argument("--limit", type=int, help="rows of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rope-factor", type=float, help="YaRN factor of the target")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--widths", help="of a beam tree; the method's own tree by default")
    parser.add_argument("--tree", help="beam, dynamic or opt")
    parser.add_argument("--depth", type=int, help="of a dynamic or opt tree")
    parser.add_argument("--top-k", type=int, help="of a dynamic or opt tree")
    parser.add_argument("--threshold", type=float, help="of an opt tree")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("-o", "--option", action="append", default=[], help="another option of the method, name=value")
    parser.add_argument("--levels", type=int, default=5, help="depths to show")
    options = parser.parse_args()
    model, tokenizer = longdraft.load(dtype=options.dtype, rope_factor=options.rope_factor)
    widths = tuple(int(w) for w in options.widths.split(",")) if options.widths else None
    given = {
        "draft": options.draft, "widths": widths, "tree": options.tree, "depth": options.depth,
        "top_k": options.top_k, "nodes": options.nodes, "threshold": options.threshold,
    }  # fmt: skip
    drafting = {name: value for name, value in given.items() if value is not None}
    drafting |= method_options(options.method, options.option)
    spec = longdraft.Speculator(options.method, target=model, tokenizer=tokenizer, plan="fixed", **drafting)
    results = []
    print(f"{'data':16} {'context':>8} {'accepted':>8}  by depth 1 .. {options.levels}")
    for path in options.files:
        for context in options.context:
            samples = read([path], options.limit)
            prompts = [fitted(s, tokenizer, context) for s in samples]
            found = measure(spec, prompts, options.levels, options.max_tokens, options.temperature)
            mean = round(sum(map(len, prompts)) / len(prompts))
            results.append({"data": path.stem, "context": mean} | found)
            shares = " ".join(f"{share:.2f}" for share in found["by_depth"])
            print(f"{path.stem:16} {mean:8} {found['mean_accepted_length']:8.2f}  {shares}", flush=True)
    weights = [r["rounds"] * r["mean_accepted_length"] for r in results]
    print(f"{'all':16} {'':8} {sum(weights) / sum(r['rounds'] for r in results):8.2f}  (tokens / rounds over all rows)")
    print(f"{'average':16} {'':8} {sum(r['mean_accepted_length'] for r in results) / len(results):8.2f}  (of the rows)")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
