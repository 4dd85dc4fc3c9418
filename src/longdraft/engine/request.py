"""Requests: a prompt with its settings. Every entry point checks its requests here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypedDict, cast

from longdraft.engine.sampler import Sampling
from longdraft.errors import ArgumentError, PromptError, RequestError
from longdraft.options import Option, listed, suggestion, whole_number

Prompt = str | list[int]

# Fields of a request that replace a Sampling object.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
# Fields that do not change greedy decoding.
_FILTER_FIELDS = ("top_k", "top_p", "min_p")
_SEED_RANGE = -(2**63), 2**64 - 1  # the seeds that torch.Generator.manual_seed accepts
_CHAT_MESSAGE = (
    "A list of chat messages is no prompt: give the token ids that tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, return_dict=False) returns."
)


@dataclass(frozen=True)
class Request:
    """A prompt with the settings of its continuation.

    Attributes:
        prompt: a string, or token ids.
        max_new_tokens: maximum number of emitted tokens.
        sampling: all sampling settings in one object; None: the settings are ``temperature`` and the fields after it.
        seed: fixes the random numbers, so the output is the same for any method and batch; None: a random seed.
        processors: logits processors with transformers' interface, applied before the processors of ``sampling``. A
            processor with state can serve only one request.
        eos_token_ids: tokens that end the output; None: the model's EOS tokens; an empty list: no token ends it.
        stop: string or strings that end the output, and are cut from it; None or empty: no string ends it.
        chat: whether to wrap a string in the tokenizer's chat template, if the tokenizer has one.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_window: as in :class:`~longdraft.Sampling`.
        tenant: the user who sent the request. With ``earlier=N``, lookups search requests of this tenant only.
        predicted: token ids that the output may resemble, which lookups search too.
        reuse: whether to reuse cached KV of a prefix of the prompt.
    """

    prompt: Prompt
    max_new_tokens: int = 256
    sampling: Sampling | None = None
    seed: int | None = None
    processors: SequenceOf[Any] = ()
    eos_token_ids: SequenceOf[int] | int | None = None
    stop: SequenceOf[str] | str | None = ()
    chat: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    tenant: str | None = None
    predicted: SequenceOf[int] = ()
    reuse: bool = True

    def checked(self) -> Request:
        """Returns the request with all values checked, converted to the declared types, and sampling in one object.

        Raises:
            RequestError: a value has a wrong type or is out of range.
            PromptError: the prompt is neither a string nor token ids.
        """
        for name in ("chat", "reuse"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {value!r}")
        wrong = [p for p in _list_argument("processors", self.processors) if not callable(p)]
        if wrong:
            raise RequestError(f"processors must be a list of callable logits processors, got {wrong[0]!r}")
        unset_fields: dict[str, Any] = dict.fromkeys(SAMPLING_FIELDS)
        return replace(
            self,
            prompt=normalize_prompt(self.prompt),
            max_new_tokens=whole_number("max_new_tokens", self.max_new_tokens, 1),
            sampling=self._merge_sampling(),
            seed=None if self.seed is None else whole_number("seed", self.seed, *_SEED_RANGE),
            eos_token_ids=_normalize_ids("eos_token_ids", self.eos_token_ids),
            stop=normalize_stop(self.stop),
            predicted=_normalize_ids("predicted", self.predicted) or [],
            **unset_fields,
        )

    def _merge_sampling(self) -> Sampling:
        """Returns ``sampling``, or makes it from the fields in its place."""
        fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.sampling is None:
            sampling = Sampling(**fields)
            if sampling.greedy and (ignored := [name for name in _FILTER_FIELDS if name in fields]):
                raise RequestError(
                    f"{' and '.join(ignored)} ha{'s' if len(ignored) < 2 else 've'} no effect at temperature 0: give "
                    "a temperature above 0 too"
                )
            return sampling
        if not isinstance(self.sampling, Sampling):
            raise RequestError(
                f"sampling must be a longdraft.Sampling(temperature=0.7, ...), got {self.sampling!r}; or "
                "give temperature= and the other settings without it"
            )
        if fields:
            raise RequestError(f"sampling and {', '.join(fields)} exclude each other: give one of the two")
        return self.sampling


class RequestSettings(TypedDict, total=False):
    """The keywords of methods that accept several prompts. Each is a field of :class:`Request`."""

    max_new_tokens: int
    sampling: Sampling | None
    seed: int | None
    eos_token_ids: SequenceOf[int] | int | None
    stop: SequenceOf[str] | str | None
    chat: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    repetition_window: int | None


def make_requests(prompts: object, settings: RequestSettings) -> list[Request]:
    """Makes a checked request of each prompt.

    Args:
        prompts: one prompt or several, as in :meth:`longdraft.Speculator.stream`.
        settings: settings for prompts that are not :class:`Request` objects. Prompt i gets the seed ``seed + i``.

    Raises:
        PromptError: there are no prompts, or a prompt is neither a string, token ids nor a request.
        RequestError: a setting has a wrong value; ArgumentError: a setting does not exist.
    """
    allowed = RequestSettings.__annotations__
    for name in settings:
        if name not in allowed:
            is_field = name in Request.__dataclass_fields__
            way = f"give each prompt its own, as Request(prompt, {name}=...)" if is_field else suggestion(name, allowed)
            raise ArgumentError(f"There is no setting {name}: {way or listed(allowed)}")
    is_single = isinstance(prompts, str | Request) or _are_token_ids(prompts := _to_list(prompts))
    prompt_list = [prompts] if is_single else cast("list[Any]", prompts)
    if not prompt_list:
        raise PromptError("There is no prompt. Give a string or token ids, or a list with at least one of them.")
    requests = []
    for i, prompt in enumerate(prompt_list):
        request = prompt
        if not isinstance(prompt, Request):
            request = Request(prompt, **settings)
            if request.seed is not None:
                request = replace(request, seed=whole_number("seed", request.seed, *_SEED_RANGE) + i)
        try:
            requests.append(request.checked())
        except PromptError as error:
            raise error if len(prompt_list) == 1 else PromptError(f"Prompt {i} of the list: {error}") from None
    return requests


def normalize_prompt(value: object) -> Prompt:
    """Returns a string unchanged, and token ids as a list; raises PromptError for any other value."""
    if isinstance(value, str):
        return value
    token_ids = _to_list(value)
    if not token_ids:
        raise PromptError("The prompt is empty. Give at least one token.")
    if _are_token_ids(token_ids):
        return [int(token) for token in token_ids]
    wrong = next(token for token in token_ids if not _is_token_id(token))
    if isinstance(wrong, Mapping):
        raise PromptError(_CHAT_MESSAGE)
    raise PromptError(f"A prompt is a string or a list of token ids, which are whole numbers: not {_describe(wrong)}.")


def normalize_stop(value: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple; raises RequestError if one is not a string, or is empty."""
    stops = (value,) if isinstance(value, str) else tuple(_list_argument("stop", () if value is None else value))
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop must be strings, got {stop!r}; eos_token_ids takes token ids that end the output")
        if not stop:
            raise RequestError("stop has an empty string, which would end every output at once: leave it out")
    return cast("tuple[str, ...]", stops)


