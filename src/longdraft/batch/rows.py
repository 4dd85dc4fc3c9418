"""Converts a row of the input to a request to the server, and the server's response to a row of the output.

A row has one of two formats. OpenAI's batch format is ``{"custom_id": ..., "body": {...}}``. The native format has the
fields of a chat or a completion request, plus ``id`` and ``metadata``; unknown fields in a native row are an error.
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
from longdraft.serve.responses import ResponsesResponse, create_response
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.serving import PendingResponse

Request = protocol.ChatCompletionRequest | protocol.CompletionRequest | ResponsesRequest


class InputLine(NamedTuple):
    """A row of the input: a line that is not blank."""

    row_index: int  # from 0; blank lines do not count
    line_number: int  # from 1; blank lines count
    content: bytes


@dataclass(frozen=True)
class Defaults:
    """Values of the run for fields that a row leaves out."""

    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # row i is sampled with seed + i
    stop: tuple[str, ...] = ()
    raw: bool = False  # True: a prompt is text to continue; False: a user's message
    model: str = ""  # the model's name in responses to rows in OpenAI's format


def read_lines(path: Path, skip: int = 0) -> Iterator[InputLine]:
    """Yields the rows of a file, without the first ``skip``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with file_errors(path, f"{path} cannot be read"):
        file = require_regular(path).open("rb")
    with file:
        numbered_lines = ((line_number, content) for line_number, content in enumerate(file, 1) if content.strip())
        for row_index, (line_number, content) in enumerate(numbered_lines):
            if row_index >= skip:
                yield InputLine(row_index, line_number, content)


def count_and_digest(path: Path) -> tuple[int, str]:
    """Returns the number of rows in a file, and the SHA-256 of the rows. Raises the errors of :func:`read_lines`."""
    digest, num_rows = sha256(), 0
    for line in read_lines(path):
        digest.update(line.content.rstrip(b"\r\n") + b"\n")
        num_rows += 1
    return num_rows, digest.hexdigest()


class _AnyRow(protocol.ApiModel, extra="allow"):
    """A row in either format."""


class _OpenAIRow(protocol.ApiModel):
    """A row in OpenAI's format."""

    custom_id: str | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] | None = None
    body: dict[str, Any]


