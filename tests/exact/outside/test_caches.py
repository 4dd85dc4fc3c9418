"""One prompt cache for runs of other sizes, methods and models, and for runs that were left; and models that nobody
but longdraft has are freed."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest

from longdraft import PromptCache, Request, Speculator
from longdraft.errors import CheckpointError, MemoryBudgetError, RequestError
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import generate_tokens, tiny_model

PROMPT = [3, 9, 14, 7, 22, 5] * 6
LONG = PROMPT * 5
MODELS: dict[str, Any] = {
    "llama": tiny_model, "windows": lambda: tiny_model("gemma3"), "recurrent": recurrent_model,
}  # fmt: skip
RUNS = ([LONG], [LONG[:9], LONG[:30]], [LONG, LONG[:9], LONG[3:40]], [LONG[:12]], [LONG[1:60]] * 4, [LONG])
SHORT = [LONG[:9], LONG[:20], LONG[:4], LONG[:7]]


def text(spec: Speculator, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    return [r.token_ids for r in spec.generate(prompts, max_new_tokens=16, **more)]


@pytest.mark.parametrize(("family", "method"), [*((family, "prompt-lookup") for family in MODELS), ("llama", None)])
def test_runs_of_other_sizes(family: str, method: str | None) -> None:
    m = MODELS[family]()
    spec, plain = Speculator(method, target=m), Speculator("ar", target=m)
    expected = [text(plain, prompts) for prompts in RUNS]
    for order in (1, -1):
        cache = PromptCache()
        assert [text(spec, prompts, cache=cache) for prompts in RUNS[::order]] == expected[::order]


def test_other_methods_and_other_models() -> None:
    models = [tiny_model(layers=2), tiny_model(layers=4), tiny_model("gemma3"), recurrent_model()]
    cache = PromptCache()
    for m, prompts in itertools.product([*models, *models[:2]], ([LONG], [LONG[:9], LONG[:20]])):
        expected = text(Speculator("ar", target=m), prompts)
        for method in ("self", "prompt-lookup"):
            assert text(Speculator(method, target=m), prompts, cache=cache) == expected


def test_a_long_text_stays_beside_shorter_ones_in_memory_and_in_a_snapshot(tmp_path: Path) -> None:
    spec, cache = Speculator("prompt-lookup", target=tiny_model()), PromptCache()
    expected = text(spec, [LONG], cache=cache)[0]
    cache.save(tmp_path / "rows", spec.runner().fingerprint)
    restored = PromptCache.restored(tmp_path / "rows", spec.runner().fingerprint)
    for known in (cache, restored):
        assert text(spec, SHORT[:2], cache=known) == text(spec, SHORT[:2])
        assert all(r.cached_tokens for r in spec.generate([SHORT[1], LONG], max_new_tokens=4, cache=known))
        assert text(spec, [LONG, *SHORT[:2]], cache=known)[0] == expected


def test_memory_that_holds_the_texts_but_not_the_long_one_for_each(free_memory: Any) -> None:
    spec, cache = Speculator("ar", target=tiny_model()), PromptCache()
    expected = text(spec, [LONG], cache=cache)[0]
    free_memory(3 * cache.store.keys.nbytes)  # type: ignore[union-attr]
    assert text(spec, SHORT, cache=cache) == [text(spec, [each])[0] for each in SHORT]
    assert text(spec, [LONG], cache=cache)[0] == expected
    with pytest.raises(MemoryBudgetError):
        text(spec, [LONG] * 8, cache=cache)
    assert text(spec, SHORT[:1], cache=cache) == text(spec, SHORT[:1])


# --- runs that were left ---


@pytest.mark.parametrize("family", MODELS)
def test_the_cache_of_a_run_that_was_left_is_saved(family: str, tmp_path: Path) -> None:
    for leave in ("stream", "session"):
        spec, cache = Speculator("prompt-lookup", target=MODELS[family](), plan="fixed"), PromptCache()
        expected = text(spec, [PROMPT])
        run, session = spec.stream(PROMPT, max_new_tokens=16, cache=cache), spec.session(2, cache=cache)
        session.add(Request(PROMPT, 16))
        for _ in range(3):
            next(iter(run)) if leave == "stream" else session.step()
        cache.save(tmp_path / leave, spec.runner().fingerprint)
        assert family != "llama" or leave == "session" or [run.results()[0].token_ids] == expected
        restored = PromptCache.restored(tmp_path / leave, spec.runner().fingerprint)
        assert text(spec, [PROMPT], cache=restored) == text(spec, [PROMPT], cache=cache) == expected


def test_snapshots_that_are_not_there_are_not_said_to_be_damaged(tmp_path: Path) -> None:
    spec = Speculator("ar", target=tiny_model())
    fingerprint = spec.runner().fingerprint
    restored = PromptCache.restored(tmp_path / "rows", fingerprint)
    for cache, named in ((restored, "rows"), (PromptCache(), "empty")):
        with pytest.raises(RequestError, match=named):
            cache.save(tmp_path / "more", fingerprint)
    with pytest.raises(CheckpointError, match="No such file") as raised:
        text(spec, [PROMPT], cache=restored)
    assert "damaged" not in str(raised.value)


# --- models are let go ---

METHODS: dict[str | None, dict[str, Any]] = {"prompt-lookup": {"min_n": 1}, "self": {}, None: {}}


def weak(*things: Any) -> list[Any]:
    return [weakref.ref(thing) for thing in things]


@pytest.mark.parametrize(("family", "method"), [("llama", "self"), ("llama", None), ("gemma3", "prompt-lookup")])
def test_a_speculator_without_a_target_keeps_no_model(family: Any, method: str | None) -> None:
    spec, known = Speculator(method, **METHODS[method]), []
    for seed in range(2):
        m = tiny_model(family, seed=seed)
        for _ in range(2):
            assert generate_tokens(m, PROMPT, 12, custom_generate=spec) == generate_tokens(m, PROMPT, 12)
        known += weak(m, m.get_input_embeddings().weight, m.model.layers[0].mlp.down_proj.weight)
        del m
        gc.collect()
        assert all(each() is None for each in known)
    with pytest.raises(RequestError):
        spec.runner()
    m = tiny_model()
    generate_tokens(m, PROMPT, 12, custom_generate=spec)
    spec.use(m)  # what was handed over may become the target
    del m
    gc.collect()
    assert text(spec, [PROMPT])


@pytest.mark.parametrize("method", METHODS)
def test_a_model_goes_with_its_speculator(method: str | None) -> None:
    m, cache = tiny_model(), PromptCache()
    spec = Speculator(method, target=m, **METHODS[method])
    known = weak(m, m.get_input_embeddings().weight)
    text(spec, [PROMPT], cache=cache)
    del m
    gc.collect()
    assert spec.generate([PROMPT], max_new_tokens=8, cache=cache)[0].cached_tokens  # a target is kept
    session = spec.session()
    session.add([1, 2, 3])
    del spec
    gc.collect()
    while session.busy:
        session.step()
    del session
    gc.collect()
    assert all(each() is None for each in known)
