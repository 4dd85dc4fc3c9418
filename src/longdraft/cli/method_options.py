"""Options of methods on the command line: ``-o name=value``, ``specpv:budget=512``, and flags for drafts and trees.

Names, types and help come from the option dataclasses (:mod:`longdraft.options`). Importing the methods takes seconds,
so the options of the package's methods are read from a file, which ``python -m tests.options_page`` writes.
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

# Options that every contender of a benchmark takes beside its method's.
SHARED_OPTIONS = ("plan", "kv_dtype")
CATALOGUE = Path(__file__).with_name("catalogue.json")
_KINDS = {kind.__name__: kind for kind in (int, float, bool, str, tuple, object)}


def _tree(name: str, flag: str = "") -> Any:
    """The flag of a tree option."""
    tree_option = declared(TreeOptions)[name]
    help_text = f"{tree_option.help[0].upper()}{tree_option.help[1:]}."
    return typer.Option(flag or f"--{name}", help=help_text, show_default=tree_option.usual)


@dataclass(frozen=True)
class DraftOptions(OptionGroup):
    """Options of a draft and its tree."""

    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            help="Draft to use: a draft folder, a hub id, or a small model's .gguf file.",
            show_default="the one that ships for the model",
        ),
    ] = None
    tree: Annotated[str | None, _tree("tree")] = None
    widths: Annotated[str | None, _tree("widths")] = None
    nodes: Annotated[int | None, _tree("nodes")] = None
    depth: Annotated[int | None, _tree("depth")] = None
    tree_top_k: Annotated[int | None, _tree("top_k", "--tree-top-k")] = None  # --top-k is an option of sampling
    threshold: Annotated[float | None, _tree("threshold")] = None

    def options(self) -> dict[str, Any]:
        """The flags that were set, as options of a method. Raises SettingError for widths that are no numbers."""
        values = {field.name.removeprefix("tree_"): getattr(self, field.name) for field in fields(self)}
        if self.widths is not None:
            values["widths"] = parse_ints("widths", self.widths)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(OptionGroup):
    """Options of the model, the draft, and decoding with any method."""

    draft_options: DraftOptions
    plan: options.Plan = None
    model_options: options.ModelOptions
    offload: options.Offload = None
    kv_dtype: options.KVDtype = None
    deterministic: options.Deterministic = False
    user_files: options.Load = None

    @property
    def speculator_kwargs(self) -> dict[str, Any]:
        """Arguments of Speculator beside the method's options."""
        return {name: getattr(self, name) for name in ("offload", "plan", "kv_dtype", "deterministic")}

    @property
    def model_name(self) -> str:
        """The default name of the model for clients and in messages."""
        return Path(self.model_options.name).name

    def resolve_options(self, method: str | None, pairs: Iterable[str] | None) -> dict[str, Any]:
        """The method's options from ``-o name=value`` and from flags. Raises as :func:`method_options`."""
        return method_options(method, pairs or (), self.draft_options.options())

    def with_threads(self, threads: int) -> DecodingOptions:
        """A copy with a number of threads, unless --threads was set."""
        return replace(self, model_options=replace(self.model_options, threads=self.model_options.threads or threads))


def method_options(method: str | None, pairs: Iterable[str], flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parses options: ``["branches=2"]`` -> ``{"branches": 2}``. Values are numbers, true, false, or text.

    Args:
        method: None if the model decides about it.
        flags: options from flags.

    Raises:
        SettingError: a word that is not ``name=value``, an unknown option, or a value that it does not take.
        UnknownMethodError: the method is unknown.
    """
    methods, defaults = catalogue()
    candidates = {name: method_in(methods, name) for name in (defaults if method is None else [method])}
    known = {name: option for declared_options in candidates.values() for name, option in declared_options.items()}
    known |= {alias: option for option in known.values() for alias in option.aliases if alias not in known}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--option takes name=value, not {pair!r}.")
        name = name.replace("-", "_")
        option = known.get(name, Option(name))
        value = parse_ints(name, text) if option.kind is tuple else _parse_value(text)
        try:
            option.check(value)
        except ValueError as error:
            raise SettingError(f"--option {error}.") from None
        values[name] = value
    values |= flags or {}
    with settings_checked():
        if method is not None:
            checked(f"Method {method}", values, candidates[method])
        for name, value in values.items():
            if name not in known:
                raise no_option(name, known, methods)
            known[name].check(value)
    return values


def catalogue() -> tuple[Mapping[str, Mapping[str, Option]], tuple[str, ...]]:
    """Returns the options of each method, and the default methods."""
    if methods_loaded():
        from longdraft.methods import DEFAULT_METHODS, METHODS

        return {name: method.options for name, method in METHODS.items()}, DEFAULT_METHODS
    content = _read_catalogue()
    known = [_option(entry) for entry in content["options"]]
    methods = {name: {known[i].name: known[i] for i in indices} for name, indices in content["methods"].items()}
    return methods, tuple(content["defaults"])


def methods_loaded() -> bool:
    """True if the catalogue of methods is imported. Only then may there be methods of the user."""
    return "longdraft.methods" in sys.modules


def train_commands() -> dict[str, str]:
    """The commands of ``longdraft train`` -> their summaries."""
    if methods_loaded():
        from longdraft.drafts.kinds import KINDS

        trainings = {kind.name: kind.training for kind in KINDS.values()}
        return {t.command or name: t.summary for name, t in trainings.items() if t is not None}
    return dict(_read_catalogue()["trainings"])


@cache
def _read_catalogue() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return content


def _option(entry: Mapping[str, Any]) -> Option:
    kinds = {name: _KINDS[entry[name]] for name in ("kind", "items") if name in entry}
    values: dict[str, Any] = {**entry, **kinds}
    return Option(**values)


def contender_options(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parses the options in contenders' names such as ``specpv:budget=512:margin=8``: name -> options."""
    options_by_name = {}
    for name in names:
        method, *pairs = name.split(":")
        values = {key.strip(): _parse_value(value.strip()) for key, _, value in (pair.partition("=") for pair in pairs)}
        own = [pair for pair in pairs if pair.partition("=")[0].strip() not in SHARED_OPTIONS]
        if pairs:
            shared = {key: values[key] for key in SHARED_OPTIONS if key in values}
            options_by_name[name] = method_options(method, own) | shared
    return options_by_name


def _parse_value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), number(text))


def split_commas(text: str) -> list[str]:
    """The non-empty parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_ints(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas. Raises SettingError; ``name`` is the option in its message."""
    return _parse_numbers(name, text, int, "whole numbers")


def parse_floats(name: str, text: str) -> tuple[float, ...]:
    """Numbers separated by commas. Raises SettingError; ``name`` is the option in its message."""
    return _parse_numbers(name, text, float, "numbers")


def _parse_numbers(name: str, text: str, kind: Callable[[str], N], kind_name: str) -> tuple[N, ...]:
    try:
        return tuple(kind(part) for part in split_commas(text))
    except ValueError:
        raise SettingError(f"{name} takes {kind_name} separated by commas, not {text!r}.") from None
