"""Declares options of methods as fields of dataclasses, and checks options and other arguments.

Each option is a field::

    @dataclass(frozen=True)
    class LookupOptions(Options):
        lookup: bool = option(False, help="also propose tokens by suffix lookup")

Keyword arguments, ``-o name=value``, ``--help``, the page of options and error messages are derived from the fields.
A drafter class, or a function that builds a drafter, lists its dataclasses with :func:`takes`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, cached_property, partial
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_type_hints

from longdraft.errors import RequestError, UnknownMethodError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DRAFT_HELP = "the draft folder, or a small model's .gguf file"
_VALUE_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_TUPLE_NAMES = {int: "whole numbers", float: "numbers", str: "a list"}
# Attribute of an Option -> (the limit in words, the comparison that holds for allowed values).
_COMPARISONS = {
    "least": ("of at least", operator.ge), "above": ("above", operator.gt),
    "most": ("up to", operator.le), "below": ("below", operator.lt),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a method, or one setting of a training run.

    Attributes:
        kind: type of the value: int, float, bool, str, tuple or object (any).
        default: a value that is always allowed, such as None; ``...``: there is none.
        help: what the option does, in a few words.
        usual: the default in words, if it depends on other options.
        least, above, most, below: a number, or every item of a tuple, must be >=, >, <=, < this; None: no limit.
        choices: the allowed strings; empty: any.
        aliases: other accepted names.
        items: type of the items, if the value is a tuple.
        size: number of the items, if the value is a tuple; None: any number but 0.
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
    def range_in_words(self) -> str:
        """The allowed values, such as "a whole number of at least 1"."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}" if others else last
        is_tuple = self.kind is tuple
        noun = (_TUPLE_NAMES if is_tuple else _VALUE_NAMES).get(self.items if is_tuple else self.kind, "")
        limits = " and ".join(f"{words} {limit}" for words, _, limit in self._limits)
        return " ".join(filter(None, ("" if self.size is None else str(self.size), noun, limits)))

    @property
    def default_in_words(self) -> str:
        """The default as help texts show it; empty if there is none."""
        if self.usual or self.default in (None, ()):
            return self.usual
        if isinstance(self.default, tuple):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def check(self, value: Any, error_type: type[Exception] = ValueError) -> None:
        """Raises an error for a value that is not allowed. The default itself, such as None, is always allowed."""
        if value is not self.default and not self.allows(value):
            raise error_type(f"{self.name} must be {self.range_in_words}, got {value!r}")

    @cached_property
    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        """(the limit in words, the comparison, the limit) for each limit that is set."""
        limits = ((words, holds, getattr(self, name)) for name, (words, holds) in _COMPARISONS.items())
        return [(words, holds, limit) for words, holds, limit in limits if limit is not None]

    def allows(self, value: Any) -> bool:
        """Returns True for a value of the right type, finite and within the limits."""
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
        if kind in (bool, str) or isinstance(value, bool):  # a bool is an int in Python, but no number here
            return isinstance(value, kind) and kind not in (int, float)
        if not isinstance(value, Integral if kind is int else Real):
            return False
        finite = isinstance(value, Integral) or math.isfinite(value)
        return finite and all(holds(value, limit) for _, holds, limit in self._limits)


