"""Anthropic's Messages API: converts requests to chat completions, and their chunks to a message or its events."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from longdraft.serve.errors import ApiError
from longdraft.serve.openai import sse_event
from longdraft.serve.protocol import ApiModel, ChatCompletionRequest, GenerationRequest, validate
from longdraft.serve.service import Service
from longdraft.serve.serving import AdaptedResponse, PendingResponse, create_chat_completion, render_chat_prompt

logger = logging.getLogger(__name__)

# Fields that are refused, because they change the answer: features of Anthropic, and fields that only OpenAI's API has.
_UNSERVED = {"compaction", "container", "mcp_servers", "thread", *ChatCompletionRequest.model_fields} - {"service_tier"}
# Claude Code begins its system prompt with this line. It is dropped: it changes, and the prefix cache would not match.
_BILLING_HEADER = "x-anthropic-billing-header:"
# Type of a block or tool -> its required fields.
_REQUIRED = {"thinking": ("thinking",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",),
           "custom": ("name", "input_schema")}  # fmt: skip


class TypedObject(ApiModel):
    """Base of all objects with a ``type``. Unknown fields are ignored: clients of newer models send them."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False  # of a tool choice
    display: str | None = None  # of ``thinking``: "omitted" hides the reasoning
    data: str = ""  # text of a document's source

    @model_validator(mode="after")
    def _check_required(self) -> TypedObject:
        required = ("text",) if self.type == "text" and not self.data else _REQUIRED.get(self.type, ())
        if missing := [name for name in required if getattr(self, name, None) is None]:
            raise ValueError(f"type {self.type} needs {missing[0]}")
        return self


class Tool(TypedObject):
    """A tool. Type "custom" is the client's function; other types run at Anthropic, or need Anthropic's models."""

    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool = False

    def as_chat_tool(self) -> dict[str, Any]:
        """Returns the tool as an entry of a chat completion's ``tools``."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: x for name, x in function.items() if x is not None}}


# Blocks, or a string, which becomes one text block.
Blocks = Annotated["list[Block]", BeforeValidator(lambda x: [{"type": "text", "text": x}] if isinstance(x, str) else x)]


class Block(TypedObject):
    """A part of a message or of another block: text, a document, its source, a tool call, a tool to add or remove."""

    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str | None = None
    content: Blocks = Field(default_factory=list)
    is_error: bool = False
    source: Block | str | None = None  # of a document: its content; of a search result: an address
    title: str = ""  # of a document or a search result, like context
    context: str = ""
    tool_name: str | None = None  # of a tool_reference
    tool: Block | None = None  # of a tool_addition or tool_removal
    definition: Tool | None = None  # of an added tool, if the request's tools do not have it

    def as_text(self) -> str | None:
        """Returns the block as text; None if the block has no text."""
        if self.type == "text":
            return self.text
        if self.type == "tool_reference":
            return f"{self.tool_name} can be called now."
        source = self if self.type == "search_result" else self.source
        if not isinstance(source, Block) or source.type not in ("text", "content", "search_result"):
            return None
        heading = self.source if isinstance(self.source, str) else self.context
        return "\n".join(filter(None, (self.title, heading, source.data or source.content_text()))) + "\n\n"

    def content_text(self) -> str:
        """Returns the block's ``content`` as text, with a note in place of each block without text."""
        texts = [(block.as_text(), block.type) for block in self.content]
        return "\n".join(f"[{name} left out: the model reads text]" if text is None else text for text, name in texts)


class InputMessage(TypedObject):
    """A message of a request."""

    type: str = "message"
    role: Literal["system", "user", "assistant"]
    content: Blocks


