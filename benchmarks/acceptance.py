"""Acceptance of a draft by tree depth and by context length.

    python benchmarks/acceptance.py FILE... [--draft DIR] [--context N ...] [--rope-factor 2] [--temperature 1]

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
    parser.add_argument("--draft", help="draft folder; the shipped one by default")
    parser.add_argument("--context", type=int, nargs="*", default=[None], help="tokens to cut prompts to")
    parser.add_argument("--limit", type=int, help="rows of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rope-factor", type=float, help="YaRN factor of the target")
    parser.add_argument("--widths", default="4,16,16,16,16")
    parser.add_argument("--nodes", type=int)
    options = parser.parse_args()
    model, tokenizer = longdraft.load(rope_factor=options.rope_factor)
    widths = tuple(int(w) for w in options.widths.split(","))
    drafting = {"draft": options.draft} if options.draft else {}
    spec = longdraft.Speculator(
        "longspec", target=model, tokenizer=tokenizer, widths=widths, nodes=options.nodes, **drafting
    )
    results = []
    print(f"{'data':16} {'context':>8} {'accepted':>8}  by depth 1 .. {len(widths)}")
    for path in options.files:
        for context in options.context:
            samples = read([path], options.limit)
            prompts = [fitted(s, tokenizer, context) for s in samples]
            found = measure(spec, prompts, len(widths), options.max_tokens, options.temperature)
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
