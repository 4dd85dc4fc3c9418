"""Options of methods: each is declared once, as a field of a dataclass, and everything else is derived from that.

    @dataclass(frozen=True)
    class LookupOptions(Options):
        lookup: bool = option(False, help="also propose tokens by suffix lookup")

Python keywords, ``-o name=value``, ``--help``, the tables of docs/methods.md and error messages come from these fields.
A drafter, or a function that builds one, lists its dataclasses in ``options`` (:func:`takes`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_type_hints

from longdraft.arguments import suggestion

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
    found: dict[str, Any] = {}
    for name, value in given.items():
        official = names.get(name, name)
        if official in found:
            raise ValueError(f"{name} is another name of {names.get(name) or name}: give one of them")
        found[official] = value
    return found


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
