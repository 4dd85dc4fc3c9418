"""A completion with a suffix asks in the model's own tokens, and ends where another file would begin."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
# ruff: noqa: E402

from longdraft import Request, Speculator
from longdraft.errors import CapabilityError
from longdraft.serve.filling import filling_ends, filling_prompt
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service

MODEL, PLAIN = byte_model(), byte_tokenizer()


def coder():
    """A tokenizer with Qwen-Coder's three tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], special_tokens=True)
    return tokenizer


def test_a_completion_with_a_suffix_is_what_the_model_says_between():
    tokenizer = coder()
    before, between, answer = tokenizer.convert_tokens_to_ids(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    code, rest = (tokenizer(text)["input_ids"] for text in ("def f(x):", "return y"))
    prompt = [before, *code, between, *rest, answer]
    assert filling_prompt(tokenizer, "def f(x):", "return y") == prompt
    ends = filling_ends(tokenizer)
    assert ends == [before, between, answer]
    alone = Speculator("ar", MODEL, tokenizer, plan="fixed").generate(
        Request(prompt, max_new_tokens=20, eos_token_ids=[*ends, tokenizer.eos_token_id])
    )[0]
    with contextlib.closing(Running(make_service(MODEL, tokenizer, context=1200))) as running:
        found = running.client().completions.create(
            model="tiny", prompt="def f(x):", suffix="return y", max_tokens=20, temperature=0
        )
    assert found.choices[0].text == alone.text and found.usage.prompt_tokens == len(prompt)


def test_a_model_without_such_tokens_says_so():
    with pytest.raises(CapabilityError, match="suffix"):
        filling_prompt(PLAIN, "a", "b")