class CountTokensRequest(GenerationRequest):
    """The body of ``/v1/messages/count_tokens``. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Blocks = Field(default_factory=list)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    top_k: int = 0
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: TypedObject = Field(default_factory=lambda: TypedObject(type="auto"))
    thinking: TypedObject = Field(default_factory=lambda: TypedObject(type="adaptive"))
    output_config: dict[str, Any] = Field(default_factory=dict)
    output_format: dict[str, Any] | None = None

    def as_chat(self) -> ChatCompletionRequest:
        """Converts the body to one of ``/v1/chat/completions``. Raises ApiError for a field that is not served."""
        if wrong := [name for name, value in (self.model_extra or {}).items() if value and name in _UNSERVED]:
            raise ApiError(400, f"{wrong[0]} is not served: leave it out.", param=wrong[0])
        messages, tools = self._conversation()
        tool_choice, thinking = self.tool_choice, self.thinking.type
        shared_fields = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "method", "user")
        return validate(ChatCompletionRequest, {
            **{name: getattr(self, name) for name in shared_fields}, "messages": messages, "stop": self.stop_sequences,
            "tools": tools, "tool_choice": {"function": {"name": tool_choice.name}} if tool_choice.type == "tool"
            else "required" if tool_choice.type == "any" else tool_choice.type,
            "parallel_tool_calls": not tool_choice.disable_parallel_tool_use,
            # "adaptive" leaves thinking to the server's default.
            "reasoning_effort": "none" if thinking == "disabled" else self.output_config.get("effort"),
            "chat_template_kwargs": {"enable_thinking": True} if thinking == "enabled" else {},
            "include_reasoning": self.thinking.display != "omitted",
            "response_format": self.output_config.get("format") or self.output_format,
        })  # fmt: skip

    def _conversation(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the chat messages (adjacent messages of one role are merged) and the tools active at the end."""
        messages: list[dict[str, Any]] = []
        if unserved := {tool.type for tool in self.tools} - {"custom"}:
            logger.warning("Tools of types that only Anthropic serves are left out: %s.", ", ".join(sorted(unserved)))
        tools = {tool.name: tool for tool in self.tools if tool.type == "custom"}
        active_tools = {name: tool for name, tool in tools.items() if not tool.defer_loading}

        def get_message(role: str) -> dict[str, Any]:  # the last message if it has this role, else a new message
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": ""})
            return messages[-1]

        system = InputMessage(role="system", content=self.system)
        for message_index, input_message in enumerate([system, *self.messages], -1):  # the system prompt has index -1
            separator, role = "\n\n", input_message.role  # the separator stands before the next text
            if role == "system" and messages and messages[-1]["role"] != "system":
                role = "user"  # many templates refuse a system message after the first turn
            for i, block in enumerate(input_message.content):
                if (text := block.as_text()) is not None:
                    if input_message.role != "system" or (text and not text.startswith(_BILLING_HEADER)):
                        message = get_message(role)
                        message["content"] += (separator if message["content"] else "") + text
                        separator = separator if role == "system" else ""  # only in system is each block a paragraph
                elif block.type == "thinking":
                    message = get_message(role)
                    message["reasoning_content"] = message.get("reasoning_content", "") + str(block.thinking)
                elif block.type == "tool_use":
                    call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    get_message(role).setdefault("tool_calls", []).append({"id": block.id, "function": call})
                elif block.type == "tool_result":
                    content = ("Error: " if block.is_error else "") + block.content_text()
                    messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
                    # A tool search's result activates the deferred tools that it names.
                    names = [part.tool_name for part in block.content]
                    active_tools |= {name: tools[name] for name in names if name in tools}
                elif block.type == "tool_removal" and block.tool is not None:
                    active_tools.pop(block.tool.name, None)
                elif block.tool is not None and (added := block.tool.definition or tools.get(block.tool.name)):
                    tools[added.name] = active_tools[added.name] = added
                elif block.type != "redacted_thinking":
                    path = f"messages.{message_index}.content.{i}" if message_index >= 0 else f"system.{i}"
                    raise ApiError(400, f"{path}: {block.type} is not served: send text.", param=path)
        callable_tools = [] if self.tool_choice.type == "none" else active_tools.values()
        return messages, [tool.as_chat_tool() for tool in callable_tools]


