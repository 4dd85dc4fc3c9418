"""``longdraft chat``, with its input piped in (in a terminal: ``test_terminal.py``)."""

from __future__ import annotations

import pytest

from longdraft import Speculator, load
from longdraft.engine.chat import encode_conversation


@pytest.fixture
def chat(shell, model_folder):
    def run(*lines, arguments=()):
        return shell(
            "chat", "--model", model_folder, "-n", 12, "--plan", "fixed", "--method", "prompt-lookup", *arguments,
            stdin="\n".join(lines).encode(),
        )  # fmt: skip

    return run


def answers(model_folder, *questions, first=""):
    """The same conversation by hand."""
    model, tokenizer = load(str(model_folder))
    spec, messages, found = Speculator("ar", model, tokenizer, plan="fixed"), [], []
    for i, question in enumerate(questions):
        messages.append({"role": "user", "content": first + question if i == 0 else question})
        found.append(spec.generate(encode_conversation(tokenizer, messages), max_new_tokens=12)[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_a_conversation_goes_on_and_reads_what_is_new_alone(chat, model_folder):
    ended = chat("who are you?", "and i?")
    assert ended.code == 0 and ended.out == "".join(f"{x}\n" for x in answers(model_folder, "who are you?", "and i?"))
    read = [line for line in ended.err.splitlines() if "prompt tokens read" in line]
    new, whole = (int(word) for word in read[1].split(" prompt tokens")[0].split()[-3::2])
    assert new < 0.6 * whole  # what stands before the first answer is there


def test_a_document_goes_before_the_first_question(chat, model_folder, tmp_path):
    (tmp_path / "note.txt").write_text("a ship.")
    first = "File: note.txt\n\na ship.\n\n"
    for ended in (
        chat("what?", arguments=("-f", tmp_path / "note.txt")),
        chat(f"/file {tmp_path / 'note.txt'}", "what?"),
    ):
        assert ended.out == answers(model_folder, "what?", first=first)[0] + "\n"


def test_methods_change_and_the_text_does_not(chat, model_folder):
    ended = chat("who are you?", "/method ar", "and i?", "/method suffix min_n=2", "/method")
    assert ended.out == "".join(f"{x}\n" for x in answers(model_folder, "who are you?", "and i?"))
    assert "suffix, min_n=2" in ended.err


def test_commands(chat, model_folder, tmp_path):
    ended = chat(
        "one?",
        "two?",
        "/undo",
        "/new",
        "/set",
        "/set seed 7",
        "/help",
        "/quit",
        "three?",
    )
    (answer,) = answers(model_folder, "one?")
    assert ended.out.startswith(f"{answer}\n") and "seed 7" in ended.err and "max_tokens 12" in ended.err
    assert all(f"/{name} " in ended.out for name in ("help", "method", "file", "new", "undo", "set", "quit"))
    assert ended.code == 0 and len(ended.err.split("prompt tokens read")) == 3


REFUSED = {
    "/und": "did you mean /undo?", "/method nonsense": "nonsense", "/method ar x=1": "x",
    "/set temperature hot": "hot", "/set heat 3": "heat", "/set top_p 3": "top_p", "/file nowhere.txt": "nowhere.txt",
    "/set temperature inf": "temperature", "/set max_tokens ,": "max_tokens", "/set top_p 0.9,1": "top_p",
    "/set seed x": "whole number",
    "long " * 200: "/new starts a new conversation",
}  # fmt: skip


def test_what_cannot_be_done_is_said_and_the_session_goes_on(chat, model_folder):
    ended = chat(*REFUSED, "one?")
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert ended.code == 0 and ended.out == answers(model_folder, "one?")[0] + "\n"
    assert all(said in error for said, error in zip(REFUSED.values(), errors, strict=True))
