"""Runs the bench on samples."""

from __future__ import annotations

from typing import Any

from longdraft.bench.prompts import encode_prompts, make_batches
from longdraft.bench.run import BatchResult, Bench
from longdraft.bench.settings import Settings


def settings(**over: Any) -> Settings:
    return Settings(**({"max_tokens": 8, "repeats": 1} | over))


def measured(loaded, wanted: Settings, samples, extra=(), **options: Any) -> tuple[Bench, list[BatchResult]]:
    """A bench with further contenders, and its result of every batch."""
    bench = Bench(loaded, wanted, **options)
    bench.contenders |= {contender.name: contender for contender in extra}
    groups, _ = make_batches(encode_prompts(samples, loaded, wanted), wanted.batches)
    return bench, [bench.measure(group) for group in groups]
