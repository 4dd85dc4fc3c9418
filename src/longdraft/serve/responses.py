"""The objects and events of ``/v1/responses``, converted from the chunks of a chat completion."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from longdraft.serve.errors import ApiError, ContextOverflow
from longdraft.serve.openai import ResponseEnvelope, sse_event
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.serving import AdaptedResponse, PendingResponse, create_chat_completion

# Type of an item with text -> (type of the item's content part, further fields of the part, further fields of events).
_TEXT_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", {}, {}),
}
_ID_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc", "local_shell_call": "lsh",
}  # fmt: skip


class ResponsesResponse(AdaptedResponse):
    """Builds one response: reasoning, text and tool calls become output items, in the order in which they come."""

    def __init__(self, chat: PendingResponse, body: ResponsesRequest, tenant: str | None) -> None:
        super().__init__(chat.service, chat.choices, chat.builders)
        self._head, self._body, self._tenant = ResponseEnvelope("resp", chat.service.settings.name), body, tenant
        self._items: list[dict[str, Any]] = []
        self._sequence_number = 0

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response_object("in_progress"))
        yield self._event("response.in_progress", response=self._response_object("in_progress"))

    def push(self, chunk_choice: Mapping[str, Any]) -> Iterator[str]:
        message_delta = chunk_choice["delta"]
        for item_type, key in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := message_delta.get(key):
                if self._current_item_type() != item_type:
                    yield from self._begin_item(item_type)
                self._items[-1]["content"][0]["text"] += text
                part_type, _, event_fields = _TEXT_ITEMS[item_type]
                yield self._event(f"response.{part_type}.delta", **self._position(), delta=text, **event_fields)
        for call in message_delta.get("tool_calls", ()):
            if call.get("type") == "local_shell":
                action = {"type": "exec", "env": {}, **call["local_shell"]}
                yield from self._begin_item("local_shell_call", call_id=call["id"], action=action)
                continue
            if call.get("type") == "custom":
                name, text = call["custom"]["name"], call["custom"]["input"]
                yield from self._begin_item("custom_tool_call", call_id=call["id"], name=name, input="")
                self._items[-1]["input"] = text
                yield self._event("response.custom_tool_call_input.delta", **self._position(), delta=text)
                continue
            arguments = call["function"]["arguments"]
            if "id" in call:  # the first delta of the call
                fields = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin_item("function_call", **fields)
            self._items[-1]["arguments"] += arguments
            if arguments:
                yield self._event("response.function_call_arguments.delta", **self._position(), delta=arguments)

    def finish(self, truncated: bool, usage: Mapping[str, Any]) -> Iterator[str]:
        if not self._items:
            yield from self._begin_item("message")
        status = "incomplete" if truncated else "completed"
        yield from self._end_item(status)
        self.response = self._response_object(status, usage)
        if self._body.store:
            self.service.response_store.put(self._tenant, self._items)
        yield self._event(f"response.{status}", response=self.response)

    def error_event(self, error: ApiError) -> str:
        return self._event("response.failed", response=self._response_object("failed") | {"error": error.body["error"]})

    def _current_item_type(self) -> str | None:
        """Returns the type of the item in progress; None if no item is in progress."""
        is_open = self._items and self._items[-1]["status"] == "in_progress"
        return str(self._items[-1]["type"]) if is_open else None

    def _position(self) -> dict[str, Any]:
        """Returns the fields by which an event names the item in progress."""
        position = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return position | ({"content_index": 0} if self._items[-1]["type"] in _TEXT_ITEMS else {})

    def _begin_item(self, item_type: str, **fields: Any) -> Iterator[str]:
        """Yields the events that end the item in progress and begin a new item."""
        yield from self._end_item("completed")
        item_id = f"{_ID_PREFIXES[item_type]}_{secrets.token_hex(12)}"
        item = {"id": item_id, "type": item_type, "status": "in_progress", **fields}
        if item_type == "message":
            item |= {"role": "assistant", "content": []}
        elif item_type == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if item_type in _TEXT_ITEMS:
            part_type, part_fields, _ = _TEXT_ITEMS[item_type]
            item["content"] = [{"type": part_type, "text": "", **part_fields}]
            yield self._event("response.content_part.added", **self._position(), part=item["content"][0])

    def _end_item(self, status: str) -> Iterator[str]:
        """Yields the events that end the item in progress, if there is one."""
        item_type = self._current_item_type()
        if item_type is None:
            return
        item = self._items[-1]
        item["status"] = status
        if item_type in _TEXT_ITEMS:
            part, (part_type, _, event_fields) = item["content"][0], _TEXT_ITEMS[item_type]
            yield self._event(f"response.{part_type}.done", **self._position(), text=part["text"], **event_fields)
            yield self._event("response.content_part.done", **self._position(), part=part)
        elif item_type == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.done", **self._position(), input=item["input"])
        elif item_type == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._position(), **fields)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, name: str, /, **content: Any) -> str:
        self._sequence_number += 1
        return sse_event({"type": name, "sequence_number": self._sequence_number - 1, **content}, name)

    def _response_object(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response object. ``usage``: a chat completion's usage; None before the end."""
        envelope, body = self._head, self._body
        token_counts = None if usage is None else {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "speculation": usage["speculation"],
        }  # fmt: skip
        return {
            "id": envelope.id.replace("-", "_"), "object": "response", "created_at": envelope.created,
            "model": envelope.model, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": body.parallel_tool_calls, "previous_response_id": None, "store": body.store,
            "temperature": body.temperature, "top_p": body.top_p, "tools": body.tools,
            "tool_choice": body.tool_choice or "auto", "truncation": "disabled",
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}, "usage": token_counts,
        }  # fmt: skip


def create_response(service: Service, body: ResponsesRequest, tenant: str | None = None) -> ResponsesResponse:
    """Makes the pending response of ``/v1/responses``. Raises as :func:`create_chat_completion`."""
    try:
        resolve = partial(service.response_store.resolve, tenant)
        return ResponsesResponse(create_chat_completion(service, body.as_chat(resolve), tenant), body, tenant)
    except ContextOverflow as error:
        if not body.stream:
            raise
        response = ResponsesResponse(PendingResponse(service, [], []), body, tenant)
        response.overflow = error
        return response
