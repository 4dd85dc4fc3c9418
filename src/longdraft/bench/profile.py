"""Profiles rounds of a method: the time of each part, and the memory held.

Measured in rounds of their own, never in those that are timed for tokens/s (:mod:`longdraft.model.clock`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

import torch
from torch import nn

from longdraft.bench.contenders import Job
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.clock import Clock
from longdraft.speculator import Speculator

ROUNDS = 16
"""Rounds that are profiled, after one that is not: it pays for what a run does once."""

PARTS = ("draft", "attention", "forward", "rest")
"""A round's parts: the drafter; attention in the target's forward, and the rest of verifying; everything else."""


@dataclass(frozen=True)
class Profile:
    """The profile of a few rounds of one method.

    Attributes:
        rounds: how many.
        seconds: mean seconds a round of each of :data:`PARTS`; a batch's rounds are those of all its sequences.
        prefix_share: share of the keys that attention read that was the prefix; the others are the tree's own.
        memory: bytes of ``weights`` (the target's), ``packed`` (their second copy for few rows on a CPU), ``kv`` and
            ``draft`` (all that the drafter holds: weights, its cache).
    """

    rounds: int
    seconds: dict[str, float]
    prefix_share: float | None
    memory: dict[str, int]


def profile(spec: Speculator, job: Job, cache: PromptCache | None = None, rounds: int = ROUNDS) -> Profile | None:
    """Decodes the job's first rounds with clocks around the parts; None when it ends with the prompts' tokens.

    Args:
        cache: KV of the prompts, so that they need not be read again.
        rounds: profiled at most.
    """
    run = job.started(spec, cache)
    engine = run._engine
    engine.runner.clock = clock = Clock(engine.runner.device)
    seen: list[dict[str, float]] = []
    try:
        for step in run:
            parts = clock.take()
            if step.mode != "prefill" and step.seconds:  # the first step of a round carries its time
                seen.append(parts | {"rest": step.seconds - sum(parts[name] for name in PARTS[:3])})
                if len(seen) > rounds:
                    break
        runner, schedule, drafter = engine.runner, engine.schedule, engine.drafter
        weights = held_bytes([runner.model])
        memory = {
            "weights": weights,
            "packed": held_bytes([runner]) - weights,
            "kv": held_bytes([schedule], [runner]),
            "draft": held_bytes([drafter], [runner, schedule]),
        }
        run.close()
    finally:
        engine.runner.clock = None
    kept = seen[1:] or seen
    if not kept:
        return None
    keys = sum(part["prefix keys"] for part in kept), sum(part["keys"] for part in kept)
    return Profile(
        rounds=len(kept),
        seconds={name: mean(part[name] for part in kept) for name in PARTS},
        prefix_share=keys[0] / keys[1] if keys[1] else None,
        memory=memory,
    )


def held_bytes(holders: Iterable[object], but: Iterable[object] = ()) -> int:
    """Bytes of all tensors that these objects of ours hold, each storage once.

    Args:
        but: tensors that these hold do not count: they are shared.
    """
    shared = _storages(but)
    return sum(size for storage, size in _storages(holders).items() if storage not in shared)


def _storages(holders: Iterable[object]) -> dict[int, int]:
    """The bytes of each storage that can be reached without leaving our own classes."""
    found: dict[int, int] = {}
    visited: set[int] = set()
    waiting = list(holders)
    while waiting:
        held = waiting.pop()
        if id(held) in visited:
            continue
        visited.add(id(held))
        if isinstance(held, torch.Tensor):
            if held.is_mkldnn:  # its memory is oneDNN's and cannot be asked for
                found[id(held)] = held.numel() * held.itemsize
            else:
                found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
        elif isinstance(held, nn.Module):
            waiting += [*held.parameters(), *held.buffers()]
        elif isinstance(held, dict):
            waiting += held.values()
        elif isinstance(held, list | tuple | set | frozenset):
            waiting += held
        elif type(held).__module__.startswith("longdraft.") and not isinstance(held, type):
            # A runner's model is what it hosts; its hooks and the like are not ours to walk.
            waiting += getattr(held, "__dict__", {}).values()
    return found
