"""Prompts that share a prefix, on models with recurrent layers, whose states cannot be cut: checkpoints are kept."""

from __future__ import annotations

import contextlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft import PromptCache, Request, Result, Speculator
from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info, recurrent
from longdraft.serve.disk_prompt_cache import DiskPromptCache
from tests.support.recurrent_models import KINDS, recurrent_model, some_prompt
from tests.support.slow_marks import slow_except
from tests.support.tiny import tiny_tokenizer

NEW, PIECE = 12, 16
every_kind = pytest.mark.parametrize("family", slow_except(KINDS, ("qwen3_5_text", "lfm2")))


@cache
def speculator(family: str = "qwen3_5_text") -> Speculator:
    return Speculator("prompt-lookup", target=recurrent_model(family), plan="fixed", min_n=1)


@cache
def fresh(family: str, prompt: tuple[int, ...]) -> list[int]:
    """The text of a new engine."""
    return speculator(family).generate(Request([*prompt], max_new_tokens=NEW))[0].token_ids


class Engine:
    """Slots that read prompts in short chunks, and all results."""

    def __init__(self, family: str = "qwen3_5_text", slots: int = 1, **cache: Any) -> None:
        self.family, self.results = family, list[Result]()
        prompt_cache = cache.get("cache") or PromptCache(**cache)
        self.session = speculator(family).session(slots, context=700, cache=prompt_cache, piece=PIECE)

    def read(self, *prompts: list[int]) -> list[int]:
        """Decodes prompts together, which get the text of a new engine. Returns how many tokens of each were cached."""
        texts = [fresh(self.family, tuple(prompt)) for prompt in prompts]
        # What is predicted is right but for every fourth token.
        predicted = [[x if i % 4 else 60 - x for i, x in enumerate(text, 1)] for text in texts]
        requests = [Request(p, max_new_tokens=NEW, predicted=x) for p, x in zip(prompts, predicted, strict=True)]
        indices = [self.session.add(request) for request in requests]
        while self.session.busy:
            self.session.step()
        results = [self.session.take(index) for index in indices]
        assert [r.token_ids for r in results] == texts
        self.results += results
        assert 0 < sum(r.accepted for r in self.results) < sum(r.drafted for r in self.results)
        return [r.cached_tokens for r in results]

    def ask(self, prompt: list[int], cached_tokens: int) -> list[int]:
        """Returns a prompt and its text. ``cached_tokens``: how many of its tokens are cached."""
        assert self.read(prompt) == [cached_tokens]
        return [*prompt, *self.results[-1].token_ids]


@every_kind
@pytest.mark.parametrize("between", [0, 2])
def test_a_turn_reads_what_is_new_whatever_was_asked_between(family: str, between: int) -> None:
    engine, text, cached = Engine(family, tree_bytes=1 << 22), some_prompt(150), 0
    for turn in range(3):
        text = engine.ask(text, cached)
        cached = len(text) - 1  # the last token of an answer has not been fed yet
        for other in range(between):
            engine.read(some_prompt(100, seed=10 * turn + other + 2))
        text = [*text, *some_prompt(11, seed=turn)]


@every_kind
def test_an_edited_turn_starts_from_the_end_of_the_turn_before(family: str) -> None:
    engine = Engine(family)
    text = engine.ask(some_prompt(50), 0)
    for question in ([1, 2, 3], [7, 5], [9] * 10, [1, 2, 4]):
        engine.ask([*text, *question], len(text) - 1)


