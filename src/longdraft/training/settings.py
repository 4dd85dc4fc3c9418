"""What a setting of a training run is: its meaning and range, stated once, checked, and shown by ``--help``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import yaml

from longdraft.errors import ConfigError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Range:
    """Which values a setting takes.

    Attributes:
        shown: in the help. must: what an error says. right: whether a value lies in it.
    """

    shown: str
    must: str
    right: Callable[[Any], bool]


POSITIVE = Range("above 0", "must be positive", lambda x: x > 0)
COUNT = Range("1 or more", "must be positive", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", "must not be negative", lambda x: x >= 0)
SHARE = Range("0 to 1", "is a share between 0 and 1", lambda x: 0 <= x <= 1)
PART = Range("above 0, up to 1", "is a share above 0, up to 1", lambda x: 0 < x <= 1)
STRETCH = Range("1 or more", "stretches, so it is at least 1", lambda x: x >= 1)
BETAS = Range(
    "two, 0 to below 1", "are two numbers from 0 to below 1", lambda x: len(x) == 2 and all(0 <= b < 1 for b in x)
)


def words(*allowed: str) -> Range:
    """One of several words."""
    said = " or ".join((", ".join(allowed[:-1]), allowed[-1]))
    return Range(said, f"is {said}", lambda x: x in allowed)


def setting(default: Any, meaning: str, values: Range | None = None) -> Any:
    """A field of a configuration.

    Args:
        meaning: for the help. values: None where any of its type will do.
    """
    return field(default=default, metadata={"meaning": meaning, "values": values})


class Described(NamedTuple):
    """A setting as the help shows it: all as text."""

    name: str
    default: str
    values: str
    meaning: str


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LISTS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "a list"}


def described(kind: type[Any]) -> list[Described]:
    """The settings of a configuration class, its own before those of the class that it is derived from."""
    hints = get_type_hints(kind)
    own = inspect.get_annotations(kind)
    found = []
    for f in sorted(_settings(kind), key=lambda f: f.name not in own):
        values, bare = f.metadata.get("values"), _kind(hints[f.name])
        said = _LISTS.get(get_args(bare)[0], "a list") if get_args(bare) else _KINDS.get(bare, "")
        if values is not None:
            said = f"whole, {values.shown}" if bare is int else values.shown
        default = str(f.default)
        if isinstance(f.default, bool):
            default = default.lower()
        elif isinstance(f.default, tuple) and f.default:
            default = f"[{', '.join(map(str, f.default))}]"
        elif f.default in (None, ()):
            default = "none"
        found.append(Described(f.name, default, said, str(f.metadata.get("meaning", ""))))
    return found


def check(config: Any) -> None:
    """Raises ConfigError for a value outside its setting's range."""
    for f in _settings(type(config)):
        values, value = f.metadata.get("values"), getattr(config, f.name)
        if values is not None and value is not None and not values.right(value):
            raise ConfigError(f"{f.name} {values.must}, got {value}")


def _settings(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if f.name != "fields_set"]


def read_config(
    path: Path | str | None,
    overrides: Sequence[str],
    kind: type[Config],
) -> Config:
    """A configuration from a YAML file and ``key=value`` overrides.

    Args:
        kind: of the run that it is for.

    Raises:
        ConfigError: naming the file or the word, and the keys there are.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no configuration {path}: check the path.") from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds no settings: it takes lines of the form `key: value`.")
        values.update(loaded)
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value.")
        try:
            values[key.strip()] = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError:
            values[key.strip()] = text.strip()  # a path with a colon or the like
    known = {f.name for f in _settings(kind)}
    if unknown := sorted(map(str, set(values) - known)):
        close = get_close_matches(unknown[0], known, n=1)
        advice = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"No setting {', '.join(unknown)}. {advice}Settings: {', '.join(sorted(known))}.")
    hints = get_type_hints(kind)
    converted = {name: _converted(name, value, hints[name]) for name, value in values.items()}
    make: Any = kind
    made: Config = make(**converted, fields_set=tuple(values))
    return made


def _kind(hint: Any) -> Any:
    """A setting's type, without None."""
    return next(k for k in get_args(hint) if k is not type(None)) if type(None) in get_args(hint) else hint


def _converted(name: str, value: Any, hint: Any) -> Any:
    """YAML's value as the setting's type: numbers written like 5e-4 are strings to YAML."""
    if value is None:
        if type(None) in get_args(hint):
            return None
        raise ConfigError(f"{name} needs a value.")
    kind = _kind(hint)
    if name == "precision" and value is False:
        value = "no"  # which is how YAML reads it
    try:
        if get_args(kind):  # tuple[str, ...], tuple[float, ...]
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict | list | bool) or item is None for item in items):
                raise ValueError(value)
            return tuple(get_args(kind)[0](item) for item in items)
        if isinstance(value, bool) != (kind is bool) or isinstance(value, dict | list):
            raise ValueError(value)
        if kind is int and float(value) != int(float(value)):
            raise ValueError(value)
        if kind is float and float(value) != float(value):
            raise ValueError(value)
        return kind(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} takes {_KINDS.get(kind, 'a list of values')}, got {value!r}.") from None
