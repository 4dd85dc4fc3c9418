"""Conversations, by their effect: the text is that of Python with the same messages and settings.

Input is piped in; in a terminal: ``test_terminal.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft import Result, Speculator, load
from tests.support.tiny import tiny_model, tiny_tokenizer

# The tiny template, which also knows how to think.
THINKS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"
)
USUAL = ("--plan", "fixed", "--method", "prompt-lookup", "-n", 12)
ASKED = [{"role": "user", "content": "who are you?"}]
BRIEF = {"role": "system", "content": "be brief."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("thinks")
    tiny_model(context=512).save_pretrained(where)
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = THINKS
    tokenizer.save_pretrained(where)
    return where


def answer(folder: Path, messages: Any, new: int = 12, template: Any = None, **settings: Any) -> Result:
    """The answer from Python, by plain decoding."""
    model, tokenizer = load(str(folder), device="cpu")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **template or {})
    return Speculator("ar", model, tokenizer).generate([ids], max_new_tokens=new, **settings)[0]


def answers(folder: Path, *questions: str) -> list[str]:
    """A conversation by hand."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(folder, messages).text})
    return [message["content"] for message in messages[1::2]]


@pytest.fixture
def chat(shell, folder):
    def run(*lines, arguments=()):
        ended = shell("chat", "--model", folder, *USUAL, *arguments, stdin="\n".join(lines).encode())
        assert ended.code == 0, ended.err
        return ended

    return run


def test_a_conversation_goes_on_reads_what_is_new_alone_and_is_forgotten(chat, folder):
    ended = chat("who are you?", "and i?", "/method ar", "/new", "who are you?", "/method suffix min_n=2", "/method")
    first, second = answers(folder, "who are you?", "and i?")
    assert ended.out.splitlines() == [first, second, first] and first != second and "suffix, min_n=2" in ended.err
    read = [line for line in ended.err.splitlines() if "prompt tokens read" in line]
    new, whole = (int(word) for word in read[1].split(" prompt tokens")[0].split()[-3::2])
    assert new <= whole - len("who are you?")  # what stands before the first answer is there


def test_a_document_goes_before_the_first_question(chat, folder, tmp_path):
    (tmp_path / "note.txt").write_text("a ship.")
    expected = answers(folder, "File: note.txt\n\na ship.\n\nwhat?")
    assert chat("what?", arguments=("-f", tmp_path / "note.txt")).out.splitlines() == expected
    ended = chat(f"/file {tmp_path / 'note.txt'}", "what?", f"/file {tmp_path / 'note.txt'}", "/new", "who are you?")
    assert ended.out.splitlines() == [*expected, answer(folder, ASKED).text]  # what nobody asked about is forgotten


def test_set_and_seed_are_those_of_the_next_answer(chat, folder):
    sampled = [answer(folder, ASKED, 9, temperature=0.9, top_p=0.95, seed=seed).text for seed in (7, 8)]
    lines = ["/set max_tokens 9", "/set temperature 0.9", "/set top-p=0.95", "/set seed 7", "who are you?"]
    ended = chat(*lines, "/new", "/set seed 8", "who are you?", "/new", "/set temperature 0", "who are you?", "/set")
    expected = [*sampled, answer(folder, ASKED, 9).text]
    assert ended.out == "".join(f"{text}\n" for text in expected) and len(set(expected)) == 3
    assert "seed 8" in ended.err and "max_tokens 9" in ended.err


def test_help_undo_and_quit(chat, folder):
    ended = chat("one?", "two?", "/undo", "two?", "/help", "/quit", "three?")
    one, two = answers(folder, "one?", "two?")
    assert ended.out.startswith(f"{one}\n{two}\n{two}\n") and len(ended.err.split("prompt tokens read")) == 4
    assert all(f"/{name} " in ended.out for name in ("help", "method", "file", "new", "undo", "set", "quit"))


@pytest.mark.parametrize(
    ("flags", "first", "template"),
    [
        ((), [], {}), (("--system", "be brief."), [BRIEF], {}),
        (("--system", "be brief.", "--no-think"), [BRIEF], {"enable_thinking": False}),
    ],
    ids=["neither", "system", "no-think"],
)  # fmt: skip
def test_a_system_message_and_no_thoughts(shell, chat, folder, flags, first, template):
    expected = answer(folder, [*first, *ASKED], template=template)
    assert chat("who are you?", arguments=flags).out == f"{expected.text}\n"
    ended = shell("generate", "--model", folder, *USUAL, "-p", "who are you?", *flags, "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert (found["token_ids"], found["prompt_tokens"]) == (expected.token_ids, expected.prompt_tokens)


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--seed", 3)], ids=["greedy", "sampled"])
def test_deterministic_is_the_same_text_and_says_where_it_cannot_be_kept(shell, folder, sampling):
    words = ("generate", "--model", folder, *USUAL, "-p", "ship, ship, ship", *sampling, "--json")
    plain, kept = (json.loads(shell(*words, *more).out.splitlines()[-1]) for more in ((), ("--deterministic",)))
    assert kept["token_ids"] == plain["token_ids"]
    refused = shell(*words, "--deterministic", "--dtype", "bfloat16")
    assert refused.code != 0 and "deterministic" in refused.err


REFUSED = {
    "/und": "did you mean /undo?", "/method nonsense": "nonsense", "/method ar x=1": "x",
    "/set temperature hot": "hot", "/set heat 3": "heat", "/set top_p 3": "top_p", "/file nowhere.txt": "nowhere.txt",
    "/set temperature inf": "temperature", "/set max_tokens ,": "max_tokens", "/set top_p 0.9,1": "top_p",
    "/set seed x": "whole number",
    "long " * 200: "/new starts a new conversation",
}  # fmt: skip


def test_what_cannot_be_done_is_said_and_the_session_goes_on(chat, folder):
    ended = chat(*REFUSED, "one?")
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert ended.out.splitlines() == answers(folder, "one?")
    assert all(said in error for said, error in zip(REFUSED.values(), errors, strict=True))
