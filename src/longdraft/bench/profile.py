"""Measures the time of each part of a round of drafting and verification.

The clocks of :mod:`~longdraft.model.round_profiler` cost time, so profiled rounds are not those of the timed runs.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from longdraft.bench.contenders import Job
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.round_profiler import RoundProfiler
from longdraft.speculator import Speculator

ROUNDS = 16
"""Default number of profiled rounds. The round before them is left out, as it includes one-time work."""

PARTS = ("draft", "update", "attention", "forward", "rest")
"""Parts of a round: drafting; updating the draft's cache; the target's attention; all else of the target's forward; all
else of the round."""


def profile_job(spec: Speculator, job: Job, cache: PromptCache | None, rounds: int = ROUNDS) -> dict[str, Any] | None:
    """Decodes the first rounds of a job with clocks around the parts.

    Args:
        cache: holds the KV of the prompts; None: a prefill comes first.

    Returns:
        None if the prefill emits all tokens of the job. Otherwise a JSON object. ``rounds``: number of profiled rounds.
        ``seconds``: by part (:data:`PARTS`), mean seconds of a round of the batch. ``draft_forwards``: mean number of
        the draft's forwards in a round. ``prefix_share``: the prefix's share of the keys that attention read; the
        other keys are those of the draft trees.
    """
    generation = job.start(spec, cache)
    engine = generation._engine
    engine.runner.profiler = profiler = RoundProfiler(engine.runner.device)
    profiled: list[dict[str, float]] = []
    num_forwards = 0
    try:
        for step in generation:
            counts = profiler.pop_counts()  # seconds by part, and numbers of keys
            counts["draft forwards"] = engine.drafter.forwards - num_forwards
            num_forwards = engine.drafter.forwards
            if step.mode != "prefill" and step.seconds:  # only the first step of a round has seconds: the whole round's
                profiled.append(counts | {"rest": step.seconds - sum(counts[name] for name in PARTS if name != "rest")})
                if len(profiled) > rounds:
                    break
        generation.close()
    finally:
        engine.runner.profiler = None
    measured = profiled[1:] or profiled
    if not measured:
        return None
    prefix_keys, keys = (sum(counts[name] for counts in measured) for name in ("prefix keys", "keys"))
    return {
        "rounds": len(measured),
        "seconds": {name: mean(counts[name] for counts in measured) for name in PARTS},
        "draft_forwards": mean(counts["draft forwards"] for counts in measured),
        "prefix_share": prefix_keys / keys if keys else None,
    }
