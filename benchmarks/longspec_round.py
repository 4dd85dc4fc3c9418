"""Where a LongSpec round spends its time, and the draft's memory, at several context lengths.

    python benchmarks/longspec_round.py FILE [--draft DIR] [--context 512 2048 8064] [--widths 4,16,16,16,16]

One prompt of FILE (JSONL as `longdraft bench --data` takes it), cut to each context length. Milliseconds a round, the
median over rounds, the contexts taken in turn --repeats times:
    draft     forwards of the draft: block and head, without its cross-attention
    cross     the draft's cross-attention to the target's last-layer KV, the one part that grows with the context
    target    the target's forward over the tree
    rest      everything else: tree building, acceptance, commit; "share" is its part of the round
"draft KV" is what the drafter keeps a sequence: its window and the tree's scratch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import longdraft
from longdraft.bench.data import fitted, read
from longdraft.drafters import longspec
from longdraft.model.runner import TargetRunner


class Clock:
    """Seconds spent inside wrapped functions since the last :meth:`take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Wraps the target's forward, the draft's forward, and its cross-attention inside that."""
    forward, expand, cross = TargetRunner.forward, longspec._Round.said, longspec._Round._cross_attend
    TargetRunner.forward = clock.wrap("target", forward)  # type: ignore[method-assign]
    longspec._Round.expand = clock.wrap("expand", expand)  # type: ignore[method-assign]
    longspec._Round._cross_attend = lambda self, *a: clock.wrap("cross", cross(self, *a))  # type: ignore[method-assign]
    try:
        yield
    finally:
        TargetRunner.forward = forward  # type: ignore[method-assign]
        longspec._Round.expand = expand  # type: ignore[method-assign]
        longspec._Round._cross_attend = cross  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--context", type=int, nargs="*", default=[512, 2048, 8064])
    parser.add_argument("--widths", default="4,16,16,16,16")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    model, tokenizer = longdraft.load()
    widths = tuple(int(w) for w in options.widths.split(","))
    drafting = {"draft": options.draft} if options.draft else {}
    spec = longdraft.Speculator(
        "longspec", target=model, tokenizer=tokenizer, plan="fixed", widths=widths, nodes=options.nodes, **drafting
    )
    sample = read([options.file], 1)[0]
    caches = {c: longdraft.PromptCache() for c in options.context}
    prompts = {c: fitted(sample, tokenizer, c) for c in options.context}
    rounds: dict[int, list[dict[str, float]]] = defaultdict(list)
    clock = Clock()
    sizes: dict[int, int] = {}
    with timed(clock):
        for repeat in range(options.repeats + 1):
            for context, prompt in prompts.items():
                run = spec.stream([prompt], max_new_tokens=options.max_tokens, cache=caches[context], eos_token_ids=[])
                for step in run:
                    parts = clock.take()
                    if step.mode == "prefill" or repeat == 0:
                        continue
                    row = {
                        "draft": parts.get("expand", 0.0) - parts.get("cross", 0.0),
                        "cross": parts.get("cross", 0.0),
                        "target": parts["target"],
                        "round": step.seconds,
                    }
                    rounds[context].append(row | {"rest": step.seconds - row["draft"] - row["cross"] - row["target"]})
                window = run._engine.drafter.window  # type: ignore[attr-defined]
                sizes[context] = sum(t.numel() * t.itemsize for t in (window.keys, window.values))
    print(
        f"{'context':>8} {'round':>8} {'draft':>8} {'cross':>8} {'target':>8} {'rest':>8} {'share':>6} {'draft KV':>10}"
    )
    results = []
    for context, rows in rounds.items():
        median = {name: 1000 * statistics.median(row[name] for row in rows) for name in rows[0]}
        share = median["rest"] / median["round"]
        results.append({"context": len(prompts[context]), "rounds": len(rows), "share": share} | median)
        results[-1]["draft_kv_bytes"] = sizes[context]
        print(
            f"{len(prompts[context]):8} {median['round']:8.1f} {median['draft']:8.1f} {median['cross']:8.1f} "
            f"{median['target']:8.1f} {median['rest']:8.1f} {share:6.1%} {sizes[context] / 2**20:7.2f} MiB"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
