"""Request bodies: the fields of OpenAI's API that are served. Any other field or value is refused, never ignored, and
the error says what is wrong."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from longdraft.serve.errors import ApiError

# Levels of objects and lists within one another; readers of schemas and templates go down one by one.
_LEVELS = 96
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class Strict(BaseModel):
    """Refuses unknown fields; a null counts as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: x for name, x in data.items() if x is not None} if isinstance(data, dict) else data


class Part(Strict):
    """A part of a message; only text is served."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: Any = None  # where a prompt is to be kept; each one is


class FunctionCall(Strict):
    """``parsed_arguments`` and the like: what OpenAI's client adds to answers, which its users send back."""

    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it: arguments are an object, which they write in JSON themselves."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:  # a model's mistake, which it may see
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as other servers call it

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": _joined(self.content or "")}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


class StreamOptions(Strict):
    """``continuous_usage_stats``: token counts in each chunk. ``include_trace``: what each round drafted."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_trace: bool = False
    include_obfuscation: bool = False


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _limit(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("at least 1, or -1 for as many as there is room for")
    return None if value == -1 else value


# New tokens at most; None: as many as there is room for.
Limit = Annotated[int | None, AfterValidator(_limit)]


class Text(Strict):
    """The fields of all endpoints that answer with text."""

    model: str = ""
    stream: bool = False
    # OpenAI's default; clients that want greedy text send 0.
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    method: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class Sampled(Text):
    """The fields of chats and completions."""

    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    repetition_window: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_stops), Field(max_length=16)] = Field(
        default_factory=list
    )
    n: Annotated[int, Field(ge=1, le=16)] = 1
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    return_token_ids: bool = False
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool = True  # llama.cpp's name


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(Strict):
    """Fields of what goes through the chat template.

    A last message of the assistant's is continued, unless the client asks for another turn, as those of vLLM may.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None


class Chat(Sampled, Templated):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"  # llama.cpp's; none: thoughts are left in the text
    include_reasoning: bool = True  # vLLM's


class Completion(Sampled):
    """``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Limit = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: str = ""


class Item(Strict):
    """An item of ``/v1/responses``: a message, or what an earlier response had in its output."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str = "{}"
    parsed_arguments: Any = None
    output: str | list[Part] = ""
    summary: list[Part] | None = None
    encrypted_content: None = None

    @model_validator(mode="after")
    def _complete(self) -> Item:
        needed = {"message": ("role", "content"), "function_call": ("name", "call_id"),
                  "function_call_output": ("call_id",)}.get(self.type, ())  # fmt: skip
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"an item of type {self.type} needs {missing[0]}")
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to a chat's messages: what the assistant thought, said and called in a row is one."""
        if self.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})
            return
        role = self.role or "assistant"
        if role != "assistant" or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": role, "content": ""})
        message = messages[-1]
        if self.type == "function_call":
            call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            message.setdefault("tool_calls", []).append(call)
        else:
            key = "content" if self.type == "message" else "reasoning_content"
            message[key] = message.get(key, "") + _joined(self.content or self.summary or "")


class TextFormat(Strict):
    """The ``response_format`` of ``/v1/responses``, under the name that it has there."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def as_in_chats(self) -> dict[str, Any]:
        return {"type": self.type} if self.schema_ is None else {"type": self.type, "schema": self.schema_}


class TextOptions(Strict):
    format: TextFormat = Field(default_factory=lambda: TextFormat())
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class Responses(Text):
    """``/v1/responses``: text and calls of functions; nothing is stored."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit = None
    store: bool = False
    background: Literal[False] | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: list[str] = Field(default_factory=list)  # of what these name, there is none
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def as_chat(self) -> Chat:
        """The same request as a chat."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            item.add_to(messages)
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        same = ("model", "temperature", "top_p", "seed", "method", "user", "parallel_tool_calls", "prompt_cache_key",
                "chat_template_kwargs")  # fmt: skip
        return Chat.model_validate({
            **{name: getattr(self, name) for name in same}, "messages": messages, "max_tokens": self.max_output_tokens,
            "tools": [{"type": tool.get("type"), "function": {k: v for k, v in tool.items() if k != "type"}}
                      for tool in self.tools],
            "tool_choice": choice, "reasoning_effort": self.reasoning.effort,
            "response_format": self.text.format.as_in_chats(),
        })  # fmt: skip


class Tokenize(Templated):
    """``/tokenize``: a text, or a chat with the model's template."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


# --- reading ---

T = TypeVar("T", bound=Strict)


def read(kind: type[T], body: bytes, content_type: str) -> T:
    """The body of a request as an object of the class.

    Raises:
        ApiError: it is none.
    """
    if "json" not in content_type:
        raise ApiError(415, f"The body is JSON: say so with the header Content-Type: application/json, not with "
                       f"{content_type or 'none'!r}.", param="Content-Type")  # fmt: skip
    try:
        text = body.decode()
        found = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if _HALF_CHARACTER.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON text in UTF-8: {error}.") from None
    if _deep(found):
        raise ApiError(400, f"The body has more than {_LEVELS} levels of objects and lists within one another.")
    return validated(kind, found)


def validated(kind: type[T], found: Any) -> T:
    """JSON's values as an object of the class.

    Raises:
        ApiError: they are none.
    """
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        # The deepest one is what is wrong with the kind of value that was meant, where a field takes several kinds.
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        field = ".".join(str(x) for x in first["loc"] if str(x) != "str" and "[" not in str(x))
        problem = "is not served" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
        if first["type"] == "literal_error":
            problem += f", not {str(first['input'])[:60]!r}"
        raise ApiError(400, f"{field or 'The body'} {problem}.", param=field or None) from None


def _finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(_LEVELS):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