class Row:
    """A row of the input: makes its request, and the row of the output from the response or the error."""

    def __init__(self, line: InputLine, defaults: Defaults) -> None:
        self._line, self._defaults, self._is_openai = line, defaults, False
        self._row_fields: dict[str, Any] = {}
        self._parse_error: ApiError | None = None
        try:
            content = line.content.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
            self._row_fields = parse_body(_AnyRow, content, "json").model_dump()
            self._is_openai = "body" in self._row_fields or "custom_id" in self._row_fields
        except ApiError as error:
            self._parse_error = error

    def create_response(self, service: Service) -> PendingResponse:
        """Creates the pending response, which the caller submits to the engine. Raises LongdraftError or ApiError."""
        if self._parse_error is not None:
            raise self._parse_error
        request = self._openai_request() if self._is_openai else self._native_request()
        if isinstance(request, protocol.CompletionRequest):
            return serving.create_completion(service, request)
        if isinstance(request, ResponsesRequest):
            return create_response(service, request)
        return serving.create_chat_completion(service, request)

    def result_row(self, response_body: dict[str, Any], pending: PendingResponse) -> dict[str, Any]:
        """Returns the row of the output. ``response_body``: the full response that the server would send."""
        if self._is_openai:
            request_id = f"row_{self._line.row_index}"
            if not isinstance(pending, ResponsesResponse):  # which keeps its own id
                response_body = response_body | {"id": request_id}
            response = {"status_code": 200, "request_id": request_id, "body": response_body}
            return self._identity() | {"response": response, "error": None}
        # A choice of a chat has a message, a choice of a completion has a text.
        texts = [choice.get("message", {}).get("content", choice.get("text")) for choice in response_body["choices"]]
        first_choice = response_body["choices"][0]
        tool_calls = first_choice.get("message", {}).get("tool_calls")
        optional_fields = {"tool_calls": tool_calls, "logprobs": first_choice["logprobs"]}
        result = pending.choices[0].result
        assert result is not None
        return self._identity() | {
            "text": texts[0] or "",
            **{name: value for name, value in optional_fields.items() if value},
            **({"texts": texts} if len(texts) > 1 else {}),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": pending.num_new_tokens,
        }

    def error_row(self, error: Exception) -> dict[str, Any]:
        """Returns the row of the output for an error."""
        message = " ".join(str(error).split()) or type(error).__name__
        if self._is_openai:
            return self._identity() | {"response": None, "error": {"code": type(error).__name__, "message": message}}
        return self._identity() | {"error": message}

    def _identity(self) -> dict[str, Any]:
        """Returns the fields that identify the row of the input."""
        if self._is_openai:
            return {"id": f"batch_req_{self._line.row_index}", "custom_id": self._row_fields.get("custom_id")}
        identity: dict[str, Any] = {"line": self._line.line_number}
        return identity | {name: self._row_fields[name] for name in ("id", "metadata") if name in self._row_fields}

    def _native_request(self) -> Request:
        """Makes the request of a row in the native format."""
        fields = {name: value for name, value in self._row_fields.items() if name not in ("id", "metadata")}
        if ("prompt" in fields) == ("messages" in fields):
            raise ApiError(400, "A row needs a prompt or messages: give one of the two, not both.", param="prompt")
        if isinstance(prompt := fields.get("prompt"), str) and not self._defaults.raw:
            if not prompt.strip():
                raise ApiError(400, "The prompt is empty: give some text.", param="prompt")
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        # If the row sets no reasoning_format, the text of the output row includes the model's reasoning.
        request = self._make_request(fields, {"reasoning_format": "none"} if "messages" in fields else {})
        if unknown := [name for name in fields if name not in type(request).model_fields]:
            raise ApiError(400, f"A row has no field {unknown[0]!r}: correct it or leave it out.", param=unknown[0])
        return request

    def _openai_request(self) -> Request:
        """Makes the request of a row in OpenAI's format. The run's model answers it, whatever model the row names."""
        openai_row = validate(_OpenAIRow, self._row_fields)
        fields = {name: value for name, value in openai_row.body.items() if name != "model"}
        return self._make_request(fields, {}, openai_row.url)

    def _make_request(self, fields: dict[str, Any], extra_defaults: dict[str, Any], url: str | None = None) -> Request:
        """Makes a request from, in this precedence: ``fields``, ``extra_defaults``, the run's defaults."""
        run_defaults, sampling_fields = self._defaults, protocol.SampledRequest.model_fields
        fields = {name: value for name, value in fields.items() if value is not None}
        sampling = {name: value for name, value in asdict(run_defaults.sampling).items() if value is not None}
        defaults: dict[str, Any] = {name: value for name, value in sampling.items() if name in sampling_fields}
        seed = (run_defaults.seed + self._line.row_index) % 2**63  # stays within a signed 64-bit number
        defaults |= {"seed": seed, "stop": list(run_defaults.stop), **extra_defaults}
        request_class: type[Request] = ResponsesRequest if url == "/v1/responses" else protocol.CompletionRequest
        if "messages" in fields and url in (None, "/v1/chat/completions"):
            request_class = protocol.ChatCompletionRequest
        if not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & fields.keys():
            name = "max_output_tokens" if request_class is ResponsesRequest else "max_tokens"
            defaults[name] = run_defaults.max_tokens
        fields = defaults | fields
        if fields.pop("stream", False):
            raise ApiError(400, "A batch cannot stream: leave out stream, or set it to false.", param="stream")
        return validate(request_class, fields)
