"""Continuous batching: each request is decoded as if it were alone."""

from __future__ import annotations

import random

import numpy as np
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
    requests = [Request(p, max_new_tokens=1 + i % 23) for i, p in enumerate(random_prompts(40))]
    run, sizes, left = spec.stream(requests, batch=4), [], len(requests)
    for step in run:
        if step.mode != "prefill":
            sizes += [0] if step.seconds else []
            sizes[-1] += 1
        left -= step.finish_reason is not None
        if left < 4:
            break
    assert sum(sizes) / len(sizes) > 3.6 and max(sizes) == 4
    for request, result in zip(requests[::9], run.results()[::9], strict=True):
        assert result.token_ids == decode_alone(spec, request)


@settings(max_examples=6, deadline=None)
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
    free_memory(2 * spec.runner().kv_shape.bytes_per_token * 130)
    results = spec.generate(prompts, max_new_tokens=8, batch=4)
    assert [r.token_ids for r in results] == expected
    assert "no memory for 4 sequences at a time" in caplog.text
    free_memory(100)
    with pytest.raises(MemoryBudgetError):
        spec.generate(prompts, max_new_tokens=8)


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
    cache = PromptCache()
    session = spec.session(1, cache=cache)
    one, two = session.add(Request([1, 2, 3], 9)), session.add(Request([4], 9))
    session.step()
    for number in (one, two, 7):
        with pytest.raises(RequestError):
            session.take(number)
    session.abort(two)  # it waits, and its last step has not come yet
    assert not session.ended(two)
    steps = remaining_steps(session)
    assert [s.finish_reason for s in steps if s.sequence == two] == ["cancelled"]
    assert session.ended(two) and session.take(two).finish_reason == "cancelled"
    expected = decode_alone(spec, Request([1, 2, 3], 9))
    assert session.take(one).token_ids == expected
    with pytest.raises(RequestError):
        session.take(one)
    session.add(Request([1, 2], 9))
    session.step()
    session.close()
    assert not session.busy and session.take(2).finish_reason == "cancelled"
    assert spec.generate([1, 2, 3], max_new_tokens=9, cache=cache)[0].token_ids == expected


def test_an_idle_session_finds_its_cache_taken_and_opens_it_again(spec):
    cache, request = PromptCache(), Request([1, 2, 3], 4)
    session, expected = spec.session(1, cache=cache), decode_alone(spec, request)
    for _ in range(2):
        number = session.add(request)
        remaining_steps(session)
        assert session.result(number).token_ids == expected
        spec.generate([7, 8], max_new_tokens=4, cache=cache)
    busy = session.add(request)
    session.step()
    other = spec.stream([[7, 8]], max_new_tokens=4, cache=cache)
    next(iter(other))
    with pytest.raises(CapabilityError):
        session.step()
    assert session.result(busy).finish_reason == "cancelled"
    session.close()
    assert other.results()[0].token_ids == decode_alone(spec, Request([7, 8], 4))  # it has spoiled nothing


# --- what is given, and what steps and results say ---


def test_forms_of_a_prompt_and_of_settings():
    spec = Speculator("prompt-lookup", target=tiny_model(context=256), tokenizer=tiny_tokenizer(chat=True))

    def tokens(prompts, **settings):
        return [r.token_ids for r in spec.generate(prompts, max_new_tokens=4, **settings)]

    ids = [5, 6, 7, 5, 6]
    forms = [tuple(ids), torch.tensor(ids), np.array(ids), torch.tensor([ids]), [torch.tensor(ids)], iter([ids])]
    assert all(tokens(prompt) == tokens([ids]) for prompt in forms)
    assert tokens(range(5, 8)) == tokens([5, 6, 7])
    assert tokens(text for text in ("one", "two")) == tokens(["one", "two"])
    given = {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2}
    expected = tokens("one two", sampling=Sampling(**given), seed=3)
    assert tokens("one two", seed=3, **given) == tokens(Request("one two", 4, seed=3, **given)) == expected
    assert tokens("one two", seed=3, temperature=2)  # a whole number
    (plain,) = spec.generate("one two", max_new_tokens=12, eos_token_ids=[])
    for end, reason in (({"eos_token_ids": [], "stop": plain.text[3:5]}, "stop"),
                        ({"eos_token_ids": plain.token_ids[2]}, "eos"), ({"stop": None}, "length")):  # fmt: skip
        assert spec.generate("one two", max_new_tokens=12, **end)[0].finish_reason == reason
    assert Speculator("specextend", every=4).options == {"refresh": 4}  # an option by another of its names


def test_the_models_own_eos_is_the_default():
    model = tiny_model()
    free = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0].token_ids
    model.generation_config.eos_token_id = [free[5], 60]
    result = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0]
    assert result.finish_reason == "eos" and result.token_ids[-1] == free[5]


@pytest.mark.parametrize("stop", [(), ("e", "ab", " q")])
def test_steps_add_up_to_the_result(stop):
    spec = Speculator("prompt-lookup", target=tiny_model(), tokenizer=tiny_tokenizer(), min_n=1)
    for seed in range(3):
        run = spec.stream(["abc abc abc", "x"], max_new_tokens=40, temperature=1.2, seed=seed, stop=stop)
        steps = list(run)
        for i, result in enumerate(run.results()):
            mine = [s for s in steps if s.sequence == i]
            assert [t for s in mine for t in s.token_ids][: result.new_tokens] == result.token_ids
            assert "".join(s.text for s in mine) == result.text == "".join(piece.text for piece in result.pieces)
            assert sum(s.mode == "full" for s in mine) == result.rounds
            assert mine[-1].finish_reason == result.finish_reason
            assert all(s.finish_reason is None for s in mine[:-1])
            if not stop:  # a token a character, but for special ones
                assert sum(s.accepted for s in mine) == result.accepted == sum(result.from_draft)
                assert result.mean_accepted_length == (result.new_tokens - 1) / result.rounds
                pairs = zip(result.token_ids, result.from_draft, strict=True)
                flags = [drafted for s in mine for piece, drafted in s.pieces for _ in piece]
                assert flags == [drafted for token, drafted in pairs if spec.decode([token])]


def test_cancelling_ends_the_run_and_keeps_what_there_is():
    calls = iter(range(99))
    spec = Speculator("ar", target=tiny_model())
    (result,) = spec.generate([[1, 2, 3]], max_new_tokens=50, cancelled=lambda: next(calls) > 5)
    assert result.finish_reason == "cancelled" and 0 < result.new_tokens < 50
    assert result.token_ids == spec.generate([[1, 2, 3]], max_new_tokens=50)[0].token_ids[: result.new_tokens]
