"""Anthropic's Messages API: its requests as chats, and the parts of a chat's answer as its messages and events."""

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
from longdraft.serve.protocol import ChatCompletionRequest, GenerationRequest, StrictModel, validate
from longdraft.serve.service import Service
from longdraft.serve.serving import AdaptedResponse, PendingResponse, create_chat_completion

logger = logging.getLogger(__name__)

# Fields without which the answer would be another one: what Anthropic's servers do, and OpenAI's names.
_ELSEWHERE = {"compaction", "container", "mcp_servers", "thread", *ChatCompletionRequest.model_fields} - {
    "service_tier"
}
# Claude Code's bill, first in its system prompt: it would change all rows behind it.
_BILL = "x-anthropic-billing-header:"
# Kind of a block or tool -> the fields that it needs.
_NEEDED = {"thinking": ("thinking",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",),
           "custom": ("name", "input_schema")}  # fmt: skip


class TypedObject(StrictModel):
    """A tool's choice, thinking, a tool or a block. Unknown fields are passed over: newer models know them."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False
    display: str | None = None
    data: str = ""  # a document's text

    @model_validator(mode="after")
    def _complete(self) -> TypedObject:
        needed = ("text",) if self.type == "text" and not self.data else _NEEDED.get(self.type, ())
        if missing := [name for name in needed if getattr(self, name, None) is None]:
            raise ValueError(f"type {self.type} needs {missing[0]}")
        return self


class Tool(TypedObject):
    """A function of the client's; other types run at Anthropic, or are known to its models alone."""

    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool = False

    def as_chat_tool(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: x for name, x in function.items() if x is not None}}


# A text, or blocks, as blocks.
Blocks = Annotated["list[Block]", BeforeValidator(lambda x: [{"type": "text", "text": x}] if isinstance(x, str) else x)]


class Block(TypedObject):
    """A part of a message, or what is inside one: a document's source, the tool that comes or goes."""

    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str | None = None
    content: Blocks = Field(default_factory=list)
    is_error: bool = False
    source: Block | str | None = None
    title: str = ""
    context: str = ""
    tool_name: str | None = None
    tool: Block | None = None
    definition: Tool | None = None

    def as_text(self) -> str | None:
        """The block as text; None: it is none."""
        if self.type == "text":
            return self.text
        if self.type == "tool_reference":
            return f"{self.tool_name} can be called now."
        source = self if self.type == "search_result" else self.source
        if not isinstance(source, Block) or source.type not in ("text", "content", "search_result"):
            return None
        told = self.source if isinstance(self.source, str) else self.context
        return "\n".join(filter(None, (self.title, told, source.data or source.content_text()))) + "\n\n"

    def content_text(self) -> str:
        """Its content as text, which says of what is none that it is not there."""
        texts = [(block.as_text(), block.type) for block in self.content]
        return "\n".join(f"[{kind} left out: the model reads text]" if x is None else x for x, kind in texts)


class InputMessage(TypedObject):
    type: str = "message"
    role: Literal["system", "user", "assistant"]
    content: Blocks


