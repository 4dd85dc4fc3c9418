"""A request: a prompt, and how it is to be continued. Checked here, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

from longdraft.arguments import answering_class, whole
from longdraft.engine.sampler import Sampling
from longdraft.errors import PromptError, RequestError

Prompt = str | list[int]

# What can be given one by one in the place of a Sampling.
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
_SHAPES = ("top_k", "top_p", "min_p")
_SEEDS = -(2**63), 2**64 - 1  # torch's
_CHAT = (
    "A chat's messages are no prompt: give token ids, those of tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, return_dict=False)."
)


@answering_class
@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        prompt: a text, or token ids.
        max_new_tokens: emitted at most.
        sampling: temperature and filters together; None: those below, by which it is greedy where none is given.
        seed: the same seed gives the same text, whatever the method and whoever else is decoded; None: another
            text each time.
        processors: logits processors of transformers' interface, applied before those of ``sampling``. One with a state
            belongs to one request.
        eos_token_ids: where to end; None takes the model's own, an empty list none.
        stop: strings that end the output, or one; they are cut from the text. None: none.
        chat: wrap a text prompt in the tokenizer's chat template, where it has one.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_window: as of :class:`~longdraft.Sampling`.
        tenant: whose it is: with ``earlier=N``, lookups see the texts of the same tenant's requests alone.
        predicted: token ids that the output may be, or be like: where lookups are on, they look there too.
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

    def checked(self) -> Request:
        """The same request with all values as they are declared, and its sampling in one.

        Raises:
            RequestError: a value of a wrong kind or outside its range.
            PromptError: the prompt is neither a text nor token ids.
        """
        if not isinstance(self.chat, bool):
            raise RequestError(f"chat must be True or False, got {self.chat!r}")
        wrong = [p for p in _listed("processors", self.processors) if not callable(p)]
        if wrong:
            raise RequestError(f"processors takes logits processors, which are called; got {wrong[0]!r}")
        cleared: dict[str, Any] = dict.fromkeys(SAMPLED)
        return replace(
            self,
            prompt=prompt_of(self.prompt),
            max_new_tokens=whole("max_new_tokens", self.max_new_tokens, 1),
            sampling=self._sampling(),
            seed=None if self.seed is None else whole("seed", self.seed, *_SEEDS),
            eos_token_ids=_ids("eos_token_ids", self.eos_token_ids),
            stop=stops_of(self.stop),
            predicted=_ids("predicted", self.predicted) or [],
            **cleared,
        )

    def _sampling(self) -> Sampling:
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        if self.sampling is None:
            made = Sampling(**given)
            if made.greedy and (idle := [name for name in _SHAPES if name in given]):
                raise RequestError(
                    f"{' and '.join(idle)} shape{'s' * (len(idle) < 2)} sampled text, and temperature is 0: give a "
                    "temperature above 0 too"
                )
            return made
        if not isinstance(self.sampling, Sampling):
            raise RequestError(
                f"sampling takes longdraft.Sampling(temperature=0.7, ...), got {self.sampling!r}; or give temperature= "
                "and its like by themselves"
            )
        if given:
            raise RequestError(f"sampling and {', '.join(given)} say the same thing: give one of the two")
        return self.sampling


def requests_of(prompts: object, settings: Request) -> list[Request]:
    """One request a prompt.

    Args:
        prompts: one prompt or several, as :meth:`longdraft.Speculator.stream` takes them.
        settings: of those that are not requests themselves; its own prompt is not looked at. Prompt i has its seed + i.

    Raises:
        PromptError: no prompt, or what cannot be one.
        RequestError: a setting that cannot be used.
    """
    one = isinstance(prompts, str | Request) or _is_ids(prompts := _plain(prompts))
    each = [prompts] if one else cast("list[Any]", prompts)
    if not each:
        raise PromptError("There is no prompt. Give a text or token ids, or a list with at least one of them.")
    found = []
    for i, prompt in enumerate(each):
        request = prompt
        if not isinstance(prompt, Request):
            seed = settings.seed
            if seed is not None:
                seed = whole("seed", seed, *_SEEDS) + i
            request = replace(settings, prompt=prompt, seed=seed)
        try:
            found.append(request.checked())
        except PromptError as error:
            raise error if len(each) == 1 else PromptError(f"Prompt {i} of the list: {error}") from None
    return found


def prompt_of(value: object) -> Prompt:
    """A text, or token ids as a list.

    Raises:
        PromptError: it is neither; says what to do with it.
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


def stops_of(value: object) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        RequestError: one that is no text, or empty: it would end every output at once.
    """
    found = (value,) if isinstance(value, str) else tuple(_listed("stop", () if value is None else value))
    for stop in found:
        if not isinstance(stop, str):
            raise RequestError(f"stop takes strings, got {stop!r}; token ids that end the output are eos_token_ids")
        if not stop:
            raise RequestError("stop has an empty string, which every text begins with: leave it out")
    return cast("tuple[str, ...]", found)


def _plain(value: object) -> list[Any]:
    """A list of what may be a prompt or several: of a tuple, a range, an array, a tensor, an iterator.

    Raises:
        PromptError: for anything else.
    """
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
    """Whether a list is one prompt's token ids, and not a list of prompts."""
    return bool(values) and all(map(_is_id, values))


def _ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    return [whole(name, token, 0) for token in ([value] if _is_id(value) else _listed(name, value))]


def _listed(name: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} takes a list, got {value!r}")
    return list(value)


def _short(value: object) -> str:
    """A value for a sentence: its type where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"
