"""Settings of training runs: each has its meaning and range in one place, which is checked and shown by ``--help``."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import yaml

from longdraft.errors import ConfigError
from longdraft.files import named, regular

Config = TypeVar("Config")


# Settings of earlier versions, and what became of them.
GONE = {"top": "The loss follows the target's whole distribution (distill): leave it out. "}
# Fields of a configuration that are no settings.
BESIDE = ("fields_set", "opener")


@dataclass(frozen=True)
class Range:
    """The values that a setting takes, in words for the help and for errors, and as a test."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Range("above 0", lambda x: x > 0)
ONE_OR_MORE = Range("1 or more", lambda x: x >= 1)
ZERO_OR_MORE = Range("0 or more", lambda x: x >= 0)
SHARE = Range("0 to 1", lambda x: 0 <= x <= 1)
POSITIVE_SHARE = Range("above 0, up to 1", lambda x: 0 < x <= 1)
BETAS = Range("two numbers, 0 to below 1", lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x))


def one_of(*words: str) -> Range:
    return Range(" or ".join((", ".join(words[:-1]), words[-1])), lambda x: x in words)


def setting(default: Any, meaning: str, values: Range | None = None) -> Any:
    """A field of a configuration class.

    Args:
        meaning: for the help. values: None if every value of its type will do.
    """
    return field(default=default, metadata={"meaning": meaning, "values": values})


class Described(NamedTuple):
    """A setting as the help shows it."""

    name: str
    default: str
    values: str
    meaning: str


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LISTS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "a list"}


def described(config: type[Any]) -> list[Described]:
    """The settings of a configuration class: those it adds or redefines, then those of its base class."""
    hints = get_type_hints(config)
    added = inspect.get_annotations(config)
    return [_describe(f, _kind(hints[f.name])) for f in sorted(_settings(config), key=lambda f: f.name not in added)]


def _describe(f: dataclasses.Field[Any], kind: Any) -> Described:
    allowed = f.metadata.get("values")
    if allowed is not None:
        values = f"whole, {allowed.text}" if kind is int else allowed.text
    else:
        values = _LISTS.get(get_args(kind)[0], "a list") if get_args(kind) else _KINDS.get(kind, "")
    if f.default in (None, ()):
        default = "none"
    elif isinstance(f.default, tuple):
        default = f"[{', '.join(map(str, f.default))}]"
    else:
        default = str(f.default).lower() if kind is bool else str(f.default)
    return Described(f.name, default, values, str(f.metadata.get("meaning", "")))


def check(config: Any) -> None:
    """Raises ConfigError for a value outside its setting's range."""
    for f in _settings(type(config)):
        allowed, value = f.metadata.get("values"), getattr(config, f.name)
        if allowed is not None and value is not None and not allowed.holds(value):
            raise ConfigError(f"{f.name} must be {allowed.text}, got {value}")


def _settings(config: type[Any]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(config) if f.name not in BESIDE]


def read_config(path: Path | str | None, overrides: Sequence[str], config: type[Config]) -> Config:
    """A configuration of class ``config``, from a YAML file and ``key=value`` overrides.

    Raises:
        ConfigError: an unreadable file, an unknown setting or a wrong value, which it names.
    """
    values = {} if path is None else _read_yaml(path)
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value.")
        try:
            values[key.strip()] = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError:
            values[key.strip()] = text.strip()  # a path with a colon or the like
    with named(path or ""):
        known = {f.name for f in _settings(config)}
        if unknown := sorted(map(str, set(values) - known)):
            close = get_close_matches(unknown[0], known, n=1)
            advice = f"Did you mean {close[0]}? " if close else GONE.get(unknown[0], "")
            raise ConfigError(f"No setting {', '.join(unknown)}. {advice}Settings: {', '.join(sorted(known))}.")
        hints = get_type_hints(config)
        converted = {name: _converted(name, value, hints[name]) for name, value in values.items()}
        make: Any = config
        made: Config = make(**converted, fields_set=tuple(values))
    return made


def _read_yaml(path: Path | str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(regular(Path(path)).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration {path}: check the path.") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: it takes lines of the form `key: value`.")
    return values


def _kind(hint: Any) -> Any:
    """A setting's type, without None."""
    return next(k for k in get_args(hint) if k is not type(None)) if type(None) in get_args(hint) else hint


def _converted(name: str, value: Any, hint: Any) -> Any:
    """YAML's value as the setting's type: YAML reads numbers like 5e-4 as text."""
    if value is None:
        if type(None) in get_args(hint):
            return None
        raise ConfigError(f"{name} needs a value.")
    kind = _kind(hint)
    if name == "precision" and value is False:
        value = "no"  # YAML reads a bare no as false
    try:
        if get_args(kind):  # tuple[str, ...], tuple[float, ...]
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict | list | bool) or item is None for item in items):
                raise ValueError(value)
            return tuple(get_args(kind)[0](item) for item in items)
        if isinstance(value, bool) != (kind is bool) or isinstance(value, dict | list):
            raise ValueError(value)
        number = float(value) if kind in (int, float) else 0.0
        if number != number or (kind is int and number != int(number)):
            raise ValueError(value)
        return int(number) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} takes {_KINDS.get(kind, 'a list of values')}, got {reprlib.repr(value)}.") from None
