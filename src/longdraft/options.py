"""Options of methods and arguments of calls: declared once, checked, and explained if they are wrong.

An option is a field of a dataclass, and everything else is derived from that::

    @dataclass(frozen=True)
    class LookupOptions(Options):
        lookup: bool = option(False, help="also propose tokens by suffix lookup")

Python keywords, ``-o name=value``, ``--help``, the tables of docs/methods.md and error messages come from these fields.
A drafter, or a function that builds one, lists its dataclasses in ``options`` (:func:`takes`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from longdraft.errors import ArgumentError, RequestError

P = ParamSpec("P")
R = TypeVar("R")

F = TypeVar("F", bound=Callable[..., Any])
Given = TypeVar("Given", bound="Options")

_DRAFT = "the draft folder, or a small model's .gguf file"
_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a method.

    Attributes:
        kind: int, float, bool, str, tuple (of whole numbers) or object (anything).
        default: the value if it is not given. usual: the default in words, if it depends on other things.
        least: smallest value of a number. choices: the values of a text; none: any text.
        aliases: other names that are accepted.
    """

    name: str
    kind: type = object
    default: Any = None
    help: str = ""
    usual: str = ""
    least: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The values that it takes, in words: "a whole number of at least 1"."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}" if others else last
        if self.kind is tuple:
            return "whole numbers of at least 1"
        return _KINDS.get(self.kind, "") + ("" if self.least is None else f" of at least {self.least:g}")

    @property
    def default_in_words(self) -> str:
        """The default as a table shows it."""
        if self.usual or self.default is None:
            return self.usual
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def check(self, value: Any) -> None:
        """Raises ValueError for a value that the option does not take."""
        if (value is None and self.default is None) or self._takes(value):
            return
        raise ValueError(f"{self.name} must be {self.range}, got {value!r}")

    def _takes(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind is tuple:
            sizes = value if isinstance(value, tuple | list) else ()
            return bool(sizes) and all(_is_number(size, Integral) and size >= 1 for size in sizes)
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind not in (int, float):
            return True
        fits = _is_number(value, Integral if self.kind is int else Real)
        return fits and (self.least is None or value >= self.least)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)  # type: ignore[arg-type]


