"""Situations in which a method could fail: ends of output, reused caches, KV on the host, long prompts, joins."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Request, Speculator
from tests.support.methods import (
    CASES,
    DRAWN,
    GREEDY,
    METHODS,
    NEW,
    PROMPTS,
    VOCABULARY,
    generate,
    rounds,
    target,
    tokens,
)
from tests.support.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("small_sizes")

every_method = pytest.mark.parametrize("name", METHODS)
# A method of each kind of view and tree, where what is tested is the engine's.
KINDS = (
    "ar", "prompt-lookup", "longspec", "specextend-eagle3", "eagle3", "specextend", "self", "triforce", "tokenswift",
)  # fmt: skip
each_kind = pytest.mark.parametrize("name", KINDS)


def up_to_eos(written: list[int], eos: list[int]) -> list[int]:
    """An output up to its first end-of-sequence token."""
    return next((written[: i + 1] for i, token in enumerate(written) if token in eos), written)


@every_method
def test_sequences_of_a_batch_end_one_after_the_other(spec_factory, name):
    """At an end-of-sequence token, and at budgets smaller than a tree is deep."""
    spec, plain = spec_factory.spec(METHODS[name]), spec_factory.plain()
    eos = sorted({plain[1][6], plain[2][4]})
    ends = [(prompt, written, NEW, eos) for prompt, written in zip(PROMPTS, plain, strict=True)]
    ends += [(prompt, written, n, []) for prompt, written in zip(PROMPTS, plain, strict=True) for n in (1, 2, 4)]
    requests = [Request(list(prompt), n, eos_token_ids=ids) for prompt, _, n, ids in ends]
    for (_, written, n, ids), result in zip(ends, spec.generate(requests, batch=4), strict=True):
        assert result.token_ids == up_to_eos(written[:n], ids)
        assert (result.finish_reason == "eos") == (not set(ids).isdisjoint(written))
        assert n > 1 or not result.drafted


@each_kind
def test_up_to_the_last_position_of_the_context(spec_factory, name):
    model, prompts = target(context=64), (tuple(i % VOCABULARY for i in range(50)),)
    found = generate(spec_factory.spec(METHODS[name], model), prompts, 14)
    assert tokens(found) == spec_factory.plain(model, prompts, 14)


@pytest.mark.parametrize("name", ["ar", "prompt-lookup", "eagle3", "triforce"])
def test_a_stop_string_inside_a_draft(spec_factory, name):
    model, prompts = target(vocab=61), ((7, 8, 9), (1,))
    spec = spec_factory.spec(METHODS[name], model, tokenizer=tiny_tokenizer())
    text = spec.decode(spec_factory.plain(model, prompts)[0])
    stop = text[9:11]
    result = generate(spec, prompts, stop=[stop])[0]
    assert result.text == text[: text.index(stop)] and result.finish_reason == "stop"


@pytest.mark.parametrize("name", [*METHODS, "eagle3 lookup", "self chunks", "self tokens"])
def test_a_prompt_cache_is_reused(spec_factory, name):
    """Also one from plain decoding, which has no hidden states."""
    case, cache = CASES[name], PromptCache()
    spec, (first, *_) = spec_factory.spec(case), spec_factory.plain()
    generate(Speculator("ar", target=target()), PROMPTS[:1], cache=cache)
    for prompt in ((*PROMPTS[0], *first, 4), (8, 9), PROMPTS[2], PROMPTS[2][:50]):
        (result,) = generate(spec, (prompt,), 12, cache=cache)
        assert [result.token_ids] == spec_factory.plain(prompts=(prompt,), n=12)
        if case.cache_invariant:
            assert rounds([result]) == rounds(generate(spec, (prompt,), 12))


# With a state that a request could leave behind: windows, views, working caches.
STATEFUL = ("specextend-eagle3 opt", "small-lm streaming", "self chunks", "self tokens", "magicdec")


@pytest.mark.parametrize("name", [*KINDS, *STATEFUL])
def test_earlier_requests_and_kv_on_a_host_change_nothing(spec_factory, cpu_offloads, name):
    one_by_one = generate(spec_factory.spec(CASES[name]), (PROMPTS[2], *PROMPTS[:2]), batch=1)  # in one slot
    there = generate(spec_factory.spec(CASES[name], offload="host:1"), PROMPTS[:2])
    assert rounds(one_by_one[1:]) == rounds(there) and tokens(there) == spec_factory.plain()[:2]


@each_kind
def test_requests_that_join_and_leave(spec_factory, name):
    """More requests than are decoded at a time, greedy and sampled, prompts read in chunks; one is aborted."""
    n, spec = 14, spec_factory.spec(METHODS[name])
    requests = [
        Request(list(prompt), n - 4 * (i % 3), sampling, seed=i)
        for i, (prompt, sampling) in enumerate([(p, s) for s in (GREEDY, DRAWN) for p in PROMPTS[:3]])
    ]
    session = spec.session(2, piece=32)
    numbers = [session.add(request) for request in requests[:3]]
    steps = [step for _ in range(3) for step in session.step()]
    numbers += [session.add(request) for request in requests[3:]]
    session.abort(numbers[1])
    while session.busy:
        steps += session.step()
    ar = spec_factory.spec(METHODS["ar"])
    for i, (number, request) in enumerate(zip(numbers, requests, strict=True)):
        alone, found = ar.generate(request)[0].token_ids, session.take(number)
        assert found.token_ids == (alone[: found.new_tokens] if i == 1 else alone)
        assert found.finish_reason == "length" or i == 1
    chunks = [step.prefilled for step in steps if step.sequence == numbers[2] and step.mode == "prefill"]
    assert len(chunks) == 5 and chunks[-1] == 130  # a view's queries may need the last tokens in one chunk


@each_kind
def test_a_closed_run_and_two_runs_at_once(spec_factory, name):
    spec = spec_factory.spec(METHODS[name])
    closed = spec.stream([list(PROMPTS[0])], max_new_tokens=NEW)
    next(iter(closed)), next(iter(closed))
    closed.close()
    one, two = (spec.stream([list(p)], max_new_tokens=NEW) for p in PROMPTS[1:3])
    for _ in range(4):  # alternately: runs share only a draft's weights
        next(iter(one), None), next(iter(two), None)
    assert [r.results()[0].token_ids for r in (one, two)] == spec_factory.plain()[1:3]


def drafts_weights(spec):
    """The draft's own matrices, without the target's embedding and head."""
    bound = spec.draft().bind(spec.runner())
    module = bound.runner.model if hasattr(bound, "runner") else bound.block
    return [
        w for name, w in module.named_parameters() if w.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]


@pytest.mark.parametrize("name", [name for name, case in METHODS.items() if case.draft is not None])
def test_a_draft_that_overflows_only_costs_time(spec_factory, name):
    model = tiny_model(vocab=VOCABULARY)  # its own: a draft is bound to it once
    spec = spec_factory.spec(METHODS[name], model)
    with torch.no_grad():
        drafts_weights(spec)[-1].fill_(float("nan"))
    assert tokens(generate(spec, n=12)) == [written[:12] for written in spec_factory.plain()]
