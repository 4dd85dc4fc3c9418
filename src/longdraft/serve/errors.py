"""OpenAI's error object, and which of ours is which of theirs."""

from __future__ import annotations

from typing import Any

from longdraft.errors import (
    CapabilityError,
    ContextError,
    LongdraftError,
    MemoryBudgetError,
    PromptError,
    RequestError,
    UnknownMethodError,
)
from longdraft.serve.worker import Draining, Full


class ApiError(Exception):
    """What a client is answered with: a status, and OpenAI's error object.

    Args:
        param: the field that is wrong. headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error(error: Exception) -> ApiError:
    """What an exception of the engine's is to a client. What is nobody's fault but ours does not say more than that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Full):
        retry = {"Retry-After": str(round(error.seconds))}
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, Draining):
        return ApiError(503, str(error), "server_error", code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request took longer than the server allows.", "server_error", code="timeout")
    if isinstance(error, ContextError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, PromptError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, MemoryBudgetError):
        return ApiError(503, str(error), "server_error", code="no_memory")
    if isinstance(error, RequestError | CapabilityError | UnknownMethodError):
        return ApiError(400, str(error))
    if isinstance(error, LongdraftError):
        return ApiError(500, str(error), "server_error")
    return ApiError(500, f"The server failed with {type(error).__name__}; its log says more.", "server_error")
