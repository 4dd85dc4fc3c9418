"""Several threads on one model: each writes what it would write alone, and so does the model itself meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        start.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(60) for future in [pool.submit(run, task) for task in tasks]]


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
    tasks = [partial(decode, spec, prompt, **given) for prompt, given in zip(PROMPTS, settings, strict=True)]
    alone = [task() for task in tasks]
    *together, beside = run_concurrently(*tasks, partial(decode_plainly, model, PROMPTS[0]))
    assert together == alone
    assert beside == alone[0] == decode_plainly(model, PROMPTS[0])


def test_threads_with_a_speculator_each_on_one_model(tmp_path):
    model = tiny_model()
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
    tasks = [partial(task, *each) for each in zip(kinds, PROMPTS, strict=True)]
    assert run_concurrently(*tasks, partial(decode_plainly, model, PROMPTS[0]))[:4] == alone


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
    others = run_concurrently(partial(decode, spec, PROMPTS[1]), partial(decode_plainly, model, PROMPTS[2]))
    assert others == [alone[1], alone[2]] and left.results()[0].token_ids == alone[0]


def test_a_run_that_another_thread_closes_or_collects():
    model = tiny_model(dtype=torch.float64)
    spec = Speculator("specpv", target=model, drafter="ar", budget=8, sink=4, recent=4, block=4)
    cache = PromptCache()
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
    model = tiny_model().train()
    spec = Speculator("prompt-lookup", min_n=1)
    plain = [partial(decode_plainly, model, prompt) for prompt in PROMPTS[:2]]
    ours = [partial(generate_tokens, model, prompt, NEW, custom_generate=spec) for prompt in PROMPTS[:2]]
    expected = [task() for task in plain]
    assert run_concurrently(*ours, *plain) == expected * 2
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

    ours = partial(decode, spec, PROMPTS[0])
    assert run_concurrently(ours, fail, partial(decode_plainly, model, PROMPTS[0])) == [
        expected, "of this thread", expected,
    ]  # fmt: skip
    assert run_concurrently(ours) == [expected]  # of another thread
