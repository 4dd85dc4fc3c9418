"""Models are freed when nobody but longdraft has them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from longdraft import PromptCache, Speculator
from longdraft.errors import RequestError
from tests.support.tiny import tiny_model

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])
KNOWN = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
OPTIONS: dict[str | None, dict[str, Any]] = {
    "ar": {},
    "prompt-lookup": {"min_n": 1},
    "self": {},
    "suffix": {},
    None: {},
}


def gone(*things: Any) -> list[Any]:
    return [weakref.ref(thing) for thing in things]


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_speculator_without_a_target_keeps_no_model(family: Any, method: str | None) -> None:
    spec, known = Speculator(method, **OPTIONS[method]), []
    for seed in range(3):
        m = tiny_model(family, seed=seed)
        expected = m.generate(IDS, **KNOWN)
        assert torch.equal(m.generate(IDS, **KNOWN, custom_generate=spec), expected)
        assert torch.equal(m.generate(IDS, **KNOWN, custom_generate=spec), expected)
        known += gone(m, m.get_input_embeddings().weight, m.model.layers[0].mlp.down_proj.weight)
        del m
        gc.collect()
        assert all(each() is None for each in known)
    with pytest.raises(RequestError):
        spec.runner()


@pytest.mark.parametrize("method", OPTIONS)
def test_a_model_goes_with_its_speculator(method: str | None) -> None:
    m, cache = tiny_model(), PromptCache()
    spec = Speculator(method, target=m, **OPTIONS[method])
    known = gone(m, m.get_input_embeddings().weight)
    spec.generate(IDS.tolist(), max_new_tokens=8, cache=cache)
    del m
    gc.collect()
    assert spec.generate(IDS.tolist(), max_new_tokens=8, cache=cache)[0].cached_tokens  # a target is kept
    session = spec.session()
    session.add([1, 2, 3])
    del spec
    gc.collect()
    while session.busy:
        session.step()
    del session
    gc.collect()
    assert all(each() is None for each in known)


def test_a_model_that_was_handed_over_may_become_the_target() -> None:
    m, spec = tiny_model(), Speculator("prompt-lookup")
    m.generate(IDS, **KNOWN, custom_generate=spec)
    spec.use(m)
    del m
    gc.collect()
    assert spec.generate(IDS.tolist(), max_new_tokens=8)[0].token_ids
