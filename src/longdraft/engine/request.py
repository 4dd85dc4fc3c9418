"""Requests: a prompt with its settings, checked here for every way in."""

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

# Settings that can be given one by one in place of a Sampling.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
_SHAPES = ("top_k", "top_p", "min_p")
_SEEDS = -(2**63), 2**64 - 1  # torch's
_CHAT = (
    "A chat's messages are no prompt: give token ids, those of tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, return_dict=False)."
)


@dataclass(frozen=True)
class Request:
    """A prompt with the settings of its continuation.

    Attributes:
        prompt: a text, or token ids.
        max_new_tokens: emitted at most.
        sampling: temperature and filters together; None: the settings below, which are greedy by default.
        seed: the same seed gives the same text, whatever the method and whoever else is decoded; None: another text
            each time.
        processors: logits processors of transformers' interface, applied before those of ``sampling``. One with a state
            belongs to one request.
        eos_token_ids: tokens that end the output; None takes the model's own, an empty list none.
        stop: string or strings that end the output; they are cut from the text. None: none.
        chat: wrap a text prompt in the tokenizer's chat template, if it has one.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_window: as in :class:`~longdraft.Sampling`.
        tenant: the user whose request this is: with ``earlier=N``, lookups only see texts of the same tenant.
        predicted: token ids that the output may resemble; lookups, if there are any, search them too.
        reuse: begin with the rows that a cache has of the prompt's beginning, if it has any.
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
        """Returns the request with all values in their declared types, and its sampling settings in one object.

        Raises:
            RequestError: a value of a wrong kind or outside its range.
            PromptError: the prompt is neither a text nor token ids.
        """
        for name in ("chat", "reuse"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {value!r}")
        wrong = [p for p in _listed("processors", self.processors) if not callable(p)]
        if wrong:
            raise RequestError(f"processors takes logits processors, which are called; got {wrong[0]!r}")
        cleared: dict[str, Any] = dict.fromkeys(SAMPLING_FIELDS)
        return replace(
            self,
            prompt=normalize_prompt(self.prompt),
            max_new_tokens=whole_number("max_new_tokens", self.max_new_tokens, 1),
            sampling=self._sampling(),
            seed=None if self.seed is None else whole_number("seed", self.seed, *_SEEDS),
            eos_token_ids=_ids("eos_token_ids", self.eos_token_ids),
            stop=normalize_stop(self.stop),
            predicted=_ids("predicted", self.predicted) or [],
            **cleared,
        )

    def _sampling(self) -> Sampling:
        single = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.sampling is None:
            sampling = Sampling(**single)
            if sampling.greedy and (idle := [name for name in _SHAPES if name in single]):
                raise RequestError(
                    f"{' and '.join(idle)} shape{'s' * (len(idle) < 2)} sampled text, and temperature is 0: give a "
                    "temperature above 0 too"
                )
            return sampling
        if not isinstance(self.sampling, Sampling):
            raise RequestError(
                f"sampling takes longdraft.Sampling(temperature=0.7, ...), got {self.sampling!r}; or give temperature= "
                "and its like by themselves"
            )
        if single:
            raise RequestError(f"sampling and {', '.join(single)} say the same thing: give one of the two")
        return self.sampling


class RequestSettings(TypedDict, total=False):
    """The settings of a :class:`Request` that calls for several prompts take, one by one."""

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
    """Makes one request a prompt.

    Args:
        prompts: one prompt or several, as :meth:`longdraft.Speculator.stream` takes them.
        settings: of the prompts that are not requests themselves. Prompt i gets seed + i.

    Raises:
        PromptError: no prompt, or a value that cannot be one.
        RequestError: a setting that cannot be used; as ArgumentError, one that there is not.
    """
    known = RequestSettings.__annotations__
    for name in settings:
        if name not in known:
            raise ArgumentError(f"There is no setting {name}: {suggestion(name, known) or listed(known)}")
    one = isinstance(prompts, str | Request) or _is_ids(prompts := _plain(prompts))
    each = [prompts] if one else cast("list[Any]", prompts)
    if not each:
        raise PromptError("There is no prompt. Give a text or token ids, or a list with at least one of them.")
    requests = []
    for i, prompt in enumerate(each):
        request = prompt
        if not isinstance(prompt, Request):
            request = Request(prompt, **settings)
            if request.seed is not None:
                request = replace(request, seed=whole_number("seed", request.seed, *_SEEDS) + i)
        try:
            requests.append(request.checked())
        except PromptError as error:
            raise error if len(each) == 1 else PromptError(f"Prompt {i} of the list: {error}") from None
    return requests


def normalize_prompt(value: object) -> Prompt:
    """Returns a text as it is, and token ids as a list.

    Raises:
        PromptError: the value is neither.
    """
    if isinstance(value, str):
        return value
    ids = _plain(value)
    if not ids:
        raise PromptError("The prompt is empty. Give at least one token.")
    if _is_ids(ids):
        return [int(token) for token in ids]
    wrong = next(token for token in ids if not _is_id(token))
    if isinstance(wrong, Mapping):
        raise PromptError(_CHAT)
    raise PromptError(f"A prompt is a text or a list of token ids, which are whole numbers: not {_short(wrong)}.")


def normalize_stop(value: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Raises:
        RequestError: one is no text, or empty, which would end every output at once.
    """
    stops = (value,) if isinstance(value, str) else tuple(_listed("stop", () if value is None else value))
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop takes strings, got {stop!r}; token ids that end the output are eos_token_ids")
        if not stop:
            raise RequestError("stop has an empty string, which every text begins with: leave it out")
    return cast("tuple[str, ...]", stops)


def _plain(value: object) -> list[Any]:
    """Makes a list of a tuple, a range, an array, a tensor or an iterator; raises PromptError for anything else."""
    if isinstance(value, Mapping):
        if "role" in value:
            raise PromptError(_CHAT)
        raise PromptError(
            f"{_short(value)} is no prompt: give a text, or token ids, such as tokenizer(text)['input_ids']."
        )
    if hasattr(value, "tolist"):  # numpy's arrays, torch's tensors
        value = value.tolist()
    if isinstance(value, bytes | bytearray) or not isinstance(value, SequenceOf | Iterator):
        raise PromptError(f"A prompt is a text, a list of token ids or a Request: not {_short(value)}.")
    return list(value)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_ids(values: list[Any]) -> bool:
    """True if a list is the token ids of one prompt, rather than a list of prompts."""
    return bool(values) and all(map(_is_id, values))


def _ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    return [whole_number(name, token, 0) for token in ([value] if _is_id(value) else _listed(name, value))]


def _listed(name: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} takes a list, got {value!r}")
    return list(value)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"
