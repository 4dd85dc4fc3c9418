"""Profiles rounds of a method: the time of each part.

The clocks of :mod:`~longdraft.model.round_profiler` cost time, so rounds are profiled in a run of their own.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from longdraft.bench.contenders import Job
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.round_profiler import RoundProfiler
from longdraft.speculator import Speculator

ROUNDS = 16
"""Profiled rounds. One more comes first and is left out, as it includes the run's one-time work."""

PARTS = ("draft", "attention", "forward", "rest")
"""Parts of a round: the drafter; the target's attention; the rest of the target's forward; everything else."""


def profile_job(spec: Speculator, job: Job, cache: PromptCache | None, rounds: int = ROUNDS) -> dict[str, Any] | None:
    """Decodes the first rounds of a job with clocks around the parts.

    Args:
        cache: KV of the prompts; None: a prefill comes first.
        rounds: rounds to profile, at most.

    Returns:
        ``rounds``: number of profiled rounds. ``seconds``: by part (:data:`PARTS`), mean seconds a round of the batch.
        ``prefix_share``: the prefix's share of the keys that attention read; the tree has the other keys. None if the
        job ends with the prefill's tokens.
    """
    run = job.start(spec, cache)
    engine = run._engine
    engine.runner.profiler = profiler = RoundProfiler(engine.runner.device)
    profiled: list[dict[str, float]] = []
    try:
        for step in run:
            parts = profiler.pop_counts()
            if step.mode != "prefill" and step.seconds:  # the first step of a round has the round's time
                profiled.append(parts | {"rest": step.seconds - sum(parts[name] for name in PARTS[:3])})
                if len(profiled) > rounds:
                    break
        run.close()
    finally:
        engine.runner.profiler = None
    counted = profiled[1:] or profiled
    if not counted:
        return None
    prefix_keys, keys = (sum(part[name] for part in counted) for name in ("prefix keys", "keys"))
    return {
        "rounds": len(counted),
        "seconds": {name: mean(part[name] for part in counted) for name in PARTS},
        "prefix_share": prefix_keys / keys if keys else None,
    }
