"""The objects and events of ``/v1/responses``, made of the parts of a chat's answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from longdraft.serve.errors import ApiError
from longdraft.serve.openai import ResponseEnvelope, sse_event
from longdraft.serve.responses_request import ResponsesRequest

# Kind of an item with text -> the name of its part and of its events, and their further fields.
_TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", {}, {}),
}
_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc", "local_shell_call": "lsh",
}  # fmt: skip


class ResponsesAdapter:
    """Builds one response: what the model thinks, says and calls become items, in that order of time."""

    def __init__(
        self, envelope: ResponseEnvelope, body: ResponsesRequest, store_items: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._head, self._body, self._number, self._keep = envelope, body, 0, store_items
        self._items: list[dict[str, Any]] = []
        self.full_response: dict[str, Any] = {}  # the response once it has ended

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self.response_object("in_progress"))
        yield self._event("response.in_progress", response=self.response_object("in_progress"))

    ping = ""  # where nothing else comes

    def push(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """The events of a choice of the chat's chunks."""
        part = chunk["delta"]
        for kind, key in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := part.get(key):
                if self._open() != kind:
                    yield from self._begin(kind)
                self._items[-1]["content"][0]["text"] += text
                name, _, more = _TEXTS[kind]
                yield self._event(f"response.{name}.delta", **self._where(), delta=text, **more)
        for call in part.get("tool_calls", ()):
            if call.get("type") == "local_shell":
                action = {"type": "exec", "env": {}, **call["local_shell"]}
                yield from self._begin("local_shell_call", call_id=call["id"], action=action)
                continue
            if call.get("type") == "custom":
                name, given = call["custom"]["name"], call["custom"]["input"]
                yield from self._begin("custom_tool_call", call_id=call["id"], name=name, input="")
                self._items[-1]["input"] = given
                yield self._event("response.custom_tool_call_input.delta", **self._where(), delta=given)
                continue
            arguments = call["function"]["arguments"]
            if "id" in call:
                fields = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin("function_call", **fields)
            self._items[-1]["arguments"] += arguments
            if arguments:
                yield self._event("response.function_call_arguments.delta", **self._where(), delta=arguments)

    def finish(self, cut: bool, usage: Mapping[str, Any]) -> Iterator[str]:
        """The last events; the response has then ended."""
        if not self._items:
            yield from self._begin("message")
        status = "incomplete" if cut else "completed"
        yield from self._end(status)
        self.full_response = self.response_object(status, usage)
        if self._body.store:
            self._keep(self._items)
        yield self._event(f"response.{status}", response=self.full_response)

    def error_event(self, error: ApiError) -> str:
        """The last event of a response that ends with an error."""
        return self._event("response.failed", response=self.response_object("failed") | {"error": error.body["error"]})

    def _open(self) -> str | None:
        """The kind of the item that has not ended."""
        going = self._items and self._items[-1]["status"] == "in_progress"
        return str(self._items[-1]["type"]) if going else None

    def _where(self) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return where | ({"content_index": 0} if self._items[-1]["type"] in _TEXTS else {})

    def _begin(self, kind: str, **fields: Any) -> Iterator[str]:
        yield from self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind in _TEXTS:
            item["content"] = [{"type": _TEXTS[kind][0], "text": "", **_TEXTS[kind][1]}]
            yield self._event("response.content_part.added", **self._where(), part=item["content"][0])

    def _end(self, status: str) -> Iterator[str]:
        kind = self._open()
        if kind is None:
            return
        item = self._items[-1]
        item["status"] = status
        if kind in _TEXTS:
            part, (name, _, more) = item["content"][0], _TEXTS[kind]
            yield self._event(f"response.{name}.done", **self._where(), text=part["text"], **more)
            yield self._event("response.content_part.done", **self._where(), part=part)
        elif kind == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.done", **self._where(), input=item["input"])
        elif kind == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._where(), **done)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, name: str, /, **content: Any) -> str:
        self._number += 1
        return sse_event({"type": name, "sequence_number": self._number - 1, **content}, name)

    def response_object(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        head, body = self._head, self._body
        counts = None if usage is None else {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "speculation": usage["speculation"],
        }  # fmt: skip
        return {
            "id": head.id.replace("resp-", "resp_"), "object": "response", "created_at": head.created,
            "model": head.model, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": body.parallel_tool_calls, "previous_response_id": None, "store": body.store,
            "temperature": body.temperature, "top_p": body.top_p, "tools": body.tools,
            "tool_choice": body.tool_choice or "auto", "truncation": "disabled",
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}, "usage": counts,
        }  # fmt: skip