def parse_number(text: str) -> int | float | str:
    """Parses a number. Returns any other text unchanged."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def option(default: Any = None, *, help: str = "", min: float | None = None, **attributes: Any) -> Any:
    """Declares an option: makes a field of an :class:`Options` dataclass.

    Args:
        min: attribute ``least`` of the :class:`Option`.
        attributes: other attributes of the :class:`Option`, such as ``choices`` and ``aliases``.
    """
    return dataclasses.field(default=default, metadata={"help": help, "least": min, **attributes})


class Options:
    """Base class of dataclasses that declare options. The constructor raises ValueError for a wrong value."""

    def __post_init__(self) -> None:
        for name, declaration in declared(type(self)).items():
            declaration.check(getattr(self, name))

    def non_none(self) -> dict[str, Any]:
        """Returns the values that are not None, by option name."""
        values = {name: getattr(self, name) for name in declared(type(self))}
        return {name: value for name, value in values.items() if value is not None}


def declared(options_class: type[Any]) -> dict[str, Option]:
    """Returns the options that a dataclass declares, by name."""
    hashable: Any = options_class  # mypy does not know that classes are hashable
    return dict(_declared(hashable))


@cache
def _declared(options_class: Any) -> dict[str, Option]:
    annotations = get_type_hints(options_class)
    return {
        field.name: Option(field.name, default=field.default, **_types(annotations[field.name]), **field.metadata)
        for field in dataclasses.fields(options_class)
        if field.metadata  # :func:`option` has set it
    }


def _types(annotation: Any) -> dict[str, Any]:
    """Returns the attributes ``kind`` and ``items`` of an option, from the annotation without ``| None``."""
    union = get_args(annotation)
    types = [t for t in union if t is not type(None)] if type(None) in union else [annotation]
    kind = types[0] if len(types) == 1 else object
    if getattr(kind, "__origin__", None) is tuple:
        return {"kind": tuple, "items": get_args(kind)[0]}
    return {"kind": kind if kind in _VALUE_NAMES else object}


def takes(*options_classes: type[Options]) -> Callable[[F], F]:
    """Decorates a factory (a class or function that builds drafters or verifiers) with the options that it takes."""

    def mark(factory: F) -> F:
        factory.options = options_classes  # type: ignore[attr-defined]
        return factory

    return mark


class LazyImport:
    """A function or class that is imported when it is first used.

    Args:
        path: "module:name".
        defaults: keyword arguments of every call that does not name them.
    """

    def __init__(self, path: str, **defaults: Any) -> None:
        self._path, self._defaults = path, defaults

    @cached_property
    def target(self) -> Callable[..., Any]:
        """The function or class, with the defaults."""
        function: Callable[..., Any] = pkgutil.resolve_name(self._path)
        return partial(function, **self._defaults) if self._defaults else function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.target(*arguments, **options)


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """Returns a factory's options by name: those of :func:`takes`, and its keyword parameters with their defaults."""
    if isinstance(factory, LazyImport):
        factory = factory.target
    if isinstance(factory, partial):  # its keywords become defaults
        inner, keywords = options_of(factory.func), factory.keywords
        return {name: dataclasses.replace(o, default=keywords.get(name, o.default)) for name, o in inner.items()}
    options = {name: o for taken in getattr(factory, "options", ()) for name, o in declared(taken).items()}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and not name.startswith("_"):
            default = None if parameter.default is parameter.empty else parameter.default
            kind = type(default) if type(default) in _VALUE_NAMES else object
            options.setdefault(name, Option(name, kind, default, _DRAFT_HELP if name == "draft" else ""))
    return options


def listed(names: Iterable[str]) -> str:
    """Joins names with commas for a message; "none" if there are no names."""
    return ", ".join(names) or "none"


def checked(owner: str, options: Mapping[str, Any], allowed: Mapping[str, Option]) -> dict[str, Any]:
    """Checks values of options. Returns the values by the options' official names, which replace aliases.

    Args:
        owner: the method or command that has the options, for messages.
        options: {name or alias: value}.
        allowed: the options of ``owner`` by their official names.

    Raises:
        ValueError: an option is unknown or given under two names, or a value is not allowed.
    """
    official_names = {alias: o.name for o in allowed.values() for alias in o.aliases if alias not in allowed}
    for alias, official in official_names.items():
        if alias in options and official in options:
            raise ValueError(f"{alias} is another name of {official}: give one of them")
    values = {official_names.get(name, name): value for name, value in options.items()}
    for name, value in values.items():
        if name not in allowed:
            advice = suggestion(name, allowed) or f"it has {listed(allowed)}."
            raise ValueError(f"{owner} has no option {name}: {advice}")
        allowed[name].check(value)
    return values


def parse(owner: str, options: Mapping[str, Any], *options_classes: type[Options]) -> tuple[Any, ...]:
    """Makes an instance of each dataclass from those ``options`` that the dataclass declares; see :func:`checked`."""
    values = checked(owner, options, {name: o for c in options_classes for name, o in declared(c).items()})
    return tuple(c(**{name: value for name, value in values.items() if name in declared(c)}) for c in options_classes)


def unknown_option_error(name: str, default_options: Iterable[str], methods: Mapping[str, Iterable[str]]) -> ValueError:
    """Makes the error for an option that the user gave without a method, and that no default method has.

    Args:
        default_options: names of the options of the default methods.
        methods: {name of a method: names of the method's options}, for all methods.
    """
    owners = [method for method, options in methods.items() if name in options]
    advice = f"it is one of {', '.join(owners)}; name the method." if owners else ""
    advice = advice or suggestion(name, ["target", "tokenizer", *default_options]) or "no method has it."
    return ValueError(f"There is no option {name}: {advice}")


def find_method(methods: Mapping[str, T], name: str) -> T:
    """Returns the value of a method's name. Raises UnknownMethodError, which lists all names, for an unknown name."""
    try:
        return methods[name]
    except (KeyError, TypeError):
        advice = suggestion(name, methods) if isinstance(name, str) else ""
        raise UnknownMethodError(
            f"There is no method {name!r}{f': {advice}' if advice else '.'} Methods: {', '.join(methods)}. "
            "See `longdraft methods`."
        ) from None


# --- arguments of calls ---


def suggestion(name: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Returns "did you mean ...?" with the allowed name closest to an unknown name; empty if none is close."""
    matches = get_close_matches(name, [*allowed], n=1, cutoff=0.7)
    return f"did you mean {prefix}{matches[0]}?" if matches else ""


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns ``value`` as an int. Raises RequestError unless it is a whole number from ``least`` to ``most``."""
    Option(name, int, ..., least=least, most=most).check(value, RequestError)
    return int(value)
