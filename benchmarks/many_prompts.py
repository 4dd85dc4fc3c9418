"""A list of prompts of mixed lengths: with the batch always full, in batches that wait for their last, one by one.

    python benchmarks/many_prompts.py govreport_1K.jsonl qmsum.jsonl --prompts 48 --batch 8

Prompts are the beginnings of the files' texts, 32 to 512 tokens; outputs have 8 to 128 tokens. Printed: seconds for the
whole list, prompts read included, medians of alternating runs, and new tokens of all prompts over these seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import longdraft
from longdraft.bench.data import fitted, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=["ar", "prompt-lookup", "default"])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    loaded, rng = longdraft.load(progress=print), random.Random(0)
    texts = [fitted(sample, loaded.tokenizer, None) for sample in read(options.files)]
    requests = [
        longdraft.Request(texts[i % len(texts)][: rng.randint(32, 512)], rng.randint(8, 128), eos_token_ids=[])
        for i in range(options.prompts)
    ]
    size = options.batch
    tokens = sum(r.max_new_tokens for r in requests)
    print(f"{len(requests)} prompts of {sum(len(r.prompt) for r in requests)} tokens, {tokens} new tokens")
    for name in options.methods:
        method = None if name == "default" else name
        spec = longdraft.Speculator(method, target=loaded.model, tokenizer=loaded.tokenizer)
        spec.generate(requests[:1])  # what is done once
        ways = {"full batch": (len(requests), size), "batch by batch": (size, size), "one by one": (len(requests), 1)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        outputs = set()
        for i in range(options.repeats):
            for way in list(ways) if i % 2 == 0 else list(reversed(ways)):
                start = time.perf_counter()
                together, at_a_time = ways[way]
                lists = [requests[j : j + together] for j in range(0, len(requests), together)]
                results = [r for each in lists for r in spec.generate(each, batch=at_a_time)]
                seconds[way].append(time.perf_counter() - start)
                outputs.add(tuple(tuple(r.token_ids) for r in results))
        for way, found in seconds.items():
            median = statistics.median(found)
            print(f"{name:14} {way:15} {median:6.1f} s {tokens / median:7.1f} tokens/s")
        print(f"{name:14} {len(outputs)} different outputs")


if __name__ == "__main__":
    main()