def option(
    default: Any = None,
    *,
    help: str,
    min: float | None = None,
    choices: tuple[str, ...] = (),
    usual: str = "",
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field of an :class:`Options` dataclass; see :class:`Option`."""
    about = {"help": help, "least": min, "choices": choices, "usual": usual, "aliases": aliases}
    return dataclasses.field(default=default, metadata=about)


class Options:
    """Base of the dataclasses that declare options. Their values are checked when an instance is made.

    Raises:
        ValueError: a value that an option does not take.
    """

    def __post_init__(self) -> None:
        for name, each in declared(type(self)).items():
            each.check(getattr(self, name))

    def given(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        values = {name: getattr(self, name) for name in declared(type(self))}
        return {name: value for name, value in values.items() if value is not None}


def declared(group: type[Options]) -> dict[str, Option]:
    """The options that a dataclass declares, by name."""
    kind: Any = group  # hashable, though mypy sees the instances' hash
    return dict(_declared(kind))


@cache
def _declared(group: Any) -> dict[str, Option]:
    hints = get_type_hints(group)
    return {
        f.name: Option(f.name, _kind(hints[f.name]), f.default, **f.metadata)
        for f in dataclasses.fields(group)
        if f.metadata
    }


def _kind(hint: Any) -> type:
    """The type of an option without its ``| None``."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
    kind = kinds[0] if len(kinds) == 1 else object
    kind = getattr(kind, "__origin__", kind)
    return kind if isinstance(kind, type) else object


def takes(*groups: type[Options]) -> Callable[[F], F]:
    """Decorator of a function that builds a drafter or a schedule from keyword options: which ones it takes."""

    def mark(factory: F) -> F:
        factory.options = groups  # type: ignore[attr-defined]
        return factory

    return mark


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The options that a factory takes, by name: those it lists in ``options``, and its own keywords.

    The keywords of a :func:`functools.partial` are the defaults of the options of these names.
    """
    if isinstance(factory, partial):
        known = options_of(factory.func)
        return {n: dataclasses.replace(o, default=factory.keywords.get(n, o.default)) for n, o in known.items()}
    found = {name: each for group in getattr(factory, "options", ()) for name, each in declared(group).items()}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and not name.startswith("_"):
            default = None if parameter.default is parameter.empty else parameter.default
            kind = type(default) if type(default) in _KINDS else object
            found.setdefault(name, Option(name, kind, default, _DRAFT if name == "draft" else ""))
    return found


def by_official_name(given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Options with aliases replaced by the names that they stand for.

    Raises:
        ValueError: an option is given by two of its names.
    """
    names = {alias: each.name for each in known.values() for alias in each.aliases if alias not in known}
    for alias, official in names.items():
        if alias in given and official in given:
            raise ValueError(f"{alias} is another name of {official}: give one of them")
    return {names.get(name, name): value for name, value in given.items()}


def listed(names: Iterable[str]) -> str:
    """Names with commas between; "none" without any."""
    return ", ".join(names) or "none"


def parse(owner: str, given: Mapping[str, Any], *groups: type[Options]) -> tuple[Any, ...]:
    """An instance of each dataclass, from flat keywords.

    Args:
        owner: what takes the options, for messages.

    Raises:
        ValueError: an option that no dataclass declares, or a value that it does not take.
    """
    known = {name: each for group in groups for name, each in declared(group).items()}
    given = by_official_name(given, known)
    for name in given:
        if name not in known:
            raise ValueError(f"{owner} has no option {name}: {suggestion(name, known) or f'it has {listed(known)}.'}")
    return tuple(group(**{n: v for n, v in given.items() if n in declared(group)}) for group in groups)


# --- arguments of calls ---

_NO_BEAMS = "longdraft decodes greedily or by sampling, one output a prompt: leave it out"
_SEVERAL = "give the prompt several times; each samples with a seed of its own"
_GREEDY = "temperature=0 is greedy, a temperature above 0 samples"
_PENALTY = "there is repetition_penalty here, and Request(prompt, processors=[...]) for others"
_GENERATED = "it is a setting of what is generated, not of the method"
# Names in other libraries -> the argument's name here, or advice.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens counts the new tokens alone",
    "num_tokens": "max_new_tokens", "new_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
    "stop_strings": "stop", "stop_sequences": "stop", "stop_words": "stop",
    "eos_token_id": "eos_token_ids", "stop_token_ids": "eos_token_ids", "eos": "eos_token_ids",
    "ignore_eos": "eos_token_ids=[] decodes on to max_new_tokens",
    "do_sample": _GREEDY, "use_beam_search": _NO_BEAMS, "num_beams": _NO_BEAMS, "num_beam_groups": _NO_BEAMS,
    "n": _SEVERAL, "best_of": _SEVERAL, "num_return_sequences": _SEVERAL,
    "sampling_params": "sampling", "generation_config": "give its values by name, such as temperature= and top_p=",
    "temp": "temperature", "random_seed": "seed", "generator": "seed",
    "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    "logits_processor": "Request(prompt, processors=[...]) takes them",
    "streamer": "iterate over stream(...), whose steps have the text", "stream": "iterate over stream(...)",
    "batch_size": "batch", "max_num_seqs": "batch", "past_key_values": "cache", "prompt_cache": "cache",
    "use_cache": "the KV is always kept; cache=PromptCache() keeps it for the next call",
    "prompt": "prompts", "inputs": "prompts", "input_ids": "prompts", "prompt_token_ids": "prompts", "text": "prompts",
    "messages": "give the token ids of tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
    "return_dict=False)",
    "apply_chat_template": "chat", "raw": "chat=False continues a text as it is",
    "model": "target", "base_model": "target", "target_model": "target", "draft_model": "draft",
    "assistant_model": "draft", "speculative_model": "draft", "num_speculative_tokens": "depth",
    "num_assistant_tokens": "depth", "prompt_lookup_num_tokens": "max_draft", "gamma": "depth",
    "temperature": _GENERATED, "top_p": _GENERATED, "min_p": _GENERATED, "repetition_penalty": _GENERATED,
    "max_new_tokens": _GENERATED, "seed": _GENERATED, "stop": _GENERATED, "sampling": _GENERATED,
    "torch_dtype": "dtype", "device_map": "device", "model_id": "model", "model_name": "model", "path": "model",
}  # fmt: skip


def suggestion(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, to follow a colon in a message; empty if there is none."""
    names = [*known]
    elsewhere = _ELSEWHERE.get(name, "")
    if elsewhere in names:
        return f"it is {elsewhere} here."
    if elsewhere and not elsewhere.isidentifier():
        return f"{elsewhere}."
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def with_suggestions(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a call: an unknown argument raises an error that suggests what was meant.

    Raises (when called):
        ArgumentError: in place of Python's TypeError.
    """
    signature = inspect.signature(call)
    names = [name for name in signature.parameters if name != "self"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    title = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(call)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names and not open_ended:
                advice = suggestion(name, names) or f"it has {', '.join(names)}."
                raise ArgumentError(f"{title} has no argument {name}: {advice}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{title}: {error}. Its arguments: {', '.join(names)}.") from None
        return call(*args, **kwargs)

    return answered


T = TypeVar("T")


def class_with_suggestions(kind: type[T]) -> type[T]:
    """Decorator of a class: the same for its ``__init__``."""
    setattr(kind, "__init__", with_suggestions(kind.__init__))  # noqa: B010 - mypy knows no other way
    return kind


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number in a range.

    Raises:
        RequestError: the value is no whole number, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} must be {limits}, got {number}")
    return number


def check_number(name: str, value: Any) -> None:
    """Raises RequestError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number, got {value!r}")
