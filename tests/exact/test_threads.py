"""Several threads on one model: each writes what it would write alone, and so does the model itself meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longdraft import PromptCache, Sampling, Speculator
from tests.support.drafts import random_draft
from tests.support.methods import SpeculatorsByMethod
from tests.support.tiny import generate_tokens, tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 4, [1, 2, 3], [(i * i) % 61 for i in range(40)], [8, 8, 8, 8]]
DRAWN = Sampling(temperature=0.9, top_k=8)
NEW = 10


@pytest.fixture(autouse=True)
def _switching_often():
    """Threads take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_concurrently(*tasks: Callable[[], Any]) -> list[Any]:
    """Runs each task in its own thread, and returns their results."""
    start, results = threading.Barrier(len(tasks)), [None] * len(tasks)
    errors: list[BaseException] = []

    def run(i: int, task: Callable[[], Any]) -> None:
        try:
            torch.set_num_threads(1)
            start.wait()
            results[i] = task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=indexed) for indexed in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def decode(spec: Speculator, prompt: list[int], **settings: Any) -> list[int]:
    return spec.generate([prompt], max_new_tokens=NEW, **settings)[0].token_ids


def decode_plainly(model, prompt: list[int]) -> list[int]:
    return generate_tokens(model, prompt, NEW)


@pytest.mark.parametrize("method", ["ar", "longspec", "eagle3", "specextend", "self", "triforce"])
def test_threads_on_one_speculator_write_what_they_write_alone(specs: SpeculatorsByMethod, method):
    """And generate beside them. The last one draws."""
    spec, model = specs.get(method), specs.model
    assert method == "ar" or all(r.drafted for r in spec.generate(PROMPTS, max_new_tokens=NEW))
    settings = [{}, {}, {}, {"sampling": DRAWN, "seed": 3}]
    alone = [decode(spec, prompt, **given) for prompt, given in zip(PROMPTS, settings, strict=True)]
    tasks = [
        lambda prompt=prompt, given=given: decode(spec, prompt, **given)
        for prompt, given in zip(PROMPTS, settings, strict=True)
    ]
    *together, beside = run_concurrently(*tasks, lambda: decode_plainly(model, PROMPTS[0]))
    assert together == alone
    assert beside == alone[0] == decode_plainly(model, PROMPTS[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_with_a_speculator_each_on_one_model(tmp_path, dtype):
    model = tiny_model(dtype=dtype)
    draft = random_draft(tmp_path, model)
    kinds: list[dict[str, Any]] = [
        {"method": "ar"},
        {"method": "prompt-lookup", "min_n": 1},
        {"method": "longspec", "draft": draft, "widths": (3, 2)},
        {"method": "self", "view": "streaming", "budget": 12, "sink": 2},
    ]

    def task(kind: dict[str, Any], prompt: list[int]) -> list[int]:
        return decode(Speculator(target=model, **kind), prompt)

    alone = [task(kind, prompt) for kind, prompt in zip(kinds, PROMPTS, strict=True)]
    tasks = [lambda indexed=indexed: task(*indexed) for indexed in zip(kinds, PROMPTS, strict=True)]
    assert run_concurrently(*tasks, lambda: decode_plainly(model, PROMPTS[0]))[:4] == alone


def test_threads_share_one_planner_and_one_runner(tmp_path):
    model = tiny_model(dtype=torch.float64)
    spec = Speculator("longspec", draft=random_draft(tmp_path, model), plan={1: 1e-4, 64: 2e-3}, lookup=True)
    made: list[Any] = []

    def task(prompt: list[int]) -> list[int]:
        made.append(spec.runner(model))
        made.append(spec.planner())
        return decode(spec, prompt)

    together = run_concurrently(*[lambda prompt=prompt: task(prompt) for prompt in PROMPTS])
    ar = Speculator("ar", target=model)
    assert together == [decode(ar, prompt) for prompt in PROMPTS]
    assert len({id(x) for x in made}) == 2 and None not in made


def test_streams_take_turns_in_one_thread_and_in_several():
    model = tiny_model(dtype=torch.float64)
    spec = Speculator("prompt-lookup", target=model, min_n=1)
    alone = [decode(spec, prompt) for prompt in PROMPTS]
    runs = [spec.stream([prompt], max_new_tokens=NEW) for prompt in PROMPTS]
    steps: list[list[int]] = [[] for _ in runs]
    for _ in range(NEW):
        for run, results in zip(runs, steps, strict=True):
            results += next(iter(run)).token_ids if len(results) < NEW else ()
    assert steps == alone
    left = spec.stream([PROMPTS[0]], max_new_tokens=NEW)
    next(iter(left))  # begun, and left lying about: others go on, in this thread and in others
    assert decode(spec, PROMPTS[1]) == alone[1]
    assert run_concurrently(lambda: decode(spec, PROMPTS[1]), lambda: decode_plainly(model, PROMPTS[2])) == [
        alone[1],
        alone[2],
    ]
    assert left.results()[0].token_ids == alone[0]


def test_a_run_that_another_thread_closes_or_collects():
    model = tiny_model(dtype=torch.float64)
    spec, cache = (
        Speculator("specpv", target=model, drafter="ar", budget=8, sink=4, recent=4, block=4),
        PromptCache(),
    )
    expected = decode(spec, PROMPTS[2])
    runs = [spec.stream([PROMPTS[2]], max_new_tokens=NEW, cache=cache) for _ in "ab"]
    next(iter(runs[0]))

    def end() -> None:
        runs[0].close()
        next(iter(runs[1]))
        del runs[:]
        gc.collect()

    with spec.runner().lock:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()  # a close waits for the step that is being made
    thread.join()
    assert decode(spec, PROMPTS[2], cache=cache) == expected


def test_generate_with_a_speculator_and_without_at_once():
    model = tiny_model(dtype=torch.float64).train()
    spec = Speculator("prompt-lookup", min_n=1)

    def ours(prompt: list[int]) -> list[int]:
        return generate_tokens(model, prompt, NEW, custom_generate=spec)

    expected = [decode_plainly(model, prompt) for prompt in PROMPTS[:2]]
    tasks = [
        lambda kind=kind, prompt=prompt: kind(prompt)
        for prompt in PROMPTS[:2]
        for kind in (ours, lambda p: decode_plainly(model, p))
    ]
    results = run_concurrently(*tasks)
    assert results[::2] == results[1::2] == expected
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_thread_that_fails_in_a_layer_does_not_stop_the_others(error):
    model = tiny_model(dtype=torch.float64)
    spec = Speculator("prompt-lookup", target=model, min_n=1)
    expected = decode(spec, PROMPTS[0])
    unlucky: list[int] = []

    def hook(*_: object) -> None:
        if threading.get_ident() in unlucky:
            raise error("of this thread")

    model.model.layers[1].mlp.register_forward_hook(hook)

    def fail() -> str:
        run = spec.stream([PROMPTS[2]], max_new_tokens=NEW)
        next(iter(run))
        unlucky.append(threading.get_ident())
        try:
            run.results()
        except error as raised:
            return str(raised)
        finally:
            unlucky.clear()
        return "nothing"

    results = run_concurrently(lambda: decode(spec, PROMPTS[0]), fail, lambda: decode_plainly(model, PROMPTS[0]))
    assert results == [expected, "of this thread", expected]
    assert run_concurrently(lambda: decode(spec, PROMPTS[0])) == [expected]  # of another thread
