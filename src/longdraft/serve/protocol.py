"""Request bodies of OpenAI's API.

A field that is not served is refused if it would change the answer. Clients keep adding fields: all others are ignored.
"""

from __future__ import annotations

import contextlib
import json
from math import isinf
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from longdraft.serve.errors import ApiError

# Limit of nested JSON: schemas and chat templates are processed by recursion.
_MAX_DEPTH = 96


class ApiModel(BaseModel):
    """Base of bodies and their parts. Refuses fields in ``unserved``, ignores unknown fields, and drops null.

    Attributes:
        unserved: {field that would change the answer: its neutral value}. None: any empty value is neutral.
        prompt_field: the name of the field that has the prompt.
    """

    model_config = ConfigDict(extra="ignore", strict=False)
    unserved: ClassVar[dict[str, Any]] = {}
    prompt_field: ClassVar[str] = "messages"

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {name: x for name, x in data.items() if x is not None}
        for name in sorted(fields.keys() & cls.unserved.keys() - cls.model_fields.keys()):
            value, neutral = fields[name], cls.unserved[name]
            has_effect = bool(value) if neutral is None else value != neutral
            if has_effect or value == {}:  # {} has an effect too: as a schema it means any JSON
                raise PydanticCustomError("unserved", "It is not served", {"name": name})
        return fields


_TEXT_TYPES = Literal["text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"]


class ContentPart(ApiModel):
    """A part of a message; only text is served."""

    type: _TEXT_TYPES
    text: str = Field(validation_alias=pydantic.AliasChoices("text", "refusal"))


