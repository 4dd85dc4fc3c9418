"""Rows of a batch: a line of the input becomes a request to the server, and the response a line of the output.

There are two formats: ours has the fields of a chat or a completion, ``id`` and ``metadata``; OpenAI's batch files have
``{"custom_id": ..., "body": {...}}``. Unknown fields are an error in ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longdraft.engine.sampler import Sampling
from longdraft.files import file_errors, require_regular
from longdraft.serve import protocol, serving
from longdraft.serve.errors import ApiError
from longdraft.serve.protocol import parse_body, validate
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.serving import PendingResponse

Body = protocol.ChatCompletionRequest | protocol.CompletionRequest | ResponsesRequest


class InputLine(NamedTuple):
    """A line of the input that is not blank.

    Attributes:
        row_index: from 0, without blank lines. line_number: in the file, from 1.
    """

    row_index: int
    line_number: int
    content: bytes


@dataclass(frozen=True)
class Defaults:
    """Defaults of the rows' fields.

    Attributes:
        seed: row i is sampled with seed + i.
        raw: a prompt is text to continue, not a user's message.
        model: the model's name in responses to rows in OpenAI's format.
    """

    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()
    raw: bool = False
    model: str = ""


def read_lines(path: Path, skip: int = 0) -> Iterator[InputLine]:
    """Yields the rows of a file, from row ``skip`` on.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with file_errors(path, f"{path} cannot be read"):
        file = require_regular(path).open("rb")
    with file:
        rows = ((line_number, content) for line_number, content in enumerate(file, 1) if content.strip())
        for row_index, (line_number, content) in enumerate(rows):
            if row_index >= skip:
                yield InputLine(row_index, line_number, content)


def count_and_digest(path: Path) -> tuple[int, str]:
    """The number of rows in a file, and the SHA-256 of its lines that are not blank. Raises as :func:`read_lines`."""
    digest, num_rows = sha256(), 0
    for line in read_lines(path):
        digest.update(line.content.rstrip(b"\r\n") + b"\n")
        num_rows += 1
    return num_rows, digest.hexdigest()


class _AnyRow(protocol.StrictModel, extra="allow"):
    """A row in either format."""


class _OpenAIRow(protocol.StrictModel):
    """A row in OpenAI's format."""

    custom_id: str | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] | None = None
    body: dict[str, Any]


class Row:
    """Converts a line to a request, and its result to a row of the output."""

    def __init__(self, line: InputLine, defaults: Defaults) -> None:
        self._line, self._defaults, self._is_openai = line, defaults, False
        self._row: dict[str, Any] = {}
        self._parse_error: ApiError | None = None
        try:
            self._row = parse_body(_AnyRow, line.content.removeprefix(b"\xef\xbb\xbf"), "json").model_dump()
            self._is_openai = "body" in self._row or "custom_id" in self._row
        except ApiError as error:
            self._parse_error = error

    def create_response(self, service: Service) -> PendingResponse:
        """The row's pending response, to be submitted. Raises LongdraftError or ApiError if the line is no request."""
        if self._parse_error is not None:
            raise self._parse_error
        body = self._openai_body() if self._is_openai else self._own_body()
        if isinstance(body, protocol.CompletionRequest):
            return serving.create_completion(service, body)
        if isinstance(body, ResponsesRequest):
            return serving.create_response(service, body)
        return serving.create_chat_completion(service, body)

    def result_row(self, body: dict[str, Any], pending: PendingResponse) -> dict[str, Any]:
        """The row of the output for a response object."""
        if self._is_openai:
            request_id = f"row_{self._line.row_index}"
            body = body if isinstance(pending, serving.AdaptedResponse) else body | {"id": request_id}
            response = {"status_code": 200, "request_id": request_id, "body": body}
            return self._identity() | {"response": response, "error": None}
        texts = [choice.get("message", {}).get("content", choice.get("text")) for choice in body["choices"]]
        first = body["choices"][0]
        optional = {"tool_calls": first.get("message", {}).get("tool_calls"), "logprobs": first["logprobs"]}
        result = pending.choices[0].result
        assert result is not None
        return self._identity() | {
            "text": texts[0] or "",
            **{name: value for name, value in optional.items() if value},
            **({"texts": texts} if len(texts) > 1 else {}),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": pending.num_new_tokens,
        }

    def error_row(self, error: Exception) -> dict[str, Any]:
        """The row of the output for an error."""
        message = " ".join(str(error).split()) or type(error).__name__
        if self._is_openai:
            return self._identity() | {"response": None, "error": {"code": type(error).__name__, "message": message}}
        return self._identity() | {"error": message}

    def _identity(self) -> dict[str, Any]:
        """The fields that say which row of the input this is."""
        if self._is_openai:
            return {"id": f"batch_req_{self._line.row_index}", "custom_id": self._row.get("custom_id")}
        identity: dict[str, Any] = {"line": self._line.line_number}
        return identity | {name: self._row[name] for name in ("id", "metadata") if name in self._row}

    def _own_body(self) -> Body:
        """The request of a row in our format."""
        fields = {name: value for name, value in self._row.items() if name not in ("id", "metadata")}
        if ("prompt" in fields) == ("messages" in fields):
            raise ApiError(400, "A row has a prompt or messages, one of the two.", param="prompt")
        if isinstance(prompt := fields.get("prompt"), str) and not self._defaults.raw:
            if not prompt.strip():
                raise ApiError(400, "The prompt is empty: give some text.", param="prompt")
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        # The row's text includes the model's reasoning.
        body = self._with_defaults(fields, {"reasoning_format": "none"} if "messages" in fields else {})
        if unknown := [name for name in fields if name not in type(body).model_fields]:
            raise ApiError(400, f"{unknown[0]} is no field of a row.", param=unknown[0])
        return body

    def _openai_body(self) -> Body:
        row = validate(_OpenAIRow, self._row)
        return self._with_defaults({k: v for k, v in row.body.items() if k != "model"}, {}, row.url)

    def _with_defaults(self, fields: dict[str, Any], more: dict[str, Any], url: str | None = None) -> Body:
        """The request with ``fields``, and for others the run's defaults and ``more``."""
        defaults, sampled = self._defaults, protocol.SampledRequest.model_fields
        fields = {name: value for name, value in fields.items() if value is not None}
        values = {k: v for k, v in asdict(defaults.sampling).items() if v is not None and k in sampled}
        values |= {"seed": (defaults.seed + self._line.row_index) % 2**63, "stop": list(defaults.stop), **more}
        model: type[Body] = ResponsesRequest if url == "/v1/responses" else protocol.CompletionRequest
        if "messages" in fields and url in (None, "/v1/chat/completions"):
            model = protocol.ChatCompletionRequest
        if not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & fields.keys():
            values["max_output_tokens" if model is ResponsesRequest else "max_tokens"] = defaults.max_tokens
        fields = values | fields
        if fields.pop("stream", False):
            raise ApiError(400, "stream is not served in a file: leave it out.", param="stream")
        return validate(model, fields)
