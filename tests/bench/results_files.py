"""Results files for tests of the report: as the bench writes them, with made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MACHINE = {"cpu": "A Processor", "cores": 2, "threads": 2, "memory_bytes": 2**34, "gpus": []}


def header(names: tuple[str, ...] = ("ar", "longspec", "hf"), **over: Any) -> dict[str, Any]:
    """A header; ``settings`` among ``over`` are merged with those here."""
    settings = {
        "contenders": list(names),
        "options": {},
        "exact": {name: name != "specpv" for name in names},
        "max_tokens": 64,
        "repeats": 2,
        "sampling": {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None},
        "seed": 0,
        **over.pop("settings", {}),
    }
    return {
        "format": "longdraft-bench",
        "version": 1,
        "settings": settings,
        "model": {"name": "some/Model-1B", "dtype": "float32", "device": "cpu", "weights": "x"},
        "drafts": {},
        "prompts": "x",
        "hardware": MACHINE,
        "versions": {"python": "3.12", "torch": "2.11"},
        "notes": {},
        "created": "2026-01-02T03:04:05+00:00",
        "command": "longdraft bench --data file.jsonl",
        **over,
    }


def run(seconds: float, accepted: int = 0) -> dict[str, Any]:
    """64 tokens in so many seconds, every round accepting as many drafted ones."""
    rounds = 63 // (accepted + 1)
    return {
        "tokens": [[1] * 64],
        "first_token_seconds": 2.0,
        "decode_seconds": seconds,
        "rounds": [rounds],
        "early": 0,
        "accepted": [[accepted, 60]] * rounds,
        "partial_rounds": 0,
        "partial_tokens": 0,
        "rolled_back": 0,
    }


def line(
    seconds: dict[str, float],
    context: int | None = 1024,
    dataset: str = "news",
    sample: str = "news.jsonl:1",
    **over: Any,
) -> dict[str, Any]:
    """A batch of one prompt.

    Args:
        seconds: of each contender; ``ar`` and ``hf`` draft nothing.
    """
    accepted = {name: 0 if name in ("ar", "hf") else 2 for name in seconds}
    return {
        "dataset": dataset,
        "context": context,
        "batch": 1,
        "samples": [sample],
        "prompt_tokens": [context or 777],
        "cold": {name: run(s, accepted[name]) for name, s in seconds.items()},
        "rounds": {name: [run(s * f, accepted[name]) for f in (1.0, 1.1)] for name, s in seconds.items()},
        "comparable": [name for name in seconds if name != "specpv"],
        "differences": [],
        "peak_memory_bytes": dict.fromkeys(seconds, 2**30),
        **over,
    }


def write(path: Path, head: dict[str, Any], *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)), encoding="utf-8")
    return path
