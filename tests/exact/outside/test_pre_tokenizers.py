"""Texts of GGUF files are split by the rule that the file names, whatever its architecture."""

from __future__ import annotations

import logging
from itertools import cycle

import pytest
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

import longdraft
from longdraft.errors import CapabilityError
from tests.support.gguf_architectures import write
from tests.support.gguf_files import write_gguf

TEXT = "x = [\n    1,\n    2234]  # It's I'LL caf\u00e9\r\n\tfoo(\u4f60\u597d\u3042)!!\n\n  \u00bd"
# The words of "a\n   1234 b's" by each rule, with dots for spaces.
RULES = {
    "smollm": "a|\n...|1|2|3|4|.b|'s",
    "gpt-2": "a|\n..|.1234|.b|'s",
    "llama-bpe": "a|\n|..|.|123|4|.b|'s",
    "qwen2": "a|\n|..|.|1|2|3|4|.b|'s",
    "deepseek-r1-qwen": "a|\n|..|.|1|2|3|4|.b|'s",
    "deepseek-v3": "a|\n|...|123|4|.b|'s",
    "deepseek-coder": "a|\n|...|1|2|3|4|.b|'|s",
    "falcon": "a|\n..|.|123|4|.b|'|s",
    "tekken": "a|\n|..|.|1|2|3|4|.b|'s",
    "gpt-4o": "a|\n|..|.|123|4|.b's",
}


def words(tokenizer, text: str) -> list[str]:
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in split]


def loaded(folder, **options):
    write_gguf(folder / "a.gguf", **options)
    return longdraft.load(folder / "a.gguf", device="cpu").tokenizer


@pytest.mark.parametrize(("rule", "family"), zip(RULES, cycle(["llama", "qwen2"]), strict=False))
def test_words_are_those_of_the_rule_that_the_file_names(rule, family, tmp_path):
    tokenizer = loaded(tmp_path, family=family, pre=rule)
    assert "|".join(words(tokenizer, "a\n   1234 b's")).replace(" ", ".") == RULES[rule]
    assert words(loaded(tmp_path, family=family, pre=rule), TEXT) == words(tokenizer, TEXT)  # out of the cache
    unpacked = longdraft.load(tmp_path / "a.gguf", device="cpu", dtype="bfloat16").tokenizer
    assert words(unpacked, TEXT) == words(tokenizer, TEXT)


def test_the_embedded_models_are_split_as_published():
    tokenizer = longdraft.load().tokenizer
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert [piece for piece, _ in published.pre_tokenize_str(TEXT)] == [
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    ]
    assert tokenizer.tokenize("[\n    1,\n    22]") == [
        "[", "\u010a\u0120\u0120\u0120\u0120", "1", ",", "\u010a\u0120\u0120\u0120\u0120", "2", "2", "]",
    ]  # fmt: skip


def test_qwens_texts_are_composed_first_as_published(tmp_path):
    tokenizer = loaded(tmp_path, family="qwen2", pre="qwen2")
    published = Qwen2Tokenizer(vocab=tokenizer.get_vocab(), merges=[("h", "e"), ("t", "he")]).backend_tokenizer
    assert tokenizer.backend_tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"
    assert published.normalizer.normalize_str("e\u0301") == "\u00e9"
    assert [piece for piece, _ in published.pre_tokenizer.pre_tokenize_str(TEXT)] == [
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    ]


@pytest.mark.parametrize(("rule", "said", "first"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("tekken", None, True), ("tekken", True, True),
    ("smollm", None, False), ("smollm", True, True), ("qwen2", None, False),
])  # fmt: skip
def test_texts_begin_with_bos_as_the_file_says_or_as_its_rule_does(rule, said, first, tmp_path):
    flags = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
    ids = loaded(tmp_path, pre=rule, numbers=flags)("the")["input_ids"]
    assert ids == ([1] if first else []) + ids[-1:] and ids[-1] != 1


@pytest.mark.parametrize("family", ["llama", "qwen35"])
def test_a_rule_that_is_not_known_is_named_in_a_warning_or_refused(family, tmp_path, caplog):
    """transformers may know the architecture's usual rule, in some versions."""
    try:
        with caplog.at_level(logging.WARNING):
            if family == "llama":
                tokenizer = loaded(tmp_path, pre="of-tomorrow")
            else:
                write(tmp_path / "a.gguf", family, split="of-tomorrow")
                tokenizer = longdraft.load(tmp_path / "a.gguf", device="cpu").tokenizer
        assert tokenizer("the")["input_ids"] and "of-tomorrow" in caplog.text
    except CapabilityError as error:
        assert "of-tomorrow" in str(error) and family != "llama"
