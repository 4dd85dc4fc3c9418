"""Continuous batching: each request is decoded as if it were alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from longdraft import PromptCache, Request, Sampling, Speculator
from longdraft.errors import CapabilityError, MemoryBudgetError, RequestError
from tests.support.tiny import tiny_model, tiny_tokenizer

SAMPLED = Sampling(temperature=0.9, top_k=8)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab=11, dtype=torch.float64)


@pytest.fixture(scope="module")
def spec(model):
    return Speculator("prompt-lookup", target=model, tokenizer=tiny_tokenizer(), min_n=1)


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(11) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def decode_alone(spec: Speculator, request: Request) -> list[int]:
    return spec.generate(request)[0].token_ids


def remaining_steps(session: longdraft.Session) -> list[longdraft.Step]:
    return [step for _ in iter(lambda: session.busy, False) for step in session.step()]


def test_a_long_list_of_mixed_lengths_keeps_the_batch_full(spec):
    """While any wait, every round has as many sequences as there are slots, but for those being read."""
    requests = [Request(p, max_new_tokens=1 + i % 23) for i, p in enumerate(random_prompts(90))]
    run = spec.stream(requests, batch=4)
    sizes, left = [], 90
    round_steps = 0
    for step in run:
        if step.mode != "prefill":
            round_steps += 1
            if step.seconds:
                sizes.append(0)
            sizes[-1] += 1
        left -= step.finish_reason is not None
        if left < 4:
            break
    assert sum(sizes) / len(sizes) > 3.8 and max(sizes) == 4
    results = run.results()
    assert [len(r.token_ids) for r in results] == [1 + i % 23 for i in range(90)]
    for request, result in list(zip(requests, results, strict=True))[::9]:
        assert result.token_ids == decode_alone(spec, request)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_whoever_comes_and_goes_each_gets_what_it_would_get_alone(spec, data):
    kinds = st.tuples(st.integers(1, 40), st.integers(1, 20), st.booleans(), st.integers(0, 5))
    wanted = data.draw(st.lists(kinds, min_size=1, max_size=8))
    session = spec.session(
        data.draw(st.integers(1, 3)),
        cache=PromptCache() if data.draw(st.booleans()) else None,
        piece=data.draw(st.sampled_from([4, 16, 1024])),
    )
    waiting, numbers, aborted = [], {}, set()
    for i, (length, new, sampled, seed) in enumerate(wanted):
        prompt = random_prompts(1, seed, 2)[0] * 3 + random_prompts(1, i, 60)[0][:length]  # some begin alike
        waiting.append(Request(prompt, new, SAMPLED if sampled else None, seed))
    while waiting or session.busy:
        if waiting and (not session.busy or data.draw(st.booleans())):
            request = waiting.pop()
            numbers[session.add(request)] = request
        if session.busy:
            session.step()
        going = [number for number in numbers if not session.ended(number)]
        if going and data.draw(st.integers(0, 9)) == 0:  # one that waits, is read, or is decoded
            aborted.add(number := data.draw(st.sampled_from(going)))
            session.abort(number)
    for number, request in numbers.items():
        result, expected = session.take(number), decode_alone(spec, request)
        if number in aborted and result.finish_reason == "cancelled":
            assert result.token_ids == expected[: len(result.token_ids)]
        else:
            assert result.token_ids == expected and result.finish_reason == "length"


def test_each_request_has_settings_of_its_own(spec):
    free = decode_alone(spec, Request([1, 2, 3], max_new_tokens=30, eos_token_ids=[]))

    def ban(ids, scores):
        return scores.index_fill(1, torch.tensor([free[0]]), -torch.inf)

    stop = spec.decode(free[6:12])
    end = next(n for n in range(31) if stop in spec.decode(free[:n]))
    assert stop and end < 30
    requests = [
        Request([1, 2, 3], max_new_tokens=30, eos_token_ids=[free[4]]),
        Request([1, 2, 3], max_new_tokens=30, eos_token_ids=[], processors=[ban]),
        Request([1, 2, 3], max_new_tokens=5, eos_token_ids=[], sampling=SAMPLED, seed=4),
        Request([1, 2, 3], max_new_tokens=30, eos_token_ids=[], stop=[stop]),
        [1, 2, 3],
    ]
    results = spec.generate(requests, max_new_tokens=7, eos_token_ids=[])
    assert results[0].finish_reason == "eos" and results[0].token_ids == free[: free.index(free[4]) + 1]
    assert free[0] not in results[1].token_ids
    assert results[2].token_ids == decode_alone(spec, requests[2])
    assert results[3].finish_reason == "stop" and results[3].token_ids == free[:end]
    assert results[3].text == spec.decode(free[:end]).partition(stop)[0]
    assert results[4].token_ids == free[:7]


def test_a_prompt_is_read_in_pieces_between_the_rounds_of_others(spec):
    session = spec.session(2, context=400, piece=32)
    first = session.add(Request([1, 2, 3], max_new_tokens=40))
    session.step()
    second = session.add(Request(random_prompts(1, 5, 3)[0] + [4] * 300, max_new_tokens=4))
    modes = []
    while not session.ended(second):
        modes += [(step.sequence, step.mode) for step in session.step()]
    read = [i for i, (number, mode) in enumerate(modes) if number == second and mode == "prefill"]
    assert len(read) == 10
    assert all(modes[i + 1] == (first, "full") for i in read[:-1])  # a round after every piece
    remaining_steps(session)
    assert session.result(first).token_ids == decode_alone(spec, Request([1, 2, 3], max_new_tokens=40))


def test_a_prefix_that_others_have_read_is_not_read_again(spec, forwards):
    shared = random_prompts(1, 9, 60)[0][:1] * 200
    requests = [Request([*shared, i], max_new_tokens=3) for i in range(6)]
    expected = [decode_alone(spec, r) for r in requests]
    forwards.clear()
    run = spec.stream(requests, batch=2, cache=PromptCache())
    assert [r.token_ids for r in run.results()] == expected
    assert sum(f.rows for f in forwards if f.prompt) == 201 + 5
    forwards.clear()
    # Without a cache, whole pieces alone: a prompt's bits are always the same.
    run = spec.stream(requests, batch=2, piece=64)
    assert [r.token_ids for r in run.results()] == expected
    assert sum(f.rows for f in forwards if f.prompt) == 201 + 5 * (201 - 192)


def test_a_longer_text_waits_for_more_memory_and_gets_it(spec):
    session = spec.session(2)
    small = [session.add(Request([1, 2], max_new_tokens=9)) for _ in "ab"]
    session.step()
    large = session.add(Request([3] * 90, max_new_tokens=30))
    last = session.add(Request([5], max_new_tokens=3))
    remaining_steps(session)
    assert [len(session.take(n).token_ids) for n in (*small, large, last)] == [9, 9, 30, 3]


def test_fewer_at_a_time_where_memory_is_short(spec, free_memory, caplog):
    prompts = random_prompts(5, 3)
    expected = [decode_alone(spec, Request(p, max_new_tokens=8)) for p in prompts]
    runner = spec.runner()
    free_memory(2 * runner.kv_shape.bytes_per_token * 130)
    results = spec.generate(prompts, max_new_tokens=8, batch=4)
    assert [r.token_ids for r in results] == expected
    assert "no memory for 4 sequences at a time" in caplog.text
    free_memory(100)
    with pytest.raises(MemoryBudgetError):
        spec.generate(prompts, max_new_tokens=8)


def test_a_waiting_request_can_be_aborted_and_a_closed_session_leaves_its_cache_usable(spec):
    cache = PromptCache()
    session = spec.session(1, cache=cache)
    one, two = session.add(Request([1, 2, 3], 20)), session.add(Request([4], 20))
    session.step()
    session.abort(two)
    assert [(s.sequence, s.finish_reason) for s in session.step() if s.finish_reason] == [(two, "cancelled")]
    session.close()
    assert not session.busy and session.result(one).finish_reason == "cancelled"
    assert spec.generate([1, 2, 3], max_new_tokens=20, cache=cache)[0].token_ids == decode_alone(
        spec, Request([1, 2, 3], 20)
    )


def test_a_slot_whose_prompt_was_not_begun_still_knows_what_it_holds(spec):
    session = spec.session(3, cache=PromptCache())
    old, new = random_prompts(1, 0, 40)[0], random_prompts(1, 1, 40)[0]
    session.add(Request(new[:9], 40))
    for _ in range(2):  # each in a slot of its own
        session.add(Request(old, 2))
    while not session.ended(1) or not session.ended(2):
        session.step()
    session.add(Request(old[:5], 9))
    session.step()  # reads it: it is the others' turn now
    given_up = session.add(Request(new, 4))
    session.step()  # which gives this one a slot, and decodes
    session.abort(given_up)
    again = session.add(Request(new, 4))
    remaining_steps(session)
    assert session.take(again).token_ids == decode_alone(spec, Request(new, 4))


def test_a_result_is_taken_once_when_its_last_step_has_come(spec):
    session = spec.session(1)
    one, two = session.add(Request([1, 2, 3], 9)), session.add(Request([4], 9))
    session.step()
    for number in (one, two, 7):
        with pytest.raises(RequestError):
            session.take(number)
    session.abort(two)  # its last step has not come yet
    assert not session.ended(two)
    remaining_steps(session)
    assert session.ended(two) and session.take(two).finish_reason == "cancelled"
    assert session.take(one).token_ids == decode_alone(spec, Request([1, 2, 3], 9))
    with pytest.raises(RequestError):
        session.take(one)
    session.add(Request([1, 2], 9))
    session.abort(2)
    session.close()
    assert not session.busy and session.take(2).finish_reason == "cancelled"


def test_an_idle_session_finds_its_cache_taken_and_opens_it_again(spec):
    cache = PromptCache()
    session = spec.session(1, cache=cache)
    session.add(Request([1, 2, 3], 4))
    remaining_steps(session)
    spec.generate([7, 8], max_new_tokens=4, cache=cache)
    number = session.add(Request([1, 2, 3], 4))
    remaining_steps(session)
    assert session.result(number).token_ids == decode_alone(spec, Request([1, 2, 3], 4))
    busy = session.add(Request([1, 2, 3], 4))
    session.step()
    other = spec.stream([[7, 8]], max_new_tokens=4, cache=cache)
    next(iter(other))
    with pytest.raises(CapabilityError):
        session.step()
    assert session.result(busy).finish_reason == "cancelled"
    session.close()
    assert other.results()[0].token_ids == decode_alone(spec, Request([7, 8], 4))  # it has spoiled nothing


# --- what steps and results say ---


def test_the_models_own_eos_is_the_default():
    model = tiny_model()
    free = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0].token_ids
    model.generation_config.eos_token_id = [free[5], 60]
    result = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0]
    assert result.finish_reason == "eos" and result.token_ids[-1] == free[5]


def test_steps_add_up_to_the_result():
    spec = Speculator("prompt-lookup", target=tiny_model(vocab=11), min_n=1)
    run = spec.stream([[1, 2, 3, 1, 2], [4] * 9], max_new_tokens=25)
    steps = list(run)
    for i, result in enumerate(run.results()):
        mine = [s for s in steps if s.sequence == i]
        assert [t for s in mine for t in s.token_ids] == result.token_ids
        assert sum(s.mode == "full" for s in mine) == result.rounds
        assert sum(s.accepted for s in mine) == result.accepted == sum(result.from_draft)
        assert mine[-1].finish_reason == result.finish_reason
        assert all(s.finish_reason is None for s in mine[:-1])
        assert result.mean_accepted_length == (result.new_tokens - 1) / result.rounds


def test_cancelling_ends_the_run_and_keeps_what_there_is():
    count = 0

    def cancelled():
        nonlocal count
        count += 1
        return count > 6

    spec = Speculator("ar", target=tiny_model())
    result = spec.generate([[1, 2, 3]], max_new_tokens=50, cancelled=cancelled)[0]
    assert result.finish_reason == "cancelled"
    assert result.token_ids == spec.generate([[1, 2, 3]], max_new_tokens=50)[0].token_ids[: result.new_tokens]
    assert 0 < result.new_tokens < 50


def test_methods_are_listed_as_the_contract_says():
    listed = {m["name"]: m for m in longdraft.methods()}
    assert set(listed) >= {"ar", "prompt-lookup"}
    assert all(set(m) == {"name", "exact", "needs_draft", "paper", "available"} for m in listed.values())
