"""Options of methods on the command line: ``-o name=value``, ``specpv:budget=512``, and flags for drafts and trees.

Names, kinds and help come from the option dataclasses (:mod:`longdraft.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from longdraft.cli.options import Group, SettingError
from longdraft.options import Option, declared
from longdraft.trees.options import TreeOptions

N = TypeVar("N", int, float)

# ``--top-k`` is of sampling.
_FLAGS = {"top_k": "tree_top_k"}
_TREE = declared(TreeOptions)


class DraftOptions(Group):
    """A draft and its tree."""

    def __init__(self, **given: Any) -> None:
        self._given = given
        self.draft: Path | None = given.get("draft")

    def options(self) -> dict[str, Any]:
        """The flags that were given, as options of a method.

        Raises:
            SettingError: widths that are no numbers.
        """
        names = {_FLAGS.get(name, name): name for name in ("draft", *_TREE)}
        found = {names[flag]: value for flag, value in self._given.items() if value is not None}
        if "widths" in found:
            found["widths"] = whole_numbers("widths", found["widths"])
        return found


def _parameter(name: str, kind: Any, help: str, default: str) -> Parameter:
    flag = typer.Option(f"--{name.replace('_', '-')}", help=f"{help[0].upper()}{help[1:]}.", show_default=default)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, flag])


def _parameters() -> Iterable[Parameter]:
    help = "draft folder, or a small model's .gguf file, for a method that needs one"
    yield _parameter("draft", Path, help, "the one that comes along")
    for name, each in _TREE.items():
        yield _parameter(_FLAGS.get(name, name), str if each.kind is tuple else each.kind, each.help, each.usual)


setattr(DraftOptions, "__signature__", Signature(list(_parameters())))  # noqa: B010 - what `spread` reads


def method_options(method: str | None, pairs: list[str]) -> dict[str, Any]:
    """``["branches=2"]`` -> ``{"branches": 2}``: numbers as numbers, true and false as such, the rest as text.

    Args:
        method: None if it is chosen for the model.

    Raises:
        SettingError: not ``name=value``, or a value that the option does not take.
        UnknownMethodError: no such method.
    """
    from longdraft.methods import DEFAULTS, METHODS, method_named

    candidates = [METHODS[name] for name in DEFAULTS] if method is None else [method_named(method)]
    known = {name: each for m in candidates for name, each in m.options.items()}
    known |= {alias: each for each in known.values() for alias in each.aliases if alias not in known}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--option takes name=value, not {pair!r}.")
        name = name.replace("-", "_")
        found[name] = _value(name, text, known.get(name, Option(name)))
    return found


def contender_options(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options behind the names of contenders such as ``specpv:budget=512:margin=8``, by contender."""
    split = {name: name.split(":") for name in names if ":" in name}
    return {name: method_options(method, pairs) for name, (method, *pairs) in split.items()}


def _value(name: str, text: str, option: Option) -> Any:
    """A value from its text, checked."""
    value = whole_numbers(name, text) if option.kind is tuple else _parsed(text)
    try:
        option.check(value)
    except ValueError as error:
        raise SettingError(f"--option {error}.") from None
    return value


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def words(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between. Raises SettingError, in which ``name`` says whose value it is."""
    return _numbers(name, text, int, "whole numbers")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between. Raises SettingError, in which ``name`` says whose value it is."""
    return _numbers(name, text, float, "numbers")


def _numbers(name: str, text: str, kind: Callable[[str], N], called: str) -> tuple[N, ...]:
    try:
        return tuple(kind(word) for word in words(text))
    except ValueError:
        raise SettingError(f"{name} takes {called} with commas between, not {text!r}.") from None
