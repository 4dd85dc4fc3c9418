"""Options of methods, declared once as fields of dataclasses, and checks of options and of calls' arguments.

Each option is a field::

    @dataclass(frozen=True)
    class LookupOptions(Options):
        lookup: bool = option(False, help="also propose tokens by suffix lookup")

Python keywords, ``-o name=value``, ``--help``, the page of options and error messages are derived from these fields.
A drafter class, or a function that builds a drafter, lists its dataclasses with :func:`takes`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_type_hints

from longdraft.errors import RequestError, UnknownMethodError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DRAFT = "the draft folder, or a small model's .gguf file"
_VALUE_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_TUPLE_NAMES = {int: "whole numbers", float: "numbers", str: "a list"}
# Attribute of an Option -> the limit in words, and how a value is compared with it.
_LIMITS = {
    "least": ("of at least", operator.ge), "above": ("above", operator.gt),
    "most": ("up to", operator.le), "below": ("below", operator.lt),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a method, or one setting of a training run.

    Attributes:
        kind: type of the value: int, float, bool, str, tuple or object (any).
        usual: the default in words, if it depends on other options.
        least, above, most, below: limits of a number or of a tuple's items (>=, >, <=, <); None: no limit.
        choices: the allowed strings; empty: any.
        aliases: other accepted names.
        items: type of a tuple's items.
        size: number of a tuple's items; None: any number.
    """

    name: str
    kind: type = object
    default: Any = None
    help: str = ""
    usual: str = ""
    least: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    above: float | None = None
    most: float | None = None
    below: float | None = None
    items: type = object
    size: int | None = None

    @property
    def range(self) -> str:
        """The allowed values in words: "a whole number of at least 1"."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}" if others else last
        is_tuple = self.kind is tuple
        noun = (_TUPLE_NAMES if is_tuple else _VALUE_NAMES).get(self.items if is_tuple else self.kind, "")
        limits = " and ".join(f"{words} {limit:g}" for words, _, limit in self._limits)
        return " ".join(filter(None, ("" if self.size is None else str(self.size), noun, limits)))

    @property
    def default_in_words(self) -> str:
        """The default as tables show it; empty if there is none."""
        if self.usual or self.default in (None, ()):
            return self.usual
        if isinstance(self.default, tuple):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def check(self, value: Any) -> None:
        """Raises ValueError for a value that is not allowed. The default itself, such as None, is always allowed."""
        if value is not self.default and not self._allows(value):
            raise ValueError(f"{self.name} must be {self.range}, got {value!r}")

    @property
    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        limits = ((*words, getattr(self, name)) for name, words in _LIMITS.items())
        return [(words, holds, limit) for words, holds, limit in limits if limit is not None]

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind is not tuple:
            return self._allows_item(self.kind, value)
        items = value if isinstance(value, tuple | list) else ()
        size_fits = bool(items) if self.size is None else len(items) == self.size
        return size_fits and all(self._allows_item(self.items, item) for item in items)

    def _allows_item(self, kind: type, value: Any) -> bool:
        if kind not in _VALUE_NAMES:
            return True
        if kind in (bool, str) or isinstance(value, bool):
            return isinstance(value, kind) and kind not in (int, float)
        if not isinstance(value, Integral if kind is int else Real):
            return False
        finite = isinstance(value, Integral) or math.isfinite(value)
        return finite and all(holds(value, limit) for _, holds, limit in self._limits)


def number(text: str) -> int | float | str:
    """Parses a number; any other text is returned unchanged."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def option(default: Any = None, *, help: str, min: float | None = None, **attributes: Any) -> Any:
    """A field of an :class:`Options` dataclass.

    Args:
        min: ``least`` of the :class:`Option`.
        attributes: other attributes of the :class:`Option`, such as ``choices`` and ``aliases``.
    """
    return dataclasses.field(default=default, metadata={"help": help, "least": min, **attributes})


