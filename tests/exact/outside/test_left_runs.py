"""Runs that were left before their end, and what others do meanwhile with their model and their cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longdraft import PromptCache, Request, Speculator
from longdraft.errors import CapabilityError, CheckpointError, RequestError
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_model

IDS = [3, 9, 14, 7, 22, 5] * 6
MODELS: dict[str, Any] = {
    "llama": tiny_model, "windows": lambda: tiny_model("gemma3"), "recurrent": recurrent_model,
}  # fmt: skip


def left(spec: Speculator, cache: PromptCache) -> Any:
    run = spec.stream(IDS, max_new_tokens=16, cache=cache)
    for _, _ in zip(range(3), run, strict=False):
        pass
    return run


def left_session(spec: Speculator, cache: PromptCache) -> Any:
    session = spec.session(2, cache=cache)
    session.add(Request(IDS, 16))
    for _ in range(3):
        session.step()
    return session


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("leave", [left, left_session])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_the_cache_of_a_run_that_was_left_is_saved(
    family: str, leave: Callable[..., Any], method: str, tmp_path: Path
) -> None:
    spec, cache = Speculator(method, target=MODELS[family](), plan="fixed"), PromptCache()
    expected = spec.generate(IDS, max_new_tokens=16)[0].token_ids
    run = leave(spec, cache)
    cache.save(tmp_path / "rows", spec.runner().fingerprint)
    assert family != "llama" or not hasattr(run, "results") or run.results()[0].token_ids == expected
    restored = PromptCache.restored(tmp_path / "rows", spec.runner().fingerprint)
    assert spec.generate(IDS, max_new_tokens=16, cache=restored)[0].token_ids == expected
    assert spec.generate(IDS, max_new_tokens=16, cache=cache)[0].token_ids == expected


def test_snapshots_that_are_not_there_are_not_said_to_be_damaged(tmp_path: Path) -> None:
    spec, cache = Speculator("ar", target=tiny_model()), PromptCache()
    restored = PromptCache.restored(tmp_path / "rows", spec.runner().fingerprint)
    with pytest.raises(RequestError, match="rows"):
        restored.save(tmp_path / "more", spec.runner().fingerprint)
    with pytest.raises(CheckpointError, match="No such file") as raised:
        spec.generate(IDS, max_new_tokens=4, cache=restored)
    assert "damaged" not in str(raised.value)
    with pytest.raises(RequestError, match="empty"):
        cache.save(tmp_path / "more", spec.runner().fingerprint)


def deeper(m: Any) -> None:
    added = copy.deepcopy(m.model.layers[0])
    added.self_attn.layer_idx = len(m.model.layers)
    m.model.layers.append(added)
    m.config.num_hidden_layers += 1


def shallower(m: Any) -> None:
    del m.model.layers[-1]
    m.config.num_hidden_layers -= 1


@pytest.mark.parametrize("change", [deeper, shallower])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "self"])
def test_a_run_goes_not_on_with_the_layers_of_another(change: Callable[[Any], None], method: str) -> None:
    m = tiny_model(layers=4)
    spec = Speculator(method, target=m, plan="fixed")
    run, session = left(spec, PromptCache()), left_session(spec, PromptCache())
    change(m)
    expected = spec.generate(IDS, max_new_tokens=16)[0].token_ids
    for next_step in (run.results, session.step):
        with pytest.raises(CapabilityError, match="Start the run again"):
            next_step()
    assert spec.generate(IDS, max_new_tokens=16)[0].token_ids == expected