class MessagesRequest(CountTokensRequest):
    """The body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]


class MessagesResponse(AdaptedResponse):
    """Builds one message: reasoning, text and tool calls become content blocks, in the order in which they come."""

    def __init__(self, chat: PendingResponse) -> None:
        super().__init__(chat.service, chat.choices, chat.builders)
        self._arguments, self._has_calls = "", False
        self._blocks: list[dict[str, Any]] = []  # the last one is in progress
        self.response = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "model": self.service.settings.name, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _usage(len(self.choices[0].request.prompt), 0, 0),
        }  # fmt: skip

    def keep_alive_event(self) -> str:
        return _event("ping")

    def error_event(self, error: ApiError) -> str:
        return sse_event(error.anthropic_body(), "error")

    def begin(self) -> Iterator[str]:
        yield _event("message_start", message=self.response)

    def push(self, chunk_choice: Mapping[str, Any]) -> Iterator[str]:
        delta, self._has_calls = chunk_choice["delta"], chunk_choice["finish_reason"] == "tool_calls"
        for block_type, key in (("thinking", "reasoning_content"), ("text", "content")):
            if text := delta.get(key):
                if not self._blocks or self._blocks[-1]["type"] != block_type:
                    signature = {"signature": ""} if block_type == "thinking" else {}
                    yield from self._begin_block({"type": block_type, block_type: "", **signature})
                self._blocks[-1][block_type] += text
                yield self._block_delta(f"{block_type}_delta", block_type, text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                tool_use = {"id": call["id"].replace("call_", "toolu_"), "name": function["name"], "input": {}}
                yield from self._begin_block({"type": "tool_use", **tool_use})
            self._arguments += function["arguments"]
            if function["arguments"]:
                yield self._block_delta("input_json_delta", "partial_json", function["arguments"])

    def finish(self, truncated: bool, usage: Mapping[str, Any]) -> Iterator[str]:
        if not self._blocks:
            yield from self._begin_block({"type": "text", "text": ""})
        yield from self._end_block()
        stop = None if truncated or self._has_calls else self.matched_stop()
        reason = "max_tokens" if truncated else "stop_sequence" if stop else "end_turn"
        stop_fields = {"stop_reason": "tool_use" if self._has_calls else reason, "stop_sequence": stop}
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
        message_usage = _usage(usage["prompt_tokens"], cached_tokens, usage["completion_tokens"]) | {
            "output_tokens_details": {"thinking_tokens": reasoning_tokens}, "speculation": usage["speculation"],
        }  # fmt: skip
        self.response |= {"content": self._blocks, **stop_fields, "usage": message_usage}
        yield _event("message_delta", delta=stop_fields, usage=message_usage)
        yield _event("message_stop")

    def _begin_block(self, block: dict[str, Any]) -> Iterator[str]:
        if self._blocks:
            yield from self._end_block()
        self._blocks.append(block)
        self._arguments = ""
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)
        if len(self._blocks) == 1:  # Anthropic's streams have a ping after the first content_block_start
            yield self.keep_alive_event()

    def _end_block(self) -> Iterator[str]:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError):  # truncated arguments, or 1e999, which is infinite
                block["input"] = json.loads(json.dumps(from_json(self._arguments, allow_partial=True), allow_nan=False))
        elif block["type"] == "thinking":
            # Clients expect a signature of the reasoning and send it back. Nothing here reads it.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._block_delta("signature_delta", "signature", block["signature"])
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _block_delta(self, delta_type: str, field: str, text: str) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": delta_type, field: text})


def create_message(service: Service, body: MessagesRequest, tenant: str | None = None) -> MessagesResponse:
    """Makes the pending response of ``/v1/messages``. Raises as :func:`create_chat_completion`."""
    return MessagesResponse(create_chat_completion(service, body.as_chat(), tenant))


def count_tokens(service: Service, body: CountTokensRequest, tenant: str | None = None) -> dict[str, Any]:
    """Returns the response of ``/v1/messages/count_tokens``."""
    service.check_model(body.model)
    chat = body.as_chat()
    return {"input_tokens": len(render_chat_prompt(service, chat, chat.tools)[0])}


def _event(name: str, **content: Any) -> str:
    return sse_event({"type": name, **content}, name)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Returns Anthropic's usage object. Caching is automatic, so no tokens count as written to the cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens, "output_tokens": output_tokens,
    }  # fmt: skip