@every_kind
def test_a_prompt_whose_end_the_template_writes_in_another_way(family: str) -> None:
    """The generation prompt is gone in the next turn, and so is the reasoning: the chunk's end before it is kept."""
    engine, text = Engine(family, tree_bytes=1 << 22), some_prompt(500)
    for between in (False, True):
        engine.read(text)
        if between:
            engine.read(some_prompt(90, seed=2))
        kept = len(text) - 4
        text = [*text[:kept], *some_prompt(60, seed=5)]
        engine.ask(text, kept // PIECE * PIECE)


@every_kind
@pytest.mark.parametrize("tree_bytes", [0, 1 << 24])
def test_a_part_of_a_long_prompt_is_read_from_the_last_checkpoint_in_it(
    family: str, tree_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CHECKPOINT_SPACING", 32)
    engine, text, parts = Engine(family, tree_bytes=tree_bytes), some_prompt(600), [590, 333, 200, 70]
    engine.read(text)
    for shared in reversed(parts) if tree_bytes else parts:  # without a tree a slot loses what is behind a part
        (cached,) = engine.read([*text[:shared], 60, 60])
        assert shared - 32 - PIECE < cached <= shared


def test_a_few_checkpoints_are_kept_where_memory_is_short(free_memory: Any) -> None:
    text, found = some_prompt(600), []
    for free, needed in ((1 << 30, 0), (100_000, 0), (1 << 30, 1 << 31)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrent, "CHECKPOINT_SPACING", 32)
            free_memory(1 << 30)
            engine = Engine()
            engine.read(some_prompt(16))  # the slot is there
            free_memory(free)
            engine.read(text)
            with pytest.raises(MemoryBudgetError) if needed else contextlib.nullcontext():
                memory_info.require_bytes(needed, torch.device("cpu"), "Something else")
            found.append(engine.read([*text[:500], 60])[0])
    assert found[:2] == [496, 336] and 0 < found[2] < 496


def test_a_tree_keeps_what_was_used_last() -> None:
    texts, found = [some_prompt(150, seed=i) for i in range(4)], []
    for tree_bytes in (300_000, 1 << 24):
        engine = Engine(tree_bytes=tree_bytes)
        for text in (*texts, texts[0], texts[3], texts[0]):
            engine.read(text)
        found.append([result.cached_tokens for result in engine.results[4:]])
    assert found == [[0, 144, 144], [144, 144, 144]]


def test_a_slot_is_chosen_and_copied_by_where_its_states_are() -> None:
    engine, text = Engine(slots=2), some_prompt(200)
    engine.read([*text[:100], 3, 4], text)
    assert engine.read([*text[:100], 5], [*text[:180], 6]) == [96, 176]
    engine, text, other = Engine(slots=2), some_prompt(50), some_prompt(35, seed=2)
    engine.read(text, other)
    assert engine.read([*text[:15], 60]) == [0]  # in the other's slot, as the text has no checkpoint so early
    assert engine.read([*text, 5]) == [50]


# --- on disk ---


def test_snapshots_have_the_checkpoints_and_stay_in_their_limit(tmp_path: Path) -> None:
    text, fingerprint = some_prompt(400), speculator().runner().fingerprint

    def open_cache(limit: int = 1 << 30) -> DiskPromptCache:
        return DiskPromptCache(tmp_path, fingerprint, limit, 8)

    first = open_cache()
    Engine(cache=first).read(text)
    assert first.save_next()
    (file,) = tmp_path.glob("*.safetensors")
    for prompt, cached in (([*text, 5], 400), ([*text[:-4], 5], 384)):
        Engine(cache=open_cache()).ask(prompt, cached)
    part, engine = [*text[:143], 5], Engine(cache=open_cache())
    engine.read([*text[:140], 9])
    assert engine.read(part) == [128]  # the slot has more of it than the file can restore
    small = open_cache(file.stat().st_size - 1)
    Engine(cache=small).read([9, *text])
    assert not small.save_next()


# --- the server, and files of prompts ---


def test_a_server_counts_the_cached_tokens_of_each_turn() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from tests.serve.conftest import Running, make_service

    service = make_service(recurrent_model(), tiny_tokenizer(chat=True), slots=1, context=600)
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with contextlib.closing(Running(service)) as server:
        for turn in range(2):
            for topic in ("the whale and the ship ", "call me "):
                messages = [{"role": "user", "content": topic * 5}]
                for earlier in range(turn):
                    messages += [{"role": "assistant", "content": str(earlier)}, {"role": "user", "content": "more"}]
                usage = server.chat(messages, **options).usage
                seen = usage.prompt_tokens_details.cached_tokens
                assert seen == 0 if not turn else 0 < usage.prompt_tokens - seen < 20


def test_rows_of_a_file_share_whole_chunks_and_have_equal_bits(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from longdraft.batch.output import OutputFile
    from longdraft.batch.rows import Defaults, read_lines
    from longdraft.batch.run import BatchEngine, run

    spec = Speculator("prompt-lookup", recurrent_model(), tiny_tokenizer(chat=True), plan="fixed")
    document = "the whale and the ship, " * 50
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    contents = [document + end for end in ("who?", "where?", "when?")]
    bodies = [{"messages": [{"role": "user", "content": content}], **options} for content in contents]

    def answers(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines = (json.dumps({"custom_id": str(i), "body": body}) + "\n" for i, body in enumerate(rows))
        (tmp_path / name).write_text("".join(lines))
        with OutputFile(tmp_path / f"{name}.out", {"input": name}) as file:
            decoder = BatchEngine(spec, Defaults(model="tiny"), slots=1)
            decoder.run_with(lambda: run(read_lines(tmp_path / name, file.num_rows), file, decoder))
        return [json.loads(x)["response"]["body"] for x in (tmp_path / f"{name}.out").read_text().splitlines()]

    together = answers("all", bodies)
    alone = [answers(str(i), [body])[0] for i, body in enumerate(bodies)]
    assert [a["choices"] for a in together] == [a["choices"] for a in alone]
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in together] == [0, 1024, 1024]
