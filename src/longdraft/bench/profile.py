"""Profiles rounds of a method: the time of each part.

Measured in rounds of their own, never in those that are timed for tokens/s (:mod:`longdraft.model.round_profiler`).
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from longdraft.bench.contenders import Job
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.round_profiler import RoundProfiler
from longdraft.speculator import Speculator

ROUNDS = 16
"""Rounds that are profiled, after one that is not: it pays for what a run does once."""

PARTS = ("draft", "attention", "forward", "rest")
"""A round's parts: the drafter; attention in the target's forward, and the rest of verifying; everything else."""


def profile_rounds(
    spec: Speculator, job: Job, cache: PromptCache | None, rounds: int = ROUNDS
) -> dict[str, Any] | None:
    """Decodes the job's first rounds with clocks around the parts.

    Args:
        cache: KV of the prompts, so that they need not be read again; None: they are.
        rounds: profiled at most.

    Returns:
        ``rounds``: how many. ``seconds``: mean seconds a round of each of :data:`PARTS`; a batch's rounds are those of
        all its sequences. ``prefix_share``: share of the keys that attention read that was the prefix; the others are
        the tree's own. None when the job ends with the prompts' tokens.
    """
    run = job.start(spec, cache)
    engine = run._engine
    engine.runner.profiler = clock = RoundProfiler(engine.runner.device)
    seen: list[dict[str, float]] = []
    try:
        for step in run:
            parts = clock.pop_counts()
            if step.mode != "prefill" and step.seconds:  # the first step of a round carries its time
                seen.append(parts | {"rest": step.seconds - sum(parts[name] for name in PARTS[:3])})
                if len(seen) > rounds:
                    break
        run.close()
    finally:
        engine.runner.profiler = None
    kept = seen[1:] or seen
    if not kept:
        return None
    keys = sum(part["prefix keys"] for part in kept), sum(part["keys"] for part in kept)
    return {
        "rounds": len(kept),
        "seconds": {name: mean(part[name] for part in kept) for name in PARTS},
        "prefix_share": keys[0] / keys[1] if keys[1] else None,
    }
