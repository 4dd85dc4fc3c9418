"""The prompt cache on disk with tiny models: tokens equal those of a run without a cache."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from longdraft import Request, Result, Speculator
from longdraft.serve.disk_prompt_cache import DiskPromptCache
from tests.support.drafts import random_eagle3
from tests.support.tiny import tiny_model

VOCAB = 61
MODEL = tiny_model(context=512)
PLAIN = Speculator("ar", MODEL, plan="fixed")
TEXT = [(7 * i + i // 9) % VOCAB for i in range(400)]


def cache_of(folder: Path, spec: Speculator = PLAIN, most: int = 1 << 30) -> DiskPromptCache:
    return DiskPromptCache(folder, spec.runner().fingerprint, most, 16, spec.feature_layers())


def asked(cache: DiskPromptCache, *prompts: list[int], spec: Speculator = PLAIN) -> list[Result]:
    """Decodes prompts together as a server does, and then saves snapshots as an idle server does."""
    session = spec.session(2, context=450, cache=cache)
    numbers = [session.add(Request(prompt, max_new_tokens=8, eos_token_ids=[])) for prompt in prompts]
    while session.busy:
        session.step()
    results = [session.take(number) for number in numbers]
    written = sum(1 for _ in islice(iter(cache.save_next, False), 9))
    assert written <= 2, "texts drive each other out of the folder"
    return results


def alone(prompt: list[int]) -> list[int]:
    return PLAIN.generate(Request(prompt, max_new_tokens=8, eos_token_ids=[]))[0].token_ids


def test_a_restart_answers_as_before_and_reads_what_is_new(tmp_path):
    question = [*TEXT[:200], 5, 6]
    (before,) = asked(cache_of(tmp_path), TEXT[:200])
    assert before.cached_tokens == 0
    (again,) = asked(cache_of(tmp_path), question)
    assert again.cached_tokens == 200 and again.token_ids == alone(question)
    # The answer is cached too, except for its last token, which has no KV.
    (further,) = asked(cache_of(tmp_path), [*TEXT[:200], *before.token_ids, 9])
    assert further.cached_tokens == 200 + 7


KINDS = {
    "offload": {"offload": "host:1"},
    "bfloat16": {"kv_dtype": "bfloat16"},
    "int8": {"kv_dtype": "int8"},
    "half": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_stores_of_every_kind(tmp_path, cpu_offloads, kind):
    model = tiny_model(context=512, dtype=torch.bfloat16) if kind == "half" else MODEL
    spec = Speculator("ar", model, plan="fixed", **KINDS[kind])
    (first,) = asked(cache_of(tmp_path, spec), TEXT[:200], spec=spec)
    (again,) = asked(cache_of(tmp_path, spec), TEXT[:200], spec=spec)
    assert again.cached_tokens == 199 and again.token_ids == first.token_ids
    if kind in ("bfloat16", "int8"):  # rounded KV belongs to another target
        assert asked(cache_of(tmp_path), TEXT[:200])[0].cached_tokens == 0


def test_hidden_states_come_with_the_rows(tmp_path):
    draft = random_eagle3(tmp_path / "draft", MODEL, layers=(0, 1, 2), head_dim=24)
    spec = Speculator("eagle3", MODEL, draft=draft, plan="fixed")
    folder = tmp_path / "kept"
    asked(cache_of(folder), TEXT[:200])
    (first,) = asked(cache_of(folder, spec), TEXT[:200], spec=spec)
    assert first.cached_tokens == 0  # the snapshot has no hidden states
    (again,) = asked(cache_of(folder, spec), TEXT[:200], spec=spec)
    assert again.cached_tokens == 199
    assert (again.token_ids, again.drafted, again.accepted) == (first.token_ids, first.drafted, first.accepted)
