"""Rows of a batch, the output file, and the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from longdraft import LongdraftError, Request, Speculator
from longdraft.batch.output import OutputFile
from longdraft.batch.rows import Defaults, InputLine, Row
from longdraft.batch.run import RowResult, run
from longdraft.errors import CapabilityError, CheckpointError, ConfigError
from longdraft.serve.errors import ApiError
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings
from tests.support.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer(chat=True)
MADE = {"input": "a", "seed": 0}


def found(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(content: object, number: int = 3, **defaults: object) -> Row:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Row(InputLine(number, number + 1, text), Defaults(**defaults))  # type: ignore[arg-type]


def request(content: object, **defaults: object) -> Request:
    spec = Speculator("ar", tiny_model(), TOKENIZER)
    service = Service(ServerSettings("m", ("ar",), context=600), lambda _: spec, TOKENIZER)
    return row(content, **defaults).create_response(service).choices[0].request


def test_rows_make_requests():
    """A row's own settings override the command's; messages go through the chat template; OpenAI's rows are read."""
    made = request({"prompt": "hi", "max_tokens": 4, "temperature": 0.5}, max_tokens=9, seed=10)
    assert (made.max_new_tokens, made.seed, made.sampling.temperature) == (4, 13, 0.5)
    made = request({"prompt": "hi", "seed": 1, "stop": "x"}, max_tokens=9)
    assert (made.max_new_tokens, made.seed, made.sampling.greedy, made.stop) == (9, 1, True, ("x",))
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    body = {"model": "m", "messages": messages, "temperature": 0, "top_p": 1, "n": 1}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    text = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a"}}
    templated = "<user>a<eos><assistant>"
    for content, raw, prompt in (
        ({"messages": messages}, False, templated), ({"prompt": "a"}, False, templated), ({"prompt": "a"}, True, "a"),
        (chat, False, templated), (text, False, "a"),
    ):  # fmt: skip
        assert TOKENIZER.decode(request(content, raw=raw).prompt) == prompt
    failed = row(chat).error_row(ValueError("because"))
    assert failed["custom_id"] == "c" and failed["error"]["message"] == "because" and failed["response"] is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff", "UTF-8"),
        (b"{", "JSON"),
        ([1], "body"),
        ({"id": 1}, "a prompt or messages"),
        ({"prompt": "a", "messages": []}, "one of the two"),
        ({"prompt": "a", "max_token": 3}, "max_token"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "seed": "x"}, "seed"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "nobody"}]}, "messages.0.role"),
        ({"body": 3}, "body"),
        ({"body": {"prompt": "a", "stream": True}}, "stream"),
        ({"body": {"prompt": "a"}, "url": "/v1/embeddings"}, "url"),
    ],
)
def test_bad_rows_say_why(content, problem):
    with pytest.raises((ApiError, LongdraftError), match=problem):
        request(content)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out"
    with OutputFile(path, MADE) as file:
        file.write({}, False)
        with pytest.raises(CheckpointError):
            OutputFile(path, MADE)
    with pytest.raises(ConfigError, match="seed"):
        OutputFile(path, MADE | {"seed": 1})
    path.write_text('{}\nnonsense\n{"a": 1}\n')
    with pytest.raises(CheckpointError, match=":2"):
        OutputFile(path, MADE)
    (tmp_path / "out.run").unlink()
    with pytest.raises(ConfigError):
        OutputFile(path, MADE)
    assert path.read_text() == '{}\nnonsense\n{"a": 1}\n'


class Backwards:
    """An engine that answers later rows sooner, and some with an unexpected error."""

    def __init__(self, *unexpected: int) -> None:
        self.max_rows_in_flight, self._unexpected = 4, unexpected
        self.held = self.most = 0

    async def answer(self, line: InputLine) -> RowResult:
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(0.003 * (-line.row_index % self.max_rows_in_flight))
        self.held -= 1
        bad = line.row_index in self._unexpected
        return RowResult({"error" if bad else "row": line.row_index}, bad, bad)


def test_rows_are_written_in_order_and_an_engine_that_fails_row_after_row_ends_the_run(tmp_path):
    path, decoder = tmp_path / "out", Backwards(11, 13, *range(17, 40))
    lines = [InputLine(i, i + 1, b"{}") for i in range(40)]
    with OutputFile(path, MADE) as file:
        assert asyncio.run(run(iter(lines[:15]), file, decoder)).num_rows == 15 and file.num_errors == 2
        assert [each.get("row") for each in found(path)][:11] == [*range(11)] and decoder.most <= 4
        with pytest.raises(CapabilityError):
            asyncio.run(run(iter(lines[15:]), file, decoder))
        assert (file.num_rows, file.num_errors) == (17, 2)  # none of the errors that ended it
    assert len(found(path)) == 17
