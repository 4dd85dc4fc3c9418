"""Runs of the bench from samples to measurements."""

from __future__ import annotations

from typing import Any

from longdraft.bench.prompts import grid, prepare
from longdraft.bench.run import Bench, Measured
from longdraft.bench.settings import Settings


def settings(**over: Any) -> Settings:
    return Settings(**({"max_tokens": 8, "repeats": 1} | over))


def measured(loaded, wanted: Settings, samples, extra=(), **options: Any) -> tuple[Bench, list[Measured]]:
    """A bench, with further contenders, and its figures of every batch."""
    bench = Bench(loaded, wanted, **options)
    bench.contenders |= {contender.name: contender for contender in extra}
    groups, _ = grid(prepare(samples, loaded, wanted), wanted.batches)
    return bench, [bench.measure(group) for group in groups]
