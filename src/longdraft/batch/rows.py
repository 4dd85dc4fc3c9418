"""Rows of a batch: a line of the input becomes a request, and its result a line of the output.

There are two kinds: ours, ``{"prompt": ...}`` or ``{"messages": ...}`` with the fields in :data:`OWN`, and those of
OpenAI's batch files, ``{"custom_id": ..., "body": {...}}``. An unknown field is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Prompt, Request
from longdraft.engine.sampler import Sampling
from longdraft.engine.stats import Result
from longdraft.errors import CheckpointError, PromptError, RequestError
from longdraft.model.chat import conversation

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
_SHARED = ("prompt", "messages", "max_tokens", "seed", "stop", *_SAMPLED)
OWN = ("id", "metadata", *_SHARED)
# Fields of OpenAI's body that change nothing here, and fields that may have this value only.
_IGNORED = ("model", "user", "metadata", "store", "service_tier", "max_completion_tokens", "stream_options")
_FIXED = {"n": 1, "stream": False, "best_of": 1, "echo": False, "logprobs": False, "presence_penalty": 0,
          "frequency_penalty": 0}  # fmt: skip
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


class Line(NamedTuple):
    """A line of the input that is not blank.

    Attributes:
        number: of the row, from 0. place: line number in the file, from 1.
    """

    number: int
    place: int
    content: bytes


@dataclass(frozen=True)
class Defaults:
    """Settings of rows that do not have their own.

    Attributes:
        seed: row i is sampled with seed + i.
        raw: a prompt is a text to continue, not a turn of a chat.
        model: the model's name in answers to OpenAI's rows.
    """

    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()
    raw: bool = False
    model: str = ""


def lines(path: Path, skip: int = 0) -> Iterator[Line]:
    """Yields the rows of a file, from row ``skip`` on.

    Raises:
        CheckpointError: the file cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for place, content in enumerate(file, 1):
                if content.strip():
                    if number >= skip:
                        yield Line(number, place, content)
                    number += 1
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def measured(path: Path) -> tuple[int, str]:
    """The number of rows in a file, and the SHA-256 of its lines that are not blank. Raises as :func:`lines`."""
    digest, rows = sha256(), 0
    for line in lines(path):
        digest.update(line.content.rstrip(b"\r\n") + b"\n")
        rows += 1
    return rows, digest.hexdigest()


class Row:
    """A parsed line.

    Attributes:
        fault: why the line is no request; None if it is one.
    """

    def __init__(self, line: Line, defaults: Defaults) -> None:
        self._line, self._defaults = line, defaults
        self._row: dict[str, Any] = {}
        self._fields: dict[str, Any] = {}
        self.fault: Exception | None = None
        try:
            self._row = _object(line.content)
            self._openai = "body" in self._row
            self._fields = self._body() if self._openai else self._checked(self._row, OWN)
        except (PromptError, RequestError) as error:
            self.fault = error
            self._openai = "custom_id" in self._row

    def request(self, tokenizer: PreTrainedTokenizerBase) -> Request:
        """The engine's request.

        Raises:
            PromptError, RequestError: the prompt or a value cannot be used.
        """
        if self.fault is not None:
            raise self.fault
        fields, defaults = self._fields, self._defaults
        values = {name: value for name, value in asdict(defaults.sampling).items() if value is not None}
        values |= {name: fields[name] for name in _SAMPLED if name in fields}
        if values.get("temperature") == 0:  # the filters have no effect
            values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
        chat = "messages" in fields
        prompt: Prompt = conversation(tokenizer, _turns(fields["messages"])) if chat else fields["prompt"]
        return Request(
            prompt,
            fields.get("max_tokens", defaults.max_tokens),
            Sampling(**values),
            seed=fields.get("seed", (defaults.seed + self._line.number) % 2**63),
            stop=fields.get("stop", defaults.stop),
            chat=not (defaults.raw or self._row.get("url") == _TEXT),
        ).checked()

    def answered(self, result: Result) -> dict[str, Any]:
        """The row of the output."""
        if not self._openai:
            return self._identity() | {
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": result.new_tokens,
            }
        chat = "messages" in self._fields
        text = {"message": {"role": "assistant", "content": result.text}} if chat else {"text": result.text}
        finish = "length" if result.finish_reason == "length" else "stop"
        body = {
            "object": "chat.completion" if chat else "text_completion",
            "model": self._defaults.model,
            "choices": [{"index": 0, **text, "finish_reason": finish, "logprobs": None}],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.new_tokens,
                "total_tokens": result.prompt_tokens + result.new_tokens,
            },
        }
        name = f"row_{self._line.number}"
        response = {"status_code": 200, "request_id": name, "body": {"id": name, **body}}
        return self._identity() | {"response": response, "error": None}

    def failed(self, error: Exception) -> dict[str, Any]:
        """The row of the output if there is no answer."""
        message = " ".join(str(error).split()) or type(error).__name__
        if self._openai:
            return self._identity() | {"response": None, "error": {"code": type(error).__name__, "message": message}}
        return self._identity() | {"error": message}

    def _identity(self) -> dict[str, Any]:
        """The fields by which an answer is matched to its row."""
        if self._openai:
            return {"id": f"batch_req_{self._line.number}", "custom_id": self._row.get("custom_id")}
        identity: dict[str, Any] = {"line": self._line.place}
        return identity | {name: self._row[name] for name in ("id", "metadata") if name in self._row}

    def _body(self) -> dict[str, Any]:
        """The fields of OpenAI's body, under our names."""
        self._checked(self._row, ("custom_id", "method", "url", "body"), prompted=False)
        body, url = self._row["body"], self._row.get("url")
        if not isinstance(body, dict):
            raise RequestError("body is not an object.")
        if url not in (None, _CHAT, _TEXT):
            raise RequestError(f"url {url!r} is not served: {_CHAT} and {_TEXT} are.")
        for name in [name for name in body if name in _FIXED]:
            if body[name] not in (None, _FIXED[name]):
                raise RequestError(f"{name} {body[name]!r} is not served here: leave it out.")
        body = {name: value for name, value in body.items() if name not in _FIXED}
        fields = self._checked(body, (*_SHARED, *_IGNORED))
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        return fields

    @staticmethod
    def _checked(row: Mapping[str, Any], known: tuple[str, ...], prompted: bool = True) -> dict[str, Any]:
        """The row without nulls. Raises RequestError for an unknown field, or if it has no prompt or two."""
        fields = {name: value for name, value in row.items() if value is not None}
        if unknown := [name for name in fields if name not in known]:
            raise RequestError(
                f"{', '.join(unknown)}: not read here; the fields are {', '.join(known)} (metadata is carried along)."
            )
        if prompted and ("prompt" in fields) == ("messages" in fields):
            raise RequestError("A row has a prompt or messages, one of the two.")
        return fields


def _object(content: bytes) -> dict[str, Any]:
    try:
        row = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PromptError(f"The line is not in UTF-8 (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"The line is not JSON: {error}.") from None
    if not isinstance(row, dict):
        raise PromptError("The line is not a JSON object.")
    return row


def _turns(messages: Any) -> list[dict[str, Any]]:
    """The messages for chat templates, with each content as one text."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RequestError("messages is a list of objects with role and content.")
    turns = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise RequestError("Each message has a role and a content, both texts.")
        turns.append({**message, "content": content})
    return turns
