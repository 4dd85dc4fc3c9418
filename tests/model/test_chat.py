"""Prompts: what the model reads, token for token."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Regex, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from longdraft.engine.chat import chat_prompt, encode, encode_conversation
from longdraft.errors import PromptError
from tests.support.tiny import tiny_tokenizer


def with_first_token(chat: bool) -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with <unk>, as Llama's does with BOS; its template writes it too."""
    tokenizer = tiny_tokenizer(chat=chat)
    first = tokenizer.convert_tokens_to_ids("<unk>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", first)]
    )
    if chat:
        tokenizer.chat_template = "<unk>" + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("instruction", "document", "system", "text"),
    [
        ("sum it up.", "a report.", None, "<user>a report.\n\nsum it up.<eos><assistant>"),
        ("hello", None, None, "<user>hello<eos><assistant>"),
        ("go.", "  in\n\n\nthree \n", None, "<user>  in\n\n\nthree \n\n\ngo.<eos><assistant>"),  # as it is
        ("hello", " \n", " ", "<user>hello<eos><assistant>"),
        ("", "a report.", None, "<user>a report.<eos><assistant>"),
        ("hello", None, "be brief.", "<system>be brief.<eos><user>hello<eos><assistant>"),
    ],
)
def test_user_turn_is_document_blank_line_instruction(instruction, document, system, text):
    tokenizer = tiny_tokenizer(chat=True)
    ids = chat_prompt(tokenizer, instruction, document, system)
    assert isinstance(ids, list) and {type(token) for token in ids} == {int}
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_added_once_with_a_template_and_without():
    for chat in (True, False):
        tokenizer = with_first_token(chat)
        first = tokenizer.convert_tokens_to_ids("<unk>")
        ids = chat_prompt(tokenizer, "hello")
        assert ids[0] == first and ids.count(first) == 1


def test_without_a_template_the_parts_are_plain_text():
    tokenizer = tiny_tokenizer()
    ids = chat_prompt(tokenizer, "sum it up.", "a report.", "be brief.")
    assert ids == tokenizer("be brief.\n\na report.\n\nsum it up.")["input_ids"]


@pytest.mark.parametrize("name", ["lmsys/vicuna-7b-v1.5", "longchat-7b-16k"])
def test_a_family_without_a_template_gets_its_published_one(name, caplog, tmp_path):
    tokenizer = with_first_token(chat=False)
    tokenizer.name_or_path, tokenizer.bos_token, tokenizer.eos_token = str(tmp_path / name), "<unk>", "<eos>"
    said = (("user", "hello"), ("assistant", "yes"), ("user", "so?"))
    text = tokenizer.decode(encode_conversation(tokenizer, [{"role": role, "content": text} for role, text in said]))
    greeting = "polite answers to the user's questions. user: hello assistant: yes"
    assert text.startswith("<unk>a chat between") and text.endswith(f"{greeting}<eos>user: so? assistant:")
    assert "<unk>be brief. user: hello" in tokenizer.decode(chat_prompt(tokenizer, "hello", system="be brief."))
    assert len(caplog.records) == 1 and "template published for" in caplog.text  # said once
    assert tokenizer.chat_template is None  # it is the user's


BROKEN = b"caf\xe9".decode("utf-8", errors="surrogateescape")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("instruction", "document"), [("", None), (" \n\t", ""), ("", "  "), (BROKEN, None)])
def test_a_prompt_that_is_empty_or_not_unicode_is_refused(chat, instruction, document):
    with pytest.raises(PromptError):
        chat_prompt(tiny_tokenizer(chat=chat), instruction, document, system="be brief.")
    with pytest.raises(PromptError):
        encode(tiny_tokenizer(), instruction)


def test_text_without_any_token_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[^a-z]"), "")
    with pytest.raises(PromptError):
        encode(tokenizer, "ÄÖÜ")


def test_template_that_knows_no_system_role_is_reported():
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + tokenizer.chat_template
    )
    assert chat_prompt(tokenizer, "hello")
    with pytest.raises(PromptError, match=r"System role not supported.*Leave the system message out"):
        chat_prompt(tokenizer, "hello", system="be brief.")


@pytest.mark.parametrize("chat", [True, False])
def test_long_prompt_draws_no_warning_from_transformers(chat, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # so that caplog sees it
    tokenizer = tiny_tokenizer(chat=chat)
    tokenizer.model_max_length = 4
    assert len(chat_prompt(tokenizer, "a longer prompt")) > 4
    assert not caplog.messages
