"""Settings of training runs: options (:mod:`longdraft.options`) that are read from YAML and ``key=value``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from longdraft.errors import ConfigError, values_checked
from longdraft.files import named, regular
from longdraft.options import Option, declared, number, option

Config = TypeVar("Config")


# Settings of earlier versions, and what became of them.
GONE = {"top": "The loss follows the target's whole distribution (distill): leave it out. "}
# Fields of a configuration that are no settings.
BESIDE = ("fields_set", "opener")

# The values that a setting takes, as attributes of its option.
POSITIVE = {"above": 0}
ONE_OR_MORE = {"least": 1}
ZERO_OR_MORE = {"least": 0}
SHARE = {"least": 0, "most": 1}
POSITIVE_SHARE = {"above": 0, "most": 1}
BETAS = {"least": 0, "below": 1, "size": 2}


def one_of(*words: str) -> dict[str, Any]:
    return {"choices": words}


def setting(default: Any, meaning: str, values: Mapping[str, Any] | None = None) -> Any:
    """A field of a configuration class.

    Args:
        meaning: for the help. values: None if every value of its type will do.
    """
    return option(default, help=meaning, **values or {})


def described(config: type[Any]) -> list[tuple[str, str, str, str]]:
    """Name, default, values and meaning of a configuration's settings: those that its class adds or redefines first."""
    added = inspect.get_annotations(config)
    known = sorted(declared(config).values(), key=lambda each: each.name not in added)
    return [(each.name, each.default_in_words or "none", each.range, each.help) for each in known]


def check(config: Any) -> None:
    """Raises ConfigError for a value outside its setting's range."""
    with values_checked(ConfigError):
        for name, each in declared(type(config)).items():
            each.check(getattr(config, name))


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
        known = declared(config)
        if unknown := sorted(map(str, set(values) - {*known})):
            close = get_close_matches(unknown[0], known, n=1)
            advice = GONE.get(unknown[0]) or (f"Did you mean {close[0]}? " if close else "")
            raise ConfigError(f"No setting {', '.join(unknown)}. {advice}Settings: {', '.join(sorted(known))}.")
        made: Any = config
        found: Config = made(**{n: _converted(known[n], v) for n, v in values.items()}, fields_set=tuple(values))
        return found


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


def _converted(each: Option, value: Any) -> Any:
    """YAML's value as the setting's kind, where it can be: YAML reads 5e-4 as text, 1e3 as a float, no as false."""
    if each.kind is tuple and value is not None:
        item = replace(each, kind=each.items)
        return tuple(_converted(item, one) for one in (value if isinstance(value, list) else [value]))
    if isinstance(value, bool):
        return "no" if "no" in each.choices and not value else value
    if each.kind is str:
        return value if value is None or isinstance(value, dict | list) else str(value)
    value = number(value) if isinstance(value, str) and each.kind in (int, float) else value
    if each.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return float(value) if each.kind is float and isinstance(value, int) and abs(value) < 2**53 else value
