"""The body of ``/v1/responses``, and what it is as a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from longdraft.serve.errors import ApiError
from longdraft.serve.kinds import SHELL, left_out
from longdraft.serve.schema import Chat, Effort, Limit, Part, Sampled, Strict, in_words, joined


class Item(Strict):
    """An item of ``/v1/responses``: a message, or what an earlier response had in its output."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "local_shell_call", "local_shell_call_output", "item_reference",
    ] = "message"  # fmt: skip
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    name: str | None = None
    # An output of OpenAI's local shell has an id, and so has a reference.
    call_id: str | None = Field(default=None, validation_alias=AliasChoices("call_id", "id"))
    arguments: str | dict[str, Any] = "{}"
    input: str = ""
    action: dict[str, Any] = Field(default_factory=dict)
    output: Annotated[str | list[Part], BeforeValidator(in_words)] = ""
    summary: list[Part] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Item:
        needed = {"message": ("role", "content"), "reasoning": ()}.get(self.type, ("call_id",))
        if self.type in ("function_call", "custom_tool_call"):
            needed = ("name", *needed)
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type} needs {missing[0]}")
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to a chat's messages: what the assistant thought, said and called in a row is one."""
        if self.type.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)})
            return
        text = joined(self.content or self.summary or "")
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
                known = {name: x for name, x in self.action.items() if name in SHELL["properties"] and x is not None}
                call = {"name": "local_shell", "arguments": known}
            message.setdefault("tool_calls", []).append({"id": self.call_id, "function": call})
        else:
            key = "content" if self.type == "message" else "reasoning_content"
            message[key] = message.get(key, "") + text


class Recent:
    """The outputs of recent responses by id, for clients that refer to them instead of sending them again.

    The oldest are forgotten first, and all of them with the server.

    Args:
        most: items that are kept.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most, self._items = most, dict[tuple[str | None, str], dict[str, Any]]()

    def keep(self, tenant: str | None, items: Sequence[dict[str, Any]]) -> None:
        self._items |= {(tenant, item["id"]): item for item in items}
        for oldest in list(self._items)[: -self._most]:
            del self._items[oldest]

    def found(self, tenant: str | None, item: Item) -> Item:
        """The item, or the one that it refers to. Raises ApiError if that is not there."""
        if item.type != "item_reference":
            return item
        kept = self._items.get((tenant, str(item.call_id)))
        if kept is None:
            message = f"Item {item.call_id!r} is not here any more: send it whole, as clients do with store: false."
            raise ApiError(404, message, param="input", code="item_not_found")
        return Item.model_validate({**kept, "call_id": kept.get("call_id", kept["id"])})


class TextFormat(Strict):
    """The ``response_format`` of ``/v1/responses``, under the name that it has there."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def as_in_chats(self) -> dict[str, Any]:
        return {"type": self.type} if self.schema_ is None else {"type": self.type, "schema": self.schema_}


class TextOptions(Strict):
    format: TextFormat = Field(default_factory=lambda: TextFormat())


class Reasoning(Strict):
    effort: Effort | None = None


class _ChatOfResponse(Chat):
    texts = "input"


def _readable(items: Any) -> Any:
    """Items without what OpenAI's own tools left behind, which no model here reads; the log says so."""
    if not isinstance(items, list):
        return items
    return [item for item in items if not (isinstance(item, dict) and left_out(item.get("type")))]


class Responses(Sampled):
    """``/v1/responses``: text and calls of functions."""

    input: Annotated[str | Annotated[list[Item], Field(min_length=1)], BeforeValidator(_readable)]
    n: Annotated[int, Field(ge=1, le=1)] = 1
    instructions: str | None = None
    store: bool = True
    max_output_tokens: Limit = None
    text: TextOptions = Field(default_factory=TextOptions)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def as_chat(self, found: Callable[[Item], Item] = lambda item: item) -> Chat:
        """The same request as a chat; ``found`` returns an item, or the one that it refers to."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            found(item).add_to(messages)
        same = (*Sampled.model_fields, "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        return _ChatOfResponse.model_validate({
            **{name: getattr(self, name) for name in same}, "messages": messages, "max_tokens": self.max_output_tokens,
            "tools": [{"type": (kind := str(tool.get("type"))), kind: {k: v for k, v in tool.items() if k != "type"}}
                      for tool in self.tools],
            "reasoning_effort": self.reasoning.effort, "response_format": self.text.format.as_in_chats(),
        })  # fmt: skip