def replace_non_text(tool_result: Any) -> Any:
    """Returns a tool's result with a note in place of each image or file. (Clients do not choose what tools return.)"""

    def replace(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") in get_args(_TEXT_TYPES):
            return part
        noun = str(part.get("type")).removeprefix("input_").removesuffix("_url")  # image, file, ...
        return {"type": "text", "text": f"[The {noun} is not shown: this model reads text alone.]"}

    return [replace(part) for part in tool_result] if isinstance(tool_result, list) else tool_result


class FunctionCall(ApiModel):
    """A function's name and arguments. A custom tool has ``input`` instead of ``arguments``."""

    name: str
    arguments: str | dict[str, Any] = "{}"
    input: str | None = None


class ToolCall(ApiModel):
    """A tool call of an earlier answer."""

    id: str = ""
    function: FunctionCall = Field(validation_alias=pydantic.AliasChoices("function", "custom"))

    def for_template(self) -> dict[str, Any]:
        """Returns the call as chat templates take it, with the arguments as an object."""
        arguments: Any = self.function.arguments or "{}"
        if self.function.input is not None:
            arguments = {"input": self.function.input}
        elif isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # invalid JSON by the model stays a string
                arguments = json.loads(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(ApiModel):
    """A message of a chat."""

    unserved = dict.fromkeys(("audio", "function_call", "images"))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # reasoning_content, as other servers call it

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _replace_in_tool_result(cls, content: Any, info: pydantic.ValidationInfo) -> Any:
        return replace_non_text(content) if info.data.get("role") == "tool" else content

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": join_text(self.content or self.refusal or "")}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        reasoning = self.reasoning_content or self.reasoning
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
        return message


class StreamOptions(ApiModel):
    """Reports of a stream besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # token counts in each chunk
    include_trace: bool = False  # what each round drafted
    include_obfuscation: bool = False  # accepted, without effect


def join_text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_max_tokens(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("at least 1, or -1 for what the context leaves")
    return None if value == -1 else value


# Limit of new tokens; None: what the context leaves.
MaxTokens = Annotated[int | None, AfterValidator(_check_max_tokens)]

# Fields of other endpoints and servers that would change the answer, unless they are empty ...
_UNSERVED_NAMES = (
    "allowed_token_ids audio background bad_words chat_template conversation documents dry_multiplier dynatemp_range "
    "echo functions grammar guided_choice guided_grammar guided_json guided_regex include_stop_str_in_output input "
    "instructions json_schema logits_processors logprobs lora max_completion_tokens max_output_tokens max_tokens "
    "messages mirostat previous_response_id prompt prompt_logprobs response_format stop_token_ids "
    "structured_outputs suffix tools top_logprobs truncate_prompt_tokens use_beam_search xtc_probability"
)
# ... or have this value.
_UNSERVED: dict[str, Any] = dict.fromkeys(_UNSERVED_NAMES.split()) | {
    "best_of": 1, "length_penalty": 1, "modalities": ["text"], "n_predict": -1, "skip_special_tokens": True, "tfs_z": 1,
    "top_n_sigma": -1, "typical_p": 1,
}  # fmt: skip


class GenerationRequest(ApiModel):
    """The fields of all endpoints that generate text."""

    unserved = _UNSERVED

    model: str = ""
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0  # OpenAI's default; 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    method: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class SampledRequest(GenerationRequest):
    """The fields that OpenAI's endpoints for text share, and those of vLLM and llama.cpp."""

    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    repetition_window: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=16)] = Field(
        default_factory=list
    )
    n: Annotated[int, Field(ge=1, le=16)] = 1
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    return_token_ids: bool = False
    cache_prompt: bool = True  # llama.cpp's name


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatTemplateFields(ApiModel):
    """Fields that concern the chat template.

    If the last message is the assistant's, the answer continues it, unless ``add_generation_prompt`` starts a new turn.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None


class ChatCompletionRequest(SampledRequest, ChatTemplateFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"  # llama.cpp's; none leaves reasoning in the text
    include_reasoning: bool = True  # vLLM's; false drops the reasoning


class CompletionRequest(SampledRequest):
    """The body of ``/v1/completions``."""

    prompt_field = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: MaxTokens = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str = ""


class TokenizeRequest(ChatTemplateFields):
    """The body of ``/tokenize``: a text (``prompt``) or a chat (``messages``)."""

    prompt_field = "prompt"

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool = True


T = TypeVar("T", bound=ApiModel)


def parse_body(model_class: type[T], body: bytes, content_type: str) -> T:
    """Parses a request body. Raises ApiError if it is not JSON, or not a valid ``model_class``."""
    if "json" not in content_type:
        raise ApiError(415, f"The body must be JSON, with the header Content-Type: application/json, not "
                       f"{content_type or 'none'!r}.", param="Content-Type")  # fmt: skip
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON in UTF-8: {error}.") from None
    _check_nesting(values)
    return validate(model_class, values)


def validate(model_class: type[T], values: Any) -> T:
    """Makes a ``model_class`` of JSON values. Raises ApiError, with the field's name, if a value is not valid."""
    try:
        return model_class.model_validate(values)
    except ValidationError as error:
        # A union has an error for each type. The deepest error belongs to the type that was meant.
        deepest = max(error.errors(), key=lambda e: len(e["loc"]))
        unserved = [deepest["ctx"]["name"]] if deepest["type"] == "unserved" else []
        # Types of a union ("str", "list[...]") in pydantic's path of the field are left out.
        field = ".".join(str(x) for x in (*deepest["loc"], *unserved) if str(x) != "str" and "[" not in str(x))
        problem = "is not served" if unserved else f"cannot be used: {deepest['msg']}"
        if deepest["type"] == "literal_error":
            problem += f", not {str(deepest['input'])[:60]!r}"
        raise ApiError(400, f"{field or 'The body'} {problem}.", param=field or None) from None


def _check_nesting(value: Any) -> None:
    """Raises ApiError if there are too many levels of nested JSON, or an infinite number, such as 1e999."""
    values = [value]  # all values of one level
    for _ in range(_MAX_DEPTH):
        if any(isinstance(x, float) and isinf(x) for x in values):
            raise ApiError(400, "The body has a number that is not finite.")
        containers = [x for x in values if isinstance(x, dict | list)]
        values = [inner for x in containers for inner in (x.values() if isinstance(x, dict) else x)]
        if not values:
            return
    raise ApiError(400, f"The body has more than {_MAX_DEPTH} levels of nested objects and lists.")
