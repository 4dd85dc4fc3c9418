"""Options of methods on the command line: ``-o name=value``, ``specpv:budget=512``, and flags for drafts and trees.

Names, kinds and help come from the option dataclasses (:mod:`longdraft.options`). Loading the methods takes seconds, so
those of the package are looked up in a file, which ``python -m tests.options_page`` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from longdraft.cli import options
from longdraft.cli.options import OptionGroup, SettingError, settings_checked
from longdraft.options import Option, checked, declared, method_in, no_option, number
from longdraft.trees.options import TreeOptions

N = TypeVar("N", int, float)

# What each contender may have beside its method's options.
SHARED_OPTIONS = ("plan", "kv_dtype")
CATALOGUE = Path(__file__).with_name("catalogue.json")
_KINDS = {kind.__name__: kind for kind in (int, float, bool, str, tuple, object)}


def _tree(name: str, flag: str = "") -> Any:
    """The flag of an option of trees."""
    each = declared(TreeOptions)[name]
    return typer.Option(flag or f"--{name}", help=f"{each.help[0].upper()}{each.help[1:]}.", show_default=each.usual)


@dataclass(frozen=True)
class DraftOptions(OptionGroup):
    """A draft and its tree."""

    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            help="Draft folder, hub id, or a small model's .gguf file, for a method that needs one.",
            show_default="the one that comes along",
        ),
    ] = None
    tree: Annotated[str | None, _tree("tree")] = None
    widths: Annotated[str | None, _tree("widths")] = None
    nodes: Annotated[int | None, _tree("nodes")] = None
    depth: Annotated[int | None, _tree("depth")] = None
    tree_top_k: Annotated[int | None, _tree("top_k", "--tree-top-k")] = None  # --top-k is of sampling
    threshold: Annotated[float | None, _tree("threshold")] = None

    def options(self) -> dict[str, Any]:
        """The flags that were given, as options of a method.

        Raises:
            SettingError: widths that are no numbers.
        """
        given = {each.name.removeprefix("tree_"): getattr(self, each.name) for each in fields(self)}
        if self.widths is not None:
            given["widths"] = parse_ints("widths", self.widths)
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(OptionGroup):
    """The model, and how it is decoded by whichever method."""

    draft_options: DraftOptions
    plan: options.Plan = None
    model_options: options.ModelOptions
    offload: options.Offload = None
    kv_dtype: options.KVDtype = None
    deterministic: options.Deterministic = False
    user_files: options.Load = None

    @property
    def speculator_kwargs(self) -> dict[str, Any]:
        """Arguments of Speculator that are no method's own."""
        return {name: getattr(self, name) for name in ("offload", "plan", "kv_dtype", "deterministic")}

    @property
    def model_name(self) -> str:
        """The name that clients and people call the model by, if they are told no other."""
        return Path(self.model_options.name).name

    def resolve_options(self, method: str | None, pairs: Iterable[str] | None) -> dict[str, Any]:
        """The options of a method, those of its draft and tree among them; for errors, see :func:`method_options`."""
        return method_options(method, pairs or (), self.draft_options.options())

    def with_threads(self, threads: int) -> DecodingOptions:
        """The same with so many threads, where none were asked for."""
        return replace(self, model_options=replace(self.model_options, threads=self.model_options.threads or threads))


def method_options(method: str | None, pairs: Iterable[str], flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``["branches=2"]`` -> ``{"branches": 2}``: numbers as numbers, true and false as such, the rest as text.

    Args:
        method: None if it is chosen for the model.
        flags: options that were given otherwise.

    Raises:
        SettingError: not ``name=value``, an option that there is not, or a value that it does not take.
        UnknownMethodError: no such method.
    """
    methods, defaults = catalogue()
    candidates = {name: method_in(methods, name) for name in (defaults if method is None else [method])}
    known = {name: each for own in candidates.values() for name, each in own.items()}
    known |= {alias: each for each in known.values() for alias in each.aliases if alias not in known}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--option takes name=value, not {pair!r}.")
        name = name.replace("-", "_")
        each = known.get(name, Option(name))
        value = parse_ints(name, text) if each.kind is tuple else _parsed(text)
        try:
            each.check(value)
        except ValueError as error:
            raise SettingError(f"--option {error}.") from None
        found[name] = value
    found |= flags or {}
    with settings_checked():
        if method is not None:
            checked(f"Method {method}", found, candidates[method])
        for name, value in found.items():
            if name not in known:
                raise no_option(name, known, methods)
            known[name].check(value)
    return found


def catalogue() -> tuple[Mapping[str, Mapping[str, Option]], tuple[str, ...]]:
    """The options of each method by name, and the methods that are chosen by default."""
    if methods_loaded():
        from longdraft.methods import DEFAULT_METHODS, METHODS

        return {name: method.options for name, method in METHODS.items()}, DEFAULT_METHODS
    kept = _kept()
    known = [_option(each) for each in kept["options"]]
    found = {name: {known[i].name: known[i] for i in own} for name, own in kept["methods"].items()}
    return found, tuple(kept["defaults"])


def methods_loaded() -> bool:
    """True if there may be others than the package's: a file of the user may make some."""
    return "longdraft.methods" in sys.modules


def train_commands() -> dict[str, str]:
    """The commands of ``longdraft train``, each with its summary."""
    if methods_loaded():
        from longdraft.drafts.kinds import KINDS

        found = {kind.name: kind.training for kind in KINDS.values()}
        return {each.command or name: each.summary for name, each in found.items() if each is not None}
    return dict(_kept()["trainings"])


@cache
def _kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found


def _option(kept: Mapping[str, Any]) -> Option:
    values: dict[str, Any] = {name: _KINDS[each] if name in ("kind", "items") else each for name, each in kept.items()}
    return Option(**values)


def contender_options(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options behind the names of contenders such as ``specpv:budget=512:margin=8``, by contender; ``plan`` and
    ``kv_dtype`` are any contender's."""
    found = {}
    for name in names:
        method, *pairs = name.split(":")
        beside = {key.strip(): _parsed(value.strip()) for key, _, value in (pair.partition("=") for pair in pairs)}
        own = [pair for pair in pairs if pair.partition("=")[0].strip() not in SHARED_OPTIONS]
        if pairs:
            found[name] = method_options(method, own) | {key: beside[key] for key in SHARED_OPTIONS if key in beside}
    return found


def _parsed(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), number(text))


def split_commas(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_ints(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between. Raises SettingError, in which ``model_name`` says whose value it is."""
    return _numbers(name, text, int, "whole numbers")


def parse_floats(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between. Raises SettingError, in which ``model_name`` says whose value it is."""
    return _numbers(name, text, float, "numbers")


def _numbers(name: str, text: str, kind: Callable[[str], N], called: str) -> tuple[N, ...]:
    try:
        return tuple(kind(word) for word in split_commas(text))
    except ValueError:
        raise SettingError(f"{name} takes {called} with commas between, not {text!r}.") from None
