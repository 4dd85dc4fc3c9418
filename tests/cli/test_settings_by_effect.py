"""Settings of a conversation, by their effect: the text equals that of Python with the same settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft import Result, Speculator, load
from tests.support.tiny import tiny_model, tiny_tokenizer

# The tiny template, which also knows how to think.
THINKS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"
)
USUAL = ("--plan", "fixed", "--method", "prompt-lookup", "-n", 12)
ASKED = [{"role": "user", "content": "who are you?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("thinks")
    tiny_model(context=512).save_pretrained(where)
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = THINKS.replace("<{{ m['role'] }}>", "{{ m['role'] }}: ")
    tokenizer.save_pretrained(where)
    return where


def answer(folder: Path, messages: Any, new: int = 12, template: Any = None, **settings: Any) -> Result:
    """The answer from Python, by plain decoding."""
    model, tokenizer = load(str(folder), device="cpu")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **template or {})
    return Speculator("ar", model, tokenizer).generate([ids], max_new_tokens=new, **settings)[0]


@pytest.fixture
def chat(shell, folder):
    def run(*lines: str, arguments: tuple[Any, ...] = ()) -> list[str]:
        ended = shell("chat", "--model", folder, *USUAL, *arguments, stdin="\n".join(lines).encode())
        assert ended.code == 0
        return ended.out.splitlines()

    return run


def test_new_forgets_what_was_said(chat, folder):
    first = answer(folder, ASKED).text
    said = chat("who are you?", "and i?", "/new", "who are you?")
    assert said[0] == said[2] == first != said[1]
    more = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "and i?"}]
    assert said[1] == answer(folder, more).text


def test_new_forgets_a_document_that_nobody_has_asked_about(chat, folder, tmp_path):
    (tmp_path / "note.txt").write_text("a ship.")
    assert chat(f"/file {tmp_path / 'note.txt'}", "/new", "who are you?") == [answer(folder, ASKED).text]


def test_set_and_seed_are_those_of_the_next_answer(chat, folder):
    sampled = [answer(folder, ASKED, 9, temperature=0.9, top_p=0.95, seed=seed).text for seed in (7, 8)]
    lines = ["/set max_tokens 9", "/set temperature 0.9", "/set top-p=0.95", "/set seed 7", "who are you?"]
    said = chat(*lines, "/new", "/set seed 8", "who are you?", "/new", "/set temperature 0", "who are you?")
    expected = [*sampled, answer(folder, ASKED, 9).text]
    assert "\n".join(said) == "\n".join(expected) and len(set(expected)) == 3


def test_a_system_message_and_no_thoughts_in_a_chat(chat, folder):
    system = {"role": "system", "content": "be brief."}
    said = chat("who are you?", arguments=("--system", "be brief.", "--no-think"))
    assert said == [answer(folder, [system, *ASKED], template={"enable_thinking": False}).text]


@pytest.mark.parametrize(
    ("flags", "first", "template"),
    [
        ((), [], {}),
        (("--system", "be brief."), [{"role": "system", "content": "be brief."}], {}),
        (("--no-think",), [], {"enable_thinking": False}),
    ],
    ids=["neither", "system", "no-think"],
)
def test_a_system_message_and_no_thoughts_from_the_command_line(shell, folder, flags, first, template):
    ended = shell("generate", "--model", folder, *USUAL, "-p", "who are you?", *flags, "--json")
    found, expected = json.loads(ended.out.splitlines()[-1]), answer(folder, [*first, *ASKED], template=template)
    assert (found["token_ids"], found["prompt_tokens"]) == (expected.token_ids, expected.prompt_tokens)


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--seed", 3)], ids=["greedy", "sampled"])
def test_deterministic_is_the_same_text_and_says_where_it_cannot_be_kept(shell, folder, sampling):
    words = ("generate", "--model", folder, *USUAL, "-p", "ship, ship, ship", *sampling, "--json")
    plain, kept = (json.loads(shell(*words, *more).out.splitlines()[-1]) for more in ((), ("--deterministic",)))
    assert kept["token_ids"] == plain["token_ids"]
    refused = shell(*words, "--deterministic", "--dtype", "bfloat16")
    assert refused.code != 0 and "deterministic" in refused.err
