"""Error responses of OpenAI's and Anthropic's APIs, and which of longdraft's exceptions becomes which response."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from longdraft import errors
from longdraft.serve.worker import Draining, QueueFull

# HTTP status -> type of Anthropic's error object. Any other status below 500 is an "invalid_request_error".
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def is_anthropic_request(scope: Scope) -> bool:
    """True for a request to Anthropic's API."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


class ApiError(Exception):
    """An HTTP error response: status and OpenAI's error object.

    Args:
        error_type: ``type`` of OpenAI's error object.
        param: the request's field that is wrong; None if no single field is.
        code: ``code`` of OpenAI's error object, for programs.
    """

    def __init__(
        self, status: int, message: str, error_type: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": error_type, "param": param, "code": code}}

    def anthropic_body(self, message: str = "") -> dict[str, Any]:
        """Returns Anthropic's error object. ``message`` replaces the error's own message, unless it is empty."""
        error_type = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": error_type, "message": message or str(self)}
        return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}

    def response(self, scope: Scope, **headers: str) -> JSONResponse:
        """Returns the response with the error object of the API that the request used."""
        body = self.anthropic_body() if is_anthropic_request(scope) else self.body
        return JSONResponse(body, self.status, self.headers | headers)


class ContextOverflow(ApiError):
    """The prompt leaves no room for an answer. Clients recognise OpenAI's message and shorten the prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        max_tokens: length of the requested completion, at least 1.
        max_model_len: limit of the prompt and the completion together.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int, param: str = "messages") -> None:
        self.prompt_tokens, self.max_tokens, self.max_model_len = prompt_tokens, max_tokens, max_model_len
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {param}, {max_tokens} in the completion). "
            f"Please reduce the length of the {param} or completion."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")

    def anthropic_body(self, message: str = "") -> dict[str, Any]:
        # The message must state a limit below the prompt's length, even if only the completion exceeds the context.
        max_prompt_tokens = min(self.max_model_len, self.prompt_tokens - 1)
        return super().anthropic_body(f"prompt is too long: {self.prompt_tokens} tokens > {max_prompt_tokens} maximum")


def to_api_error(error: Exception, prompt_field: str = "messages") -> ApiError:
    """Returns the error response for an exception. Clients do not see the messages of unexpected exceptions.

    Args:
        prompt_field: the request's field that has the prompt.
    """
    message = str(error)
    match error:
        case ApiError():
            return error
        case QueueFull():
            retry = {"Retry-After": str(round(error.retry_after))}
            return ApiError(429, message, "rate_limit_error", code="queue_full", headers=retry)
        case Draining():
            return ApiError(503, message, "server_error", code="shutting_down", headers={"Retry-After": "5"})
        case TimeoutError():
            return ApiError(504, "The request took longer than the server allows.", "server_error", code="timeout")
        case errors.ContextError():
            return ApiError(400, message, param=prompt_field, code="context_length_exceeded")
        case errors.PromptError():
            return ApiError(400, message, param=prompt_field)
        case errors.MemoryBudgetError():
            return ApiError(503, message, "server_error", code="no_memory")
        case errors.RequestError() | errors.CapabilityError() | errors.UnknownMethodError():
            return ApiError(400, message)
        case errors.LongdraftError():
            return ApiError(500, message, "server_error")
        case _:
            return ApiError(500, f"The server failed with {type(error).__name__}: see its log.", "server_error")