def _to_list(value: object) -> list[Any]:
    """Converts a tuple, range, array, tensor or iterator to a list; raises PromptError for any other value."""
    if isinstance(value, Mapping):
        if "role" in value:
            raise PromptError(_CHAT_MESSAGE)
        raise PromptError(
            f"{_describe(value)} is no prompt: give a string, or token ids, such as tokenizer(text)['input_ids']."
        )
    if hasattr(value, "tolist"):  # numpy arrays, torch tensors
        value = value.tolist()
    if isinstance(value, bytes | bytearray) or not isinstance(value, SequenceOf | Iterator):
        raise PromptError(f"A prompt is a string, a list of token ids or a Request: not {_describe(value)}.")
    return list(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_token_ids(values: list[Any]) -> bool:
    """Returns True if the list is the token ids of one prompt, not a list of prompts."""
    return bool(values) and all(map(_is_token_id, values))


def _normalize_ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    tokens = [value] if _is_token_id(value) else _list_argument(name, value)
    token_option = Option(name, int, ..., least=0)  # made once, because there may be many tokens
    for token in tokens:
        token_option.check(token, RequestError)
    return list(map(int, tokens))


def _list_argument(name: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} takes a list, got {value!r}")
    return list(value)


def _describe(value: object) -> str:
    described = repr(value)
    return described if len(described) <= 40 else f"a {type(value).__name__}"
