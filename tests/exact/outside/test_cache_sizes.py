"""One prompt cache for runs of other sizes: longer and shorter texts, more and fewer at a time, other methods."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from longdraft import PromptCache, Speculator
from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_model

LONG = [3, 9, 14, 7, 22, 5] * 30
MODELS: dict[str, Any] = {
    "llama": tiny_model, "windows": lambda: tiny_model("gemma3"), "recurrent": recurrent_model,
}  # fmt: skip
RUNS = ([LONG], [LONG[:9], LONG[:30]], [LONG, LONG[:9], LONG[3:40]], [LONG[:12]], [LONG[1:60]] * 4, [LONG])


def text(spec: Speculator, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    return [r.token_ids for r in spec.generate(prompts, max_new_tokens=16, **more)]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("method", ["ar", "prompt-lookup", None])
def test_runs_of_other_sizes(family: str, method: str | None) -> None:
    m = MODELS[family]()
    spec, plain = Speculator(method, target=m), Speculator("ar", target=m)
    for order in (RUNS, RUNS[::-1]):
        cache = PromptCache()
        for prompts in order:
            assert text(spec, prompts, cache=cache) == text(plain, prompts)


def test_what_was_kept_of_a_long_text_is_still_there() -> None:
    spec, cache = Speculator("prompt-lookup", target=tiny_model()), PromptCache()
    text(spec, [LONG], cache=cache)
    text(spec, [LONG[:9], LONG[5:20]], cache=cache)
    assert spec.generate([LONG[5:20], LONG], max_new_tokens=4, cache=cache)[0].cached_tokens


def test_other_methods_and_other_models() -> None:
    models = [tiny_model(layers=2), tiny_model(layers=4), tiny_model("gemma3"), recurrent_model()]
    cache = PromptCache()
    for m, prompts in itertools.product([*models, *models[::-1]], ([LONG], [LONG[:9], LONG[:20]])):
        expected = text(Speculator("ar", target=m), prompts)
        for method in ("self", "prompt-lookup"):
            assert text(Speculator(method, target=m), prompts, cache=cache) == expected


def test_a_snapshot_and_then_more(tmp_path: Path) -> None:
    spec, cache = Speculator("prompt-lookup", target=tiny_model()), PromptCache()
    expected = text(spec, [LONG], cache=cache)[0]
    cache.save(tmp_path / "rows", spec.runner().fingerprint)
    restored = PromptCache.restored(tmp_path / "rows", spec.runner().fingerprint)
    assert text(spec, [LONG[:9], LONG[:9]], cache=restored)[0] == text(spec, [LONG[:9]])[0]
    assert text(spec, [LONG, LONG[:9], LONG[:3]], cache=restored)[0] == expected


def test_memory_that_holds_the_texts_but_not_the_long_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cache = Speculator("ar", target=tiny_model()), PromptCache()
    expected = text(spec, [LONG], cache=cache)[0]
    room = 3 * cache.store.keys.nbytes  # type: ignore[union-attr]
    monkeypatch.setattr(memory_info, "available_bytes", lambda device: room)
    short = [LONG[:9], LONG[:20], LONG[:4], LONG[:7]]
    assert text(spec, short, cache=cache) == [text(spec, [each])[0] for each in short]
    assert text(spec, [LONG], cache=cache)[0] == expected
    with pytest.raises(MemoryBudgetError):
        text(spec, [LONG] * 8, cache=cache)
    assert text(spec, [LONG[:9]], cache=cache) == text(spec, [LONG[:9]])
