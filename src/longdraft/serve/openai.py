"""OpenAI's objects, made of answers: whole, or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from longdraft.serve.choice import Choice, Delta, Said

DONE = "data: [DONE]\n\n"


def event(content: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Parser(Protocol):
    """Tells tool calls from text; see :class:`longdraft.serve.tools.ToolParser`."""

    def push(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> tuple[list[dict[str, Any]], str | None]: ...


class Head:
    """What all chunks of a request have. Args: kind: of the object."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.model, self.created = model, int(time.time())

    def made(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


def token_object(token: int, log_prob: float, piece: Callable[[int], str]) -> dict[str, Any]:
    text = piece(token)
    return {"token": text, "logprob": round(log_prob, 6), "bytes": list(text.encode())}


def chat_log_probs(said: Sequence[Said], piece: Callable[[int], str]) -> dict[str, Any]:
    content = [
        token_object(s.token, s.log_prob, piece) | {"top_logprobs": [token_object(*best, piece) for best in s.best]}
        for s in said
    ]
    return {"content": content, "refusal": None}


def text_log_probs(said: Sequence[Said], piece: Callable[[int], str], offset: int) -> dict[str, Any]:
    tokens = [piece(s.token) for s in said]
    offsets, at = [], offset
    for text in tokens:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [round(s.log_prob, 6) for s in said],
        "top_logprobs": [{piece(token): round(x, 6) for token, x in s.best} for s in said],
        "text_offset": offsets,
    }


class ChatAnswer:
    """Chat chunks and messages of one choice. Args: parser: where the model may call tools."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, index: int, piece: Callable[[int], str], logged: bool, parser: Parser | None = None) -> None:
        self.index, self._piece, self._logged, self._parser = index, piece, logged, parser
        self._said: list[Said] = []
        self._content = ""
        self._calls: dict[int, dict[str, Any]] = {}
        self._begun = False

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Choices of chunks for what a step adds."""
        parts: list[dict[str, Any]] = []
        if delta.text:
            parts = [{"content": delta.text}] if self._parser is None else self._parser.push(delta.text)
        finish = delta.finish
        if finish is not None and self._parser is not None:
            rest, called = self._parser.finish()
            parts += rest
            finish = called or finish
        if not parts and (delta.said or finish):
            parts = [{}]
        self._said += delta.said
        for i, part in enumerate(parts):
            self._keep(part)
            if not self._begun:
                self._begun, part = True, {"role": "assistant", "content": ""} | part
            last = i == len(parts) - 1
            chunk: dict[str, Any] = {"index": self.index, "delta": part, "finish_reason": finish if last else None}
            if self._logged:
                chunk["logprobs"] = chat_log_probs(delta.said if i == 0 else (), self._piece)
            yield chunk
        if finish is not None:
            self._finish = finish

    def _keep(self, part: dict[str, Any]) -> None:
        self._content += part.get("content") or ""
        for call in part.get("tool_calls", ()):
            known = self._calls.setdefault(
                call["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            known["id"] = call.get("id") or known["id"]
            function = call.get("function", {})
            known["function"]["name"] += function.get("name") or ""
            known["function"]["arguments"] += function.get("arguments") or ""

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that has ended."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": list(self._calls.values())}
        logged = chat_log_probs(self._said, self._piece) if self._logged else None
        return {"index": self.index, "message": message, "logprobs": logged, "finish_reason": self._finish}


class TextAnswer:
    """The same of ``/v1/completions``."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, index: int, piece: Callable[[int], str], logged: bool) -> None:
        self.index, self._piece, self._logged = index, piece, logged
        self._said: list[Said] = []
        self._text = ""

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if delta.text or delta.said or delta.finish:
            logged = text_log_probs(delta.said, self._piece, len(self._text)) if self._logged else None
            yield {"index": self.index, "text": delta.text, "logprobs": logged, "finish_reason": delta.finish}
        self._text += delta.text
        self._said += delta.said
        self._finish = delta.finish

    def whole(self) -> dict[str, Any]:
        logged = text_log_probs(self._said, self._piece, 0) if self._logged else None
        return {"index": self.index, "text": self._text, "logprobs": logged, "finish_reason": self._finish}


Answer = ChatAnswer | TextAnswer


def response_object(
    id: str, model: str, created: int, asked: Any, status: str, text: str, usage: dict[str, Any] | None
) -> dict[str, Any]:
    """``/v1/responses``' object."""
    item = {
        "id": f"msg_{id[5:]}", "type": "message", "role": "assistant", "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }  # fmt: skip
    counted = None if usage is None else {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens_details": {"reasoning_tokens": 0}, "speculation": usage["speculation"],
    }  # fmt: skip
    return {
        "id": id, "object": "response", "created_at": created, "model": model, "status": status, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {}, "output": [] if status == "in_progress" else [item],
        "parallel_tool_calls": False, "previous_response_id": None,
        "store": False, "temperature": asked.temperature, "top_p": asked.top_p, "tool_choice": "none", "tools": [],
        "truncation": "disabled", "text": {"format": {"type": "text"}}, "usage": counted,
    }  # fmt: skip


__all__ = ["DONE", "Answer", "ChatAnswer", "Choice", "Head", "TextAnswer", "event", "response_object"]
