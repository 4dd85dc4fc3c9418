"""Rows of a batch: from a line of the input to a request, and from its result to a line of the output.

Two kinds: ours, ``{"prompt": ...}`` or ``{"messages": ...}`` with what :data:`OWN` names, and those of OpenAI's batch
files, ``{"custom_id": ..., "body": {...}}``. A field that is not read is refused, never ignored.
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
# Of OpenAI's body: what changes nothing here, and what may have no other value than this.
_IDLE = ("model", "user", "metadata", "store", "service_tier", "max_completion_tokens", "stream_options")
_FIXED = {"n": 1, "stream": False, "best_of": 1, "echo": False, "logprobs": False, "presence_penalty": 0,
          "frequency_penalty": 0}  # fmt: skip
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


class Line(NamedTuple):
    """A line of the input that is not blank.

    Attributes:
        number: of the row, the first is 0. place: of the line in the file, the first is 1.
    """

    number: int
    place: int
    content: bytes


@dataclass(frozen=True)
class Defaults:
    """What a row is decoded with where it says nothing.

    Attributes:
        seed: row i is sampled with seed + i.
        raw: a prompt is a text to go on with, not a turn of a chat.
        model: as OpenAI's rows are told.
    """

    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()
    raw: bool = False
    model: str = ""


def lines(path: Path, skip: int = 0) -> Iterator[Line]:
    """The rows of a file from row ``skip`` on, read as they are asked for.

    Raises:
        CheckpointError: it cannot be read.
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
    """Rows of a file, and the SHA-256 of its lines that are not blank; for errors, see :func:`lines`."""
    digest, rows = sha256(), 0
    for line in lines(path):
        digest.update(line.content.rstrip(b"\r\n") + b"\n")
        rows += 1
    return rows, digest.hexdigest()


class Row:
    """A line that was understood, or is the reason why not.

    Attributes:
        fault: why there is no request; None where there is one.
    """

    def __init__(self, line: Line, defaults: Defaults) -> None:
        self._line, self._defaults = line, defaults
        self._row: dict[str, Any] = {}
        self._said: dict[str, Any] = {}
        self.fault: Exception | None = None
        try:
            self._row = _object(line.content)
            self._openai = "body" in self._row
            self._said = self._body() if self._openai else self._checked(self._row, OWN)
        except (PromptError, RequestError) as error:
            self.fault = error
            self._openai = "custom_id" in self._row

    def request(self, tokenizer: PreTrainedTokenizerBase) -> Request:
        """What the engine is asked for.

        Raises:
            PromptError, RequestError: a prompt or a value that cannot be used.
        """
        if self.fault is not None:
            raise self.fault
        said, own = self._said, self._defaults
        values = {name: value for name, value in asdict(own.sampling).items() if value is not None}
        values |= {name: said[name] for name in _SAMPLED if name in said}
        if values.get("temperature") == 0:  # where nothing is sampled, nothing shapes it
            values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
        prompt: Prompt = conversation(tokenizer, _turns(said["messages"])) if "messages" in said else said["prompt"]
        return Request(
            prompt,
            said.get("max_tokens", own.max_tokens),
            Sampling(**values),
            seed=said.get("seed", (own.seed + self._line.number) % 2**63),
            stop=said.get("stop", own.stop),
            chat=not (own.raw or self._row.get("url") == _TEXT),
        ).checked()

    def answered(self, result: Result) -> dict[str, Any]:
        """The row of the output."""
        if not self._openai:
            return self._named() | {
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": result.new_tokens,
            }
        chat = "messages" in self._said
        said = {"message": {"role": "assistant", "content": result.text}} if chat else {"text": result.text}
        ended = "length" if result.finish_reason == "length" else "stop"
        body = {
            "object": "chat.completion" if chat else "text_completion",
            "model": self._defaults.model,
            "choices": [{"index": 0, **said, "finish_reason": ended, "logprobs": None}],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.new_tokens,
                "total_tokens": result.prompt_tokens + result.new_tokens,
            },
        }
        name = f"{self._line.number}"
        response = {"status_code": 200, "request_id": f"row_{name}", "body": {"id": f"row_{name}", **body}}
        return self._named() | {"response": response, "error": None}

    def failed(self, error: Exception) -> dict[str, Any]:
        """The row of the output that says why there is no answer."""
        said = " ".join(str(error).split()) or type(error).__name__
        if self._openai:
            return self._named() | {"response": None, "error": {"code": type(error).__name__, "message": said}}
        return self._named() | {"error": said}

    def _named(self) -> dict[str, Any]:
        """Whose answer it is."""
        if self._openai:
            return {"id": f"batch_req_{self._line.number}", "custom_id": self._row.get("custom_id")}
        named: dict[str, Any] = {"line": self._line.place}
        return named | {name: self._row[name] for name in ("id", "metadata") if name in self._row}

    def _body(self) -> dict[str, Any]:
        """OpenAI's fields under our names."""
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
        said = self._checked(body, (*_SHARED, *_IDLE))
        if "max_completion_tokens" in said:
            said["max_tokens"] = said.pop("max_completion_tokens")
        return said

    @staticmethod
    def _checked(row: Mapping[str, Any], known: tuple[str, ...], prompted: bool = True) -> dict[str, Any]:
        """A row without nulls, whose fields are all known."""
        said = {name: value for name, value in row.items() if value is not None}
        if unknown := [name for name in said if name not in known]:
            raise RequestError(
                f"{', '.join(unknown)}: not read here; the fields are {', '.join(known)} (metadata is carried along)."
            )
        if prompted and ("prompt" in said) == ("messages" in said):
            raise RequestError("A row has a prompt or messages, one of the two.")
        return said


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PromptError(f"The line is not in UTF-8 (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"The line is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise PromptError("The line is not a JSON object.")
    return found


def _turns(messages: Any) -> list[dict[str, Any]]:
    """Messages whose contents are texts, as chat templates take them."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RequestError("messages is a list of objects with role and content.")
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise RequestError("Each message has a role and a content, both texts.")
        found.append({**message, "content": content})
    return found
