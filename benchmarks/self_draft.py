"""How often the target accepts what it drafts itself on a part of its KV, by view, context and budget.

    python benchmarks/self_draft.py FILE... [--context 4000 8000] [--limit 1] [--views streaming snapkv chunks tokens]
        [--budget 512] [--view-dtypes float32 int8] [--depth 4] [--max-tokens 48] [--temperature 1] [--dtype bfloat16]
        [-o name=value ...]

Each FILE is JSONL as `longdraft bench --data` takes it; prompts are cut to each --context and read once for all views.
A row of the table: the share of drafted tokens that were right, of those whose predecessors were (MagicDec's acceptance
rate); new tokens / verifications, bonus included; milliseconds of a draft forward, and of a verification.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import median

import longdraft
from longdraft.bench.data import fitted, read
from longdraft.cli.options import method_options
from longdraft.model.runner import TargetRunner


class Watched:
    """Clocks a target's forwards: those on the full store are verifications, all others draft."""

    def __init__(self, runner: TargetRunner) -> None:
        self._forward = runner.forward
        self.full: object = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, block, store, **options):
        start = time.perf_counter()
        out = self._forward(block, store, **options)
        self.seconds[store is self.full].append(time.perf_counter() - start)
        return out


def measure(spec: longdraft.Speculator, prompts: list[list[int]], caches: list, watched: Watched, options) -> dict:
    """Counts over prompts, decoded one by one; what was read of each is kept in its cache."""
    tried = right = rounds = tokens = 0
    watched.seconds = {True: [], False: []}
    sampling = longdraft.Sampling(temperature=options.temperature) if options.temperature else None
    for seed, (prompt, kept) in enumerate(zip(prompts, caches, strict=True)):
        if kept.store is not None:  # the queries of the last tokens are wanted, so these are read again
            kept.store.truncate(0, max(0, len(prompt) - 64))
            kept.remember(0, prompt)
        run = spec.stream([prompt], max_new_tokens=options.max_tokens, sampling=sampling, seed=seed, cache=kept)
        emitted = 0
        for step in run:
            if step.mode == "prefill":
                watched.full = kept.store
                watched.seconds[True].clear()
            else:
                # The last round has no room for all of a chain.
                room = min(step.drafted, options.max_tokens - emitted - 1)
                tried += min(step.accepted + 1, room)
                right += step.accepted
                rounds += 1
                tokens += len(step.token_ids)
            emitted += len(step.token_ids)
    return {
        "rounds": rounds,
        "acceptance": right / max(1, tried),
        "mean_accepted_length": tokens / max(1, rounds),
        "draft_ms": 1e3 * median(watched.seconds[False] or [0.0]),
        "verification_ms": 1e3 * median(watched.seconds[True] or [0.0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--context", type=int, nargs="*", default=[None], help="tokens to cut prompts to")
    parser.add_argument("--limit", type=int, default=1, help="rows of each file")
    parser.add_argument("--views", nargs="*", default=["streaming", "snapkv", "chunks", "tokens"])
    parser.add_argument("--budget", type=int, nargs="*", default=[512])
    parser.add_argument("--view-dtypes", nargs="*", default=[None], help="of the views; by default the target's")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a chain")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--rope-factor", type=float, help="YaRN factor of the target")
    parser.add_argument("-o", "--option", action="append", default=[], help="of the drafter, name=value")
    options = parser.parse_args()
    model, tokenizer = longdraft.load(dtype=options.dtype, rope_factor=options.rope_factor)
    results = []
    print(
        f"{'data':16} {'context':>8} {'view':>10} {'budget':>7} {'of':>9} {'a token':>8} {'accepted':>9} {'draft':>7} "
        f"{'full':>7}"
    )
    for path in options.files:
        for context in options.context:
            prompts = [fitted(s, tokenizer, context) for s in read([path], options.limit)]
            caches = [longdraft.PromptCache() for _ in prompts]
            mean = round(sum(map(len, prompts)) / len(prompts))
            for view, budget, dtype in product(options.views, options.budget, options.view_dtypes):
                sizes = {"view": view, "budget": budget, "view_dtype": dtype}
                given = method_options("self", options.option) | sizes
                spec = longdraft.Speculator("self", target=model, plan="fixed", depth=options.depth, **given)
                found = measure(spec, prompts, caches, Watched(spec.runner()), options)
                results.append({"data": path.stem, "context": mean} | sizes | found)
                print(
                    f"{path.stem:16} {mean:8} {view:>10} {budget:7} {dtype or '':>9} {found['acceptance']:8.3f} "
                    f"{found['mean_accepted_length']:9.2f} {found['draft_ms']:7.1f} {found['verification_ms']:7.1f}",
                    flush=True,
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