class Options:
    """Base class of the dataclasses that declare options. The constructor raises ValueError for a wrong value."""

    def __post_init__(self) -> None:
        for name, declaration in declared(type(self)).items():
            declaration.check(getattr(self, name))

    def non_none(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        values = {name: getattr(self, name) for name in declared(type(self))}
        return {name: value for name, value in values.items() if value is not None}


def declared(group: type[Any]) -> dict[str, Option]:
    """The options that a dataclass declares, by name."""
    hashable: Any = group  # mypy does not know that classes are hashable
    return dict(_declared(hashable))


@cache
def _declared(group: Any) -> dict[str, Option]:
    hints = get_type_hints(group)
    return {
        f.name: Option(f.name, default=f.default, **_kinds(hints[f.name]), **f.metadata)
        for f in dataclasses.fields(group)
        if f.metadata
    }


def _kinds(hint: Any) -> dict[str, Any]:
    """``kind`` and ``items`` of an option, from its annotation without ``| None``."""
    types = [t for t in get_args(hint) if t is not type(None)] if type(None) in get_args(hint) else [hint]
    kind = types[0] if len(types) == 1 else object
    if getattr(kind, "__origin__", None) is tuple:
        return {"kind": tuple, "items": get_args(kind)[0]}
    return {"kind": kind if kind in _VALUE_NAMES else object}


def takes(*groups: type[Options]) -> Callable[[F], F]:
    """Decorator of a class or function that builds drafters or verifiers: it sets the attribute ``options``."""

    def mark(factory: F) -> F:
        factory.options = groups  # type: ignore[attr-defined]
        return factory

    return mark


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The options of a factory by name: the fields of its dataclasses in ``options``, and its keyword parameters.
    Keywords of a :func:`functools.partial` become defaults."""
    if isinstance(factory, partial):
        inner, keywords = options_of(factory.func), factory.keywords
        return {name: dataclasses.replace(o, default=keywords.get(name, o.default)) for name, o in inner.items()}
    options = {name: o for group in getattr(factory, "options", ()) for name, o in declared(group).items()}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and not name.startswith("_"):
            default = None if parameter.default is parameter.empty else parameter.default
            kind = type(default) if type(default) in _VALUE_NAMES else object
            options.setdefault(name, Option(name, kind, default, _DRAFT if name == "draft" else ""))
    return options


def listed(names: Iterable[str]) -> str:
    """Joins names with commas for a message; "none" if there are no names."""
    return ", ".join(names) or "none"


def checked(owner: str, options: Mapping[str, Any], allowed: Mapping[str, Option]) -> dict[str, Any]:
    """Checks options, and returns them with official names in place of aliases.

    Args:
        owner: the method or command that has the options, for messages.
        options: name or alias -> value.
        allowed: the options of ``owner`` by their official names.

    Raises:
        ValueError: an unknown option, two names of one option, or a value that is not allowed.
    """
    names = {alias: o.name for o in allowed.values() for alias in o.aliases if alias not in allowed}
    for alias, official in names.items():
        if alias in options and official in options:
            raise ValueError(f"{alias} is another name of {official}: give one of them")
    values = {names.get(name, name): value for name, value in options.items()}
    for name, value in values.items():
        if name not in allowed:
            advice = suggestion(name, allowed) or f"it has {listed(allowed)}."
            raise ValueError(f"{owner} has no option {name}: {advice}")
        allowed[name].check(value)
    return values


def parse(owner: str, options: Mapping[str, Any], *groups: type[Options]) -> tuple[Any, ...]:
    """Makes an instance of each dataclass from its share of ``options``. Arguments and errors: see :func:`checked`."""
    values = checked(owner, options, {name: o for group in groups for name, o in declared(group).items()})
    return tuple(group(**{n: v for n, v in values.items() if n in declared(group)}) for group in groups)


def no_option(name: str, default_options: Iterable[str], methods: Mapping[str, Iterable[str]]) -> ValueError:
    """Makes the error for an option that none of the default methods has.

    Args:
        default_options: the options of the default methods.
        methods: name of each method -> its options.
    """
    owners = [method for method, options in methods.items() if name in options]
    advice = f"it is one of {', '.join(owners)}; name the method." if owners else ""
    advice = advice or suggestion(name, ["target", "tokenizer", *default_options]) or "no method has it."
    return ValueError(f"There is no option {name}: {advice}")


def method_in(methods: Mapping[str, T], name: str) -> T:
    """Looks up a method's entry. Raises UnknownMethodError, which lists all names, for an unknown name."""
    try:
        return methods[name]
    except (KeyError, TypeError):
        advice = suggestion(name, methods) if isinstance(name, str) else ""
        raise UnknownMethodError(
            f"There is no method {name!r}{f': {advice}' if advice else '.'} Methods: {', '.join(methods)}. "
            "See `longdraft methods`."
        ) from None


# --- arguments of calls ---


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the allowed name closest to it. Empty if none is close."""
    matches = get_close_matches(name, [*allowed], n=1, cutoff=0.7)
    return f"did you mean {matches[0]}?" if matches else ""


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns a whole number as an int. Raises RequestError if it is none, or not from ``least`` to ``most``."""
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
