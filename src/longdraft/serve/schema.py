"""Request bodies: the fields of OpenAI's API that are served. Any other field or value is refused, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Refuses unknown fields; a null counts as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: x for name, x in data.items() if x is not None} if isinstance(data, dict) else data


class Part(Strict):
    """A part of a message; only text is served."""

    type: Literal["text", "input_text", "output_text"]
    text: str


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
        return message


class StreamOptions(Strict):
    """``continuous_usage_stats``: token counts in each chunk. ``include_trace``: what each round drafted."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_trace: bool = False
    include_obfuscation: bool = False


class Prediction(Strict):
    """OpenAI's predicted outputs."""

    type: Literal["content"] = "content"
    content: str | list[Part]

    @property
    def text(self) -> str:
        return _joined(self.content)


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


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
    prediction: Prediction | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool = True  # llama.cpp's name


class Chat(Sampled):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None


class Completion(Sampled):
    """``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: str = ""


class Input(Strict):
    """A message of ``/v1/responses``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None


class Responses(Text):
    """``/v1/responses``: text in, text out; nothing is stored."""

    input: str | list[Input]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    store: bool = False
    text: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None


class Tokenize(Strict):
    """``/tokenize``: a text, or a chat with the model's template."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
