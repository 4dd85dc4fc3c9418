"""Requests: a prompt with its settings. All entry points check them here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypedDict, cast

from longdraft.engine.sampler import Sampling
from longdraft.errors import ArgumentError, PromptError, RequestError
from longdraft.options import listed, suggestion, whole_number

Prompt = str | list[int]

# Fields of a request that replace a Sampling.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
_FILTER_FIELDS = ("top_k", "top_p", "min_p")
_SEED_RANGE = -(2**63), 2**64 - 1  # torch's
_CHAT_MESSAGE = (
    "A chat's messages are no prompt: give token ids, those of tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, return_dict=False)."
)


@dataclass(frozen=True)
class Request:
    """A prompt with the settings of its continuation.

    Attributes:
        prompt: a string, or token ids.
        max_new_tokens: most emitted tokens.
        sampling: all sampling settings in one object; None: the fields below, which are greedy by default.
        seed: gives the same output each time, for any method and batch; None: a random one.
        processors: logits processors with transformers' interface, applied before those of ``sampling``. A stateful
            processor serves one request only.
        eos_token_ids: tokens that end the output; None: those of the model; an empty list: none.
        stop: string or strings that end the output, and are cut from it. None: none.
        chat: whether to wrap a string in the tokenizer's chat template, if there is one.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_window: as in :class:`~longdraft.Sampling`.
        tenant: the user of the request. With ``earlier=N``, lookups see requests of the same tenant only.
        predicted: token ids that the output may resemble; lookups search them too.
        reuse: whether to reuse a cached prefix of the prompt.
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
        """Returns the request with values of the declared types, and sampling settings in one object.

        Raises:
            RequestError: a value of a wrong type or out of range.
            PromptError: the prompt is neither a string nor token ids.
        """
        for name in ("chat", "reuse"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {value!r}")
        wrong = [p for p in _list_argument("processors", self.processors) if not callable(p)]
        if wrong:
            raise RequestError(f"processors takes logits processors, which are called; got {wrong[0]!r}")
        no_fields: dict[str, Any] = dict.fromkeys(SAMPLING_FIELDS)
        return replace(
            self,
            prompt=normalize_prompt(self.prompt),
            max_new_tokens=whole_number("max_new_tokens", self.max_new_tokens, 1),
            sampling=self._sampling(),
            seed=None if self.seed is None else whole_number("seed", self.seed, *_SEED_RANGE),
            eos_token_ids=_normalize_ids("eos_token_ids", self.eos_token_ids),
            stop=normalize_stop(self.stop),
            predicted=_normalize_ids("predicted", self.predicted) or [],
            **no_fields,
        )

    def _sampling(self) -> Sampling:
        fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.sampling is None:
            sampling = Sampling(**fields)
            if sampling.greedy and (ignored := [name for name in _FILTER_FIELDS if name in fields]):
                raise RequestError(
                    f"{' and '.join(ignored)} shape{'s' * (len(ignored) < 2)} sampled text, and temperature is 0: give "
                    "a temperature above 0 too"
                )
            return sampling
        if not isinstance(self.sampling, Sampling):
            raise RequestError(
                f"sampling takes longdraft.Sampling(temperature=0.7, ...), got {self.sampling!r}; or give temperature= "
                "and its like by themselves"
            )
        if fields:
            raise RequestError(f"sampling and {', '.join(fields)} say the same thing: give one of the two")
        return self.sampling


class RequestSettings(TypedDict, total=False):
    """Fields of a :class:`Request` that calls with several prompts accept as keywords."""

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
    """Makes a request of each prompt.

    Args:
        prompts: one prompt or several, as in :meth:`longdraft.Speculator.stream`.
        settings: for prompts that are not requests. Prompt i gets seed + i.

    Raises:
        PromptError: no prompt, or a value that is none.
        RequestError: a wrong value of a setting; as ArgumentError, an unknown setting.
    """
    known = RequestSettings.__annotations__
    for name in settings:
        if name not in known:
            raise ArgumentError(f"There is no setting {name}: {suggestion(name, known) or listed(known)}")
    is_single = isinstance(prompts, str | Request) or _is_ids(prompts := _to_list(prompts))
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
    """Returns a string unchanged, and token ids as a list.

    Raises:
        PromptError: the value is neither.
    """
    if isinstance(value, str):
        return value
    token_ids = _to_list(value)
    if not token_ids:
        raise PromptError("The prompt is empty. Give at least one token.")
    if _is_ids(token_ids):
        return [int(token) for token in token_ids]
    wrong = next(token for token in token_ids if not _is_id(token))
    if isinstance(wrong, Mapping):
        raise PromptError(_CHAT_MESSAGE)
    raise PromptError(f"A prompt is a string or a list of token ids, which are whole numbers: not {_describe(wrong)}.")


def normalize_stop(value: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Raises:
        RequestError: one is no string, or empty, which would end every output at once.
    """
    stops = (value,) if isinstance(value, str) else tuple(_list_argument("stop", () if value is None else value))
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop takes strings, got {stop!r}; token ids that end the output are eos_token_ids")
        if not stop:
            raise RequestError("stop has an empty string, which would end every output at once: leave it out")
    return cast("tuple[str, ...]", stops)


def _to_list(value: object) -> list[Any]:
    """Converts a tuple, range, array, tensor or iterator to a list; raises PromptError for other values."""
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


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_ids(values: list[Any]) -> bool:
    """True if the list is one prompt's token ids, not a list of prompts."""
    return bool(values) and all(map(_is_id, values))


def _normalize_ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    return [whole_number(name, token, 0) for token in ([value] if _is_id(value) else _list_argument(name, value))]


def _list_argument(name: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} takes a list, got {value!r}")
    return list(value)


def _describe(value: object) -> str:
    described = repr(value)
    return described if len(described) <= 40 else f"a {type(value).__name__}"
