"""Profiles rounds of a method: the time of each part, the memory held, and one round's tree.

Measured in rounds of their own, never in those that are timed for tokens/s: the clocks below wait for the device
whenever they are read, which costs a GPU its head start.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.bench.contenders import Job
from longdraft.engine.accept import Accepted
from longdraft.engine.event import Event
from longdraft.engine.loop import Engine
from longdraft.engine.schedule import Verified
from longdraft.memory.prompt_cache import PromptCache
from longdraft.speculator import Speculator

ROUNDS = 16
"""Rounds that are profiled, after one that is not: it pays for what a run does once."""

PARTS = ("draft", "attention", "forward", "rest")
"""A round's parts: the drafter; attention in the target's forward, and the rest of verifying; everything else."""

_DRAFTING = ("propose", "observe")


@dataclass(frozen=True)
class Profile:
    """The profile of a few rounds of one method.

    Attributes:
        rounds: how many.
        seconds: mean seconds a round of each of :data:`PARTS`; a batch's rounds are those of all its sequences.
        prefix_share: share of the keys that attention read that was the prefix; the others are the tree's own.
        memory: bytes of ``weights`` (the target's), ``packed`` (their second copy for few rows on a CPU), ``kv`` and
            ``draft`` (all that the drafter holds: weights, its cache).
        tree: the round whose accepted length is nearest to the mean; None if nothing was drafted.
        prefill_attention: share of the prompts' reading that was the target's attention; None if their KV was kept.
    """

    rounds: int
    seconds: dict[str, float]
    prefix_share: float | None
    memory: dict[str, int]
    tree: dict[str, Any] | None
    prefill_attention: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a results file; see docs/figures.md."""
        return dict(vars(self))


def profile(spec: Speculator, job: Job, cache: PromptCache | None = None, rounds: int = ROUNDS) -> Profile | None:
    """Decodes the job's first rounds with clocks around the parts; None when it ends with the prompts' tokens.

    Args:
        cache: KV of the prompts, so that they need not be read again.
        rounds: profiled at most.
    """
    run = job.started(spec, cache)
    engine = run._engine
    clock = _Clock(engine.runner.device)
    trees: list[_Walked] = []
    seen: list[dict[str, float]] = []
    reading, attending = 0.0, 0.0  # seconds
    with _watched(engine, clock, trees):
        for step in run:
            if step.mode == "prefill":
                reading, attending = reading + step.seconds, attending + clock.take()["attention"]
                trees.clear()
            elif step.seconds:  # the first step of a round carries its time
                parts = clock.take()
                seen.append(parts | {"rest": step.seconds - parts["draft"] - parts["attention"] - parts["forward"]})
                if len(seen) > rounds:
                    break
        memory = _memory(engine)
        run.close()
    kept = seen[1:] or seen
    if not kept:
        return None
    keys = sum(part["prefix keys"] for part in kept), sum(part["keys"] for part in kept)
    return Profile(
        rounds=len(kept),
        seconds={name: mean(part[name] for part in kept) for name in PARTS},
        prefix_share=keys[0] / keys[1] if keys[1] else None,
        memory=memory,
        tree=_typical(trees, spec),
        prefill_attention=attending / reading if reading and cache is None else None,
    )


class _Clock:
    """Seconds inside wrapped functions since the last :meth:`take`; those of a function inside another count once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inside: list[str] = []
        self.counts: dict[str, float] = defaultdict(float)

    def take(self) -> dict[str, float]:
        taken, self.counts = self.counts, defaultdict(float)
        return taken

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.inside(name):
                return function(*arguments, **options)

        return timed

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        outer = self._inside[-1] if self._inside else None
        start = self._now()
        self._inside.append(name)
        try:
            yield
        finally:
            self._inside.pop()
            seconds = self._now() - start
            self.counts[name] += seconds
            if outer is not None:
                self.counts[outer] -= seconds

    def verifying(self) -> bool:
        return "forward" in self._inside

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


# What Schedule.commit was told: a tree with the target's word on it, and where the walk went.
_Walked = tuple[Verified, Accepted]


@contextmanager
def _watched(engine: Engine, clock: _Clock, trees: list[_Walked]) -> Iterator[None]:
    """Clocks around the drafter, the schedule and the target's attention; drafter and schedule are this run's own."""
    drafter, schedule, runner = engine.drafter, engine.schedule, engine.runner
    for name in _DRAFTING:
        setattr(drafter, name, clock.wrapped("draft", getattr(drafter, name)))
    commit, attend = schedule.commit, runner.attend

    def committed(verified: Verified, accepted: Accepted) -> Event:
        trees.append((verified, accepted))
        return commit(verified, accepted)

    def attending(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        scale: float,
        scoring: Scoring = PLAIN,
        /,
    ) -> torch.Tensor:
        if not clock.verifying() and not block.prompt:
            return attend(q, k, v, block, scale, scoring)
        clock.counts["prefix keys"] += sum(block.lengths)
        clock.counts["keys"] += sum(block.lengths) + block.batch * block.width
        with clock.inside("attention"):
            return attend(q, k, v, block, scale, scoring)

    schedule.verify = clock.wrapped("forward", schedule.verify)  # type: ignore[method-assign]
    schedule.commit = committed  # type: ignore[method-assign]
    runner.attend = attending
    runner.whole_layers = False  # a layer in one piece has no attention to time
    try:
        yield
    finally:
        runner.attend = attend
        runner.whole_layers = True


def _typical(trees: list[_Walked], spec: Speculator) -> dict[str, Any] | None:
    """The first sequence's round whose accepted length is nearest to the mean, the earliest of several."""
    own = [(v, accepted) for v, accepted in trees if v.sequence.index == 0 and v.tree.drafted]
    if not own or spec.tokenizer is None:
        return None
    usual = mean(accepted.from_draft for _, accepted in own)
    verified, accepted = min(own, key=lambda found: abs(found[1].from_draft - usual))
    tree = verified.tree
    decode = spec.tokenizer.decode
    return {
        "tokens": [str(decode([token])) for token in tree.tokens],
        "parents": list(tree.parents),
        # A drafter that has no probabilities to offer says 0.0 of every node.
        "log_probs": list(tree.log_probs) if any(tree.log_probs) else None,
        "path": list(accepted.path),
        "bonus": str(decode([accepted.tokens[-1]])),
        "mode": verified.mode,
    }


def _memory(engine: Engine) -> dict[str, int]:
    runner, schedule = engine.runner, engine.schedule
    weights = held_bytes([runner.model])
    return {
        "weights": weights,
        "packed": held_bytes([runner]) - weights,
        "kv": held_bytes([schedule], [runner]),
        "draft": held_bytes([engine.drafter], [runner, schedule]),
    }


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
