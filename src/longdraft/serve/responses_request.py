"""The body of ``/v1/responses``, and its conversion to a chat completion request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from longdraft.serve import protocol
from longdraft.serve.errors import ApiError
from longdraft.serve.protocol import ApiModel, ChatCompletionRequest, ContentPart, Effort, MaxTokens, SampledRequest
from longdraft.serve.tool_types import SHELL_PARAMETERS, is_unserved_item


class ResponseItem(ApiModel):
    """An input item of ``/v1/responses``: a message, or an output item of an earlier response."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "local_shell_call", "local_shell_call_output", "item_reference",
    ] = "message"  # fmt: skip
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # An output of OpenAI's local shell and an item_reference have "id" instead.
    call_id: str | None = Field(default=None, validation_alias=AliasChoices("call_id", "id"))
    arguments: str | dict[str, Any] = "{}"
    input: str = ""
    action: dict[str, Any] = Field(default_factory=dict)
    output: Annotated[str | list[ContentPart], BeforeValidator(protocol.replace_non_text)] = ""
    summary: list[ContentPart] | None = None

    @model_validator(mode="after")
    def _check_required(self) -> ResponseItem:
        required = {"message": ("role", "content"), "reasoning": ()}.get(self.type, ("call_id",))
        if self.type in ("function_call", "custom_tool_call"):
            required = ("name", *required)
        if missing := [name for name in required if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type} needs {missing[0]}")
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages, or merges it into the last message if both are the assistant's."""
        if self.type.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": protocol.join_text(self.output)})
            return
        text = protocol.join_text(self.content or self.summary or "")
        if self.type == "reasoning" and not text:
            return
        role = self.role or "assistant"
        if role != "assistant" or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": role, "content": ""})
        message = messages[-1]
        if self.type.endswith("_call"):
            call: dict[str, Any] = {"name": self.name, "arguments": self.arguments}
            if self.type == "custom_tool_call":
                call = {"name": self.name, "input": self.input}
            elif self.type == "local_shell_call":
                fields = SHELL_PARAMETERS["properties"]
                arguments = {name: x for name, x in self.action.items() if name in fields and x is not None}
                call = {"name": "local_shell", "arguments": arguments}
            message.setdefault("tool_calls", []).append({"id": self.call_id, "function": call})
        else:
            key = "content" if self.type == "message" else "reasoning_content"
            message[key] = message.get(key, "") + text


class ResponseStore:
    """Output items of recent responses, in memory: clients may refer to an item by its id instead of sending it again.

    Args:
        max_items: number of items to keep; the oldest are dropped.
    """

    def __init__(self, max_items: int = 4096) -> None:
        self._max_items, self._items = max_items, dict[tuple[str | None, str], dict[str, Any]]()

    def put(self, tenant: str | None, items: Sequence[dict[str, Any]]) -> None:
        self._items |= {(tenant, item["id"]): item for item in items}
        for oldest in list(self._items)[: -self._max_items]:  # a dict keeps the order of insertion
            del self._items[oldest]

    def resolve(self, tenant: str | None, item: ResponseItem) -> ResponseItem:
        """Returns ``item``, or the stored item that it refers to. Raises ApiError if that item is no longer stored."""
        if item.type != "item_reference":
            return item
        stored_item = self._items.get((tenant, str(item.call_id)))
        if stored_item is None:
            message = (
                f"Item {item.call_id!r} is no longer stored. Send the item itself, as with store: false, not its id."
            )
            raise ApiError(404, message, param="input", code="item_not_found")
        return ResponseItem.model_validate({**stored_item, "call_id": stored_item.get("call_id", stored_item["id"])})


class TextFormat(ApiModel):
    """The ``text.format`` of ``/v1/responses``, which is the ``response_format`` of chats."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def as_response_format(self) -> dict[str, Any]:
        return {"type": self.type} if self.schema_ is None else {"type": self.type, "schema": self.schema_}


class TextOptions(ApiModel):
    format: TextFormat = Field(default_factory=lambda: TextFormat())


class Reasoning(ApiModel):
    effort: Effort | None = None


class _ConvertedRequest(ChatCompletionRequest):
    prompt_field = "input"  # error messages name this field instead of "messages"


def _drop_hosted_tool_items(items: Any) -> Any:
    """Drops calls and outputs of tools that only OpenAI runs. Logs a warning for each type."""
    if not isinstance(items, list):
        return items
    return [item for item in items if not (isinstance(item, dict) and is_unserved_item(item.get("type")))]


class ResponsesRequest(SampledRequest):
    """The body of ``/v1/responses``."""

    prompt_field = "input"

    input: Annotated[str | Annotated[list[ResponseItem], Field(min_length=1)], BeforeValidator(_drop_hosted_tool_items)]
    n: Annotated[int, Field(ge=1, le=1)] = 1  # this API has one answer
    instructions: str | None = None
    store: bool = True
    max_output_tokens: MaxTokens = None
    text: TextOptions = Field(default_factory=TextOptions)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def as_chat(self, resolve: Callable[[ResponseItem], ResponseItem] = lambda item: item) -> ChatCompletionRequest:
        """Converts the body to one of ``/v1/chat/completions``. ``resolve``: see :meth:`ResponseStore.resolve`."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in [ResponseItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            resolve(item).add_to(messages)
        shared_fields = (*SampledRequest.model_fields, "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        return _ConvertedRequest.model_validate({
            **{name: getattr(self, name) for name in shared_fields},
            "messages": messages, "max_tokens": self.max_output_tokens,
            "tools": [{"type": (kind := str(tool.get("type"))), kind: {k: v for k, v in tool.items() if k != "type"}}
                      for tool in self.tools],
            "reasoning_effort": self.reasoning.effort, "response_format": self.text.format.as_response_format(),
        })  # fmt: skip
