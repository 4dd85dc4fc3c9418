"""Bodies of requests: the fields of OpenAI's API that are served. Others are refused if they would change the answer,
and not looked at if not, as clients send ever more. An error says what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from longdraft.serve.errors import ApiError

# Levels of objects and lists within one another; readers of schemas and templates go down one by one.
_LEVELS = 96
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class StrictModel(BaseModel):
    """Refuses what changes an answer and is not served; a null counts as a missing field.

    Attributes:
        unserved: names of such fields, each with the value that changes nothing; None: what is empty.
    """

    model_config = ConfigDict(extra="ignore", strict=False)
    unserved: ClassVar[dict[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = {name: x for name, x in data.items() if x is not None}
        for name in sorted(found.keys() & cls.unserved.keys() - cls.model_fields.keys()):
            value, neutral = found[name], cls.unserved[name]
            if value == {} or (value if neutral is None else value != neutral):
                raise PydanticCustomError("unserved", "It is not served", {"name": name})
        return found


_TEXTS = Literal["text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"]


class ContentPart(StrictModel):
    """A part of a message; only text is served."""

    type: _TEXTS
    text: str = Field(validation_alias=pydantic.AliasChoices("text", "refusal"))


def replace_non_text(result: Any) -> Any:
    """A tool's result in which a text stands for what is none, such as an image: who calls cannot leave that out."""

    def text_of(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") in get_args(_TEXTS):
            return part
        kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
        return {"type": "text", "text": f"[The {kind} is not shown: this model reads text alone.]"}

    return [text_of(part) for part in result] if isinstance(result, list) else result


class FunctionCall(StrictModel):
    """``input``: that of a custom tool, in the place of arguments."""

    name: str
    arguments: str | dict[str, Any] = "{}"
    input: str | None = None


class ToolCall(StrictModel):
    id: str = ""
    function: FunctionCall = Field(validation_alias=pydantic.AliasChoices("function", "custom"))

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: arguments are an object, which they write in JSON themselves."""
        arguments: Any = self.function.arguments or "{}"
        if self.function.input is not None:
            arguments = {"input": self.function.input}
        elif isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # a model's mistake, which it may see
                arguments = json.loads(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(StrictModel):
    unserved = dict.fromkeys(("audio", "function_call", "images"))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same, as other servers call it

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _seen(cls, content: Any, others: pydantic.ValidationInfo) -> Any:
        return replace_non_text(content) if others.data.get("role") == "tool" else content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": join_text(self.content or self.refusal or "")}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        thought = self.reasoning_content or self.reasoning
        if isinstance(thought, str) and thought:
            message["reasoning_content"] = thought
        return message


class StreamOptions(StrictModel):
    """``continuous_usage_stats``: token counts in each chunk. ``include_trace``: what each round drafted."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_trace: bool = False
    include_obfuscation: bool = False


def join_text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _limit(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("at least 1, or -1 for as many as there is room for")
    return None if value == -1 else value


# New tokens at most; None: as many as there is room for.
MaxTokens = Annotated[int | None, AfterValidator(_limit)]


# Fields of other endpoints and servers that change an answer.
_NAMES = (
    "allowed_token_ids audio background bad_words chat_template conversation documents dry_multiplier dynatemp_range "
    "echo functions grammar guided_choice guided_grammar guided_json guided_regex include_stop_str_in_output input "
    "instructions json_schema logits_processors logprobs lora max_completion_tokens max_output_tokens max_tokens "
    "messages mirostat previous_response_id prompt prompt_logprobs response_format stop_token_ids "
    "structured_outputs suffix tools top_logprobs truncate_prompt_tokens use_beam_search xtc_probability"
)
_UNSERVED: dict[str, Any] = dict.fromkeys(_NAMES.split()) | {
    "best_of": 1, "length_penalty": 1, "modalities": ["text"], "n_predict": -1, "skip_special_tokens": True, "tfs_z": 1,
    "top_n_sigma": -1, "typical_p": 1,
}  # fmt: skip


class GenerationRequest(StrictModel):
    """The fields of all endpoints that answer with text.

    Attributes:
        texts: the field that has the prompt.
    """

    unserved = _UNSERVED
    prompt_field: ClassVar[str] = "messages"

    model: str = ""
    stream: bool = False
    # OpenAI's default; clients that want greedy text send 0.
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    method: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class SampledRequest(GenerationRequest):
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
    cache_prompt: bool = True  # llama.cpp's name


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatTemplateFields(StrictModel):
    """Fields of what goes through the chat template.

    A last message of the assistant's is continued, unless the client asks for another turn, as those of vLLM may.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None


class ChatCompletionRequest(SampledRequest, ChatTemplateFields):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"  # llama.cpp's; none: thoughts are left in the text
    include_reasoning: bool = True  # vLLM's


class CompletionRequest(SampledRequest):
    """``/v1/completions``."""

    prompt_field = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: MaxTokens = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str = ""


class TokenizeRequest(ChatTemplateFields):
    """``/tokenize``: a text, or a chat with the model's template."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool = True


# --- reading ---

T = TypeVar("T", bound=StrictModel)


def parse_body(model: type[T], body: bytes, content_type: str) -> T:
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
    return validate(model, found)


def validate(model: type[T], values: Any) -> T:
    """JSON's values as an object of the class.

    Raises:
        ApiError: they are none.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # The deepest one is what is wrong with the kind of value that was meant, where a field takes several kinds.
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        named = [first["ctx"]["name"]] if first["type"] == "unserved" else []
        field = ".".join(str(x) for x in (*first["loc"], *named) if str(x) != "str" and "[" not in str(x))
        problem = "is not served" if named else f"cannot be used: {first['msg']}"
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