class CountTokensRequest(GenerationRequest):
    """``/v1/messages/count_tokens``. Unknown fields are passed over, unless they are known to change the answer."""

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
        """The same request as a chat; raises ApiError for what no chat has."""
        if wrong := [name for name, value in (self.model_extra or {}).items() if value and name in _ELSEWHERE]:
            raise ApiError(400, f"{wrong[0]} is not served.", param=wrong[0])
        messages, tools = self._conversation()
        choice, think = self.tool_choice, self.thinking.type
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "method", "user")
        return validate(ChatCompletionRequest, {
            **{name: getattr(self, name) for name in same}, "messages": messages, "stop": self.stop_sequences,
            "tools": tools, "tool_choice": {"function": {"name": choice.name}} if choice.type == "tool"
            else "required" if choice.type == "any" else choice.type,
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            # What is neither on nor off is the model's, or the server's, to say.
            "reasoning_effort": "none" if think == "disabled" else self.output_config.get("effort"),
            "chat_template_kwargs": {"enable_thinking": True} if think == "enabled" else {},
            "include_reasoning": self.thinking.display != "omitted",
            "response_format": self.output_config.get("format") or self.output_format,
        })  # fmt: skip

    def _conversation(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The messages and the tools of the chat. What one side says in a row is one message."""
        messages: list[dict[str, Any]] = []
        if others := {tool.type for tool in self.tools} - {"custom"}:
            logger.warning("Tools that Anthropic runs or knows are left out: %s.", ", ".join(sorted(others)))
        known = {tool.name: tool for tool in self.tools if tool.type == "custom"}
        offered = {name: tool for name, tool in known.items() if not tool.defer_loading}

        def last(role: str) -> dict[str, Any]:
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": ""})
            return messages[-1]

        for number, turn in enumerate([InputMessage(role="system", content=self.system), *self.messages], -1):
            between, role = "\n\n", turn.role
            if role == "system" and messages and messages[-1]["role"] != "system":
                role = "user"  # in mid-conversation, where many templates take no system message
            for at, block in enumerate(turn.content):
                if (text := block.as_text()) is not None:
                    if turn.role != "system" or (text and not text.startswith(_BILL)):
                        said = last(role)
                        said["content"] += (between if said["content"] else "") + text
                        between = between if role == "system" else ""  # whose blocks are paragraphs
                elif block.type == "thinking":
                    said = last(role)
                    said["reasoning_content"] = said.get("reasoning_content", "") + str(block.thinking)
                elif block.type == "tool_use":
                    call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    last(role).setdefault("tool_calls", []).append({"id": block.id, "function": call})
                elif block.type == "tool_result":
                    content = "Error: " * block.is_error + block.content_text()
                    messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
                    found = [each.tool_name for each in block.content]
                    offered |= {name: known[name] for name in found if name in known}
                elif block.type == "tool_removal" and block.tool is not None:
                    offered.pop(block.tool.name, None)
                elif block.tool is not None and (made := block.tool.definition or known.get(block.tool.name)):
                    known[made.name] = offered[made.name] = made
                elif block.type != "redacted_thinking":
                    place = f"messages.{number}.content.{at}" if number >= 0 else f"system.{at}"
                    raise ApiError(400, f"{place}: {block.type} is not served: this server reads text.", param=place)
        called = self.tool_choice.type != "none"
        return messages, [tool.as_chat_tool() for tool in offered.values() if called]


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]


class MessagesAdapter:
    """Builds one message: what the model thinks, says and calls become blocks, in that order of time."""

    ping = sse_event({"type": "ping"}, "ping")

    def __init__(self, pending: PendingResponse) -> None:
        self._asked, self._arguments, self._calls = pending, "", False
        self._blocks: list[dict[str, Any]] = []  # the last one is open
        self.full_response: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "model": pending.service.settings.name, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _counts(len(pending.choices[0].request.prompt), 0, 0),
        }  # fmt: skip

    def begin(self) -> Iterator[str]:
        yield _event("message_start", message=self.full_response)

    def push(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """The events of a choice of the chat's chunks."""
        part, self._calls = chunk["delta"], chunk["finish_reason"] == "tool_calls"
        for kind, key in (("thinking", "reasoning_content"), ("text", "content")):
            if text := part.get(key):
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
                self._blocks[-1][kind] += text
                yield self._delta(f"{kind}_delta", kind, text)
        for call in part.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                made = {"id": call["id"].replace("call_", "toolu_"), "name": function["name"], "input": {}}
                yield from self._begin({"type": "tool_use", **made})
            self._arguments += function["arguments"]
            if function["arguments"]:
                yield self._delta("input_json_delta", "partial_json", function["arguments"])

    def finish(self, cut: bool, usage: Mapping[str, Any]) -> Iterator[str]:
        """The last events; the message has then ended."""
        if not self._blocks:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()
        stop = None if cut or self._calls else self._asked.matched_stop()
        reason = "tool_use" if self._calls else "max_tokens" if cut else "stop_sequence" if stop else "end_turn"
        ended = {"stop_reason": reason, "stop_sequence": stop}
        cached, thought = (usage[f"{of}_tokens_details"] for of in ("prompt", "completion"))
        counts = _counts(usage["prompt_tokens"], cached["cached_tokens"], usage["completion_tokens"]) | {
            "output_tokens_details": {"thinking_tokens": thought["reasoning_tokens"]},
            "speculation": usage["speculation"],
        }
        self.full_response |= {"content": self._blocks, **ended, "usage": counts}
        yield _event("message_delta", delta=ended, usage=counts)
        yield _event("message_stop")

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        if self._blocks:
            yield from self._end()
        self._blocks.append(block)
        self._arguments = ""
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)
        if len(self._blocks) == 1:
            yield self.ping

    def _end(self) -> Iterator[str]:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError):  # a limit may have cut it, and 1e999 is no number of JSON's
                block["input"] = json.loads(json.dumps(from_json(self._arguments, allow_partial=True), allow_nan=False))
        elif block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta("signature_delta", "signature", block["signature"])
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, name: str, text: str) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def error_event(self, error: ApiError) -> str:
        """The last event of a message that ends with an error."""
        return sse_event(error.anthropic_body(), "error")


def create_message(service: Service, body: MessagesRequest, tenant: str | None = None) -> AdaptedResponse:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    found = create_chat_completion(service, body.as_chat(), tenant)
    return AdaptedResponse(service, found.choices, found.builders, adapter=MessagesAdapter(found))


def _event(name: str, **content: Any) -> str:
    return sse_event({"type": name, **content}, name)


def _counts(prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Anthropic's usage object. All of a prompt is kept, and nothing is billed as written to a cache."""
    return {
        "input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": new,
    }  # fmt: skip
