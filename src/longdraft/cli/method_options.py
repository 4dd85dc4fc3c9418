"""Parses options of methods on the command line: ``-o name=value``, ``specpv:budget=512``, flags for drafts and trees.

Names, types and help come from the option dataclasses (:mod:`longdraft.options`). Importing the methods takes seconds,
so the options of the package's methods are read from catalogue.json, which ``python -m tests.options_page`` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from longdraft.cli import options
from longdraft.cli.options import OptionGroup, SettingError, settings_checked
from longdraft.cli.speculative_config import parse_speculative_config
from longdraft.options import Option, checked, declared, find_method, parse_number, unknown_option_error
from longdraft.trees.options import TreeOptions

Number = TypeVar("Number", int, float)

# Options that every method of a benchmark takes, in addition to its own. plan: adapt tree sizes, or keep them fixed.
SHARED_OPTIONS = ("plan", "kv_dtype", "prefill_window")
CATALOGUE = Path(__file__).with_name("catalogue.json")
_TYPES = {value_type.__name__: value_type for value_type in (int, float, bool, str, tuple, object)}


def _tree_flag(name: str, flag: str = "") -> Any:
    """Makes the flag of a tree option. ``flag``: the flag's name, if it differs from the option's."""
    tree_option = declared(TreeOptions)[name]  # the field ``usual`` is the default in words
    help_text = f"{tree_option.help[0].upper()}{tree_option.help[1:]}."
    return typer.Option(flag or f"--{name}", help=help_text, show_default=tree_option.usual)


@dataclass(frozen=True)
class DraftOptions(OptionGroup):
    """Options of the draft and its tree."""

    draft: Annotated[
        Path | None,
        typer.Option(
            help="Draft to use: a draft folder, a hub id, or a small model's .gguf file.",
            show_default="the one that ships for the model",
        ),
    ] = None
    tree: Annotated[str | None, _tree_flag("tree")] = None
    widths: Annotated[str | None, _tree_flag("widths")] = None
    nodes: Annotated[int | None, _tree_flag("nodes")] = None
    depth: Annotated[int | None, _tree_flag("depth")] = None
    tree_top_k: Annotated[int | None, _tree_flag("top_k", "--tree-top-k")] = None  # --top-k is sampling's
    threshold: Annotated[float | None, _tree_flag("threshold")] = None

    def options(self) -> dict[str, Any]:
        """Returns the flags that were set, as {option: value}. Raises SettingError for malformed widths."""
        values = {field.name.removeprefix("tree_"): getattr(self, field.name) for field in fields(self)}  # tree_top_k
        if self.widths is not None:
            values["widths"] = parse_ints("widths", self.widths)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(OptionGroup):
    """Options of the model, the draft, and decoding with any method."""

    draft_options: DraftOptions
    speculative_config: Annotated[
        str | None,
        typer.Option(help="vLLM's JSON object, in place of --method, --draft and tree options.", show_default="none"),
    ] = None
    plan: options.Plan = None
    model_options: options.ModelOptions
    offload: options.Offload = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Quantize the KV cache to int8 or int4 (float32 models on a CPU, models on a GPU), or bfloat16 (on a "
            "CPU). It takes less memory, but the text may differ from the model's own.",
            show_default="the model's dtype",
        ),
    ] = None
    prefill_window: Annotated[
        int | None,
        typer.Option(
            help="On a CPU, read long prompts faster: their tokens attend to the first 128 and to the last N tokens, "
            "only the last 512 and the answer to all. The text may differ from the model's own.",
            show_default="all tokens",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="On a GPU: exact methods equal plain decoding to the bit. Slower: forwards are padded to 64 tokens.",
        ),
    ] = False
    user_files: options.UserFiles = None  # Python files that --load has run already

    @property
    def speculator_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of Speculator, without the method's options."""
        return {
            name: getattr(self, name) for name in ("offload", "plan", "kv_dtype", "prefill_window", "deterministic")
        }

    @property
    def model_name(self) -> str:
        """Name of the model in messages, and its default name for clients."""
        return Path(self.model_options.name).name

    def resolve(self, method: str | None, pairs: Iterable[str] | None) -> tuple[str | None, dict[str, Any]]:
        """Returns the method (None: the model decides) and its options, from ``-o name=value``, flags and vLLM's JSON.

        Raises:
            SettingError: as :func:`parse_options`, or vLLM's JSON has no counterpart, or names another method.
            UnknownMethodError: the method is unknown.
        """
        flags = self.draft_options.options()
        if self.speculative_config is not None:
            with settings_checked():
                their_method, their_options = parse_speculative_config(self.speculative_config)
            if method not in (None, their_method):
                raise SettingError(f"--method {method} and --speculative-config name two methods: leave one out.")
            method, flags = their_method, their_options | flags
        return method, parse_options(method, pairs or (), flags)


def parse_options(method: str | None, pairs: Iterable[str], flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parses options: ``["branches=2"]`` -> ``{"branches": 2}``. Values are numbers, true, false, or text.

    Args:
        method: None: the model chooses the method later, so options of all methods that it may choose are accepted.
        pairs: options as ``name=value``.
        flags: further options, from flags such as --nodes.

    Raises:
        SettingError: a pair is not ``name=value``, an option is unknown, or a value is not valid for its option.
        UnknownMethodError: the method is unknown.
    """
    methods, default_methods = catalogue()
    candidates = {name: find_method(methods, name) for name in (default_methods if method is None else [method])}
    by_name = {name: option for declared_options in candidates.values() for name, option in declared_options.items()}
    by_name |= {alias: option for option in by_name.values() for alias in option.aliases if alias not in by_name}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--option takes name=value, not {pair!r}.")
        name = name.replace("-", "_")
        option = by_name.get(name, Option(name))  # an unknown name is reported below
        value = parse_ints(name, text) if option.kind is tuple else _parse_value(text)
        try:
            option.check(value)
        except ValueError as error:
            raise SettingError(f"--option {error}.") from None
        values[name] = value
    values |= flags or {}
    with settings_checked():
        if method is not None:
            checked(f"Method {method}", values, candidates[method])  # raises
        for name, value in values.items():
            if name not in by_name:
                raise unknown_option_error(name, by_name, methods)
            by_name[name].check(value)
    return values


def catalogue() -> tuple[Mapping[str, Mapping[str, Option]], tuple[str, ...]]:
    """Returns {method: {option name: option}}, and the default methods."""
    if methods_loaded():
        from longdraft.registry import DEFAULT_METHODS, METHODS

        return {name: method.options for name, method in METHODS.items()}, DEFAULT_METHODS
    content = _read_catalogue()
    # The catalogue has names of types instead of types.
    types = [{name: _TYPES[entry[name]] for name in ("kind", "items") if name in entry} for entry in content["options"]]
    all_options = [Option(**entry | kinds) for entry, kinds in zip(content["options"], types, strict=True)]
    methods = {name: [all_options[i] for i in indices] for name, indices in content["methods"].items()}
    options_by_method = {name: {option.name: option for option in chosen} for name, chosen in methods.items()}
    return options_by_method, tuple(content["defaults"])


def methods_loaded() -> bool:
    """True if the registry is imported. If it is not, no user-defined methods can exist."""
    return "longdraft.registry" in sys.modules


def train_commands() -> dict[str, str]:
    """Returns {command of ``longdraft train``: its summary}, for the commands that train a draft."""
    if methods_loaded():
        from longdraft.registry import KINDS

        trainings = {kind.name: kind.training for kind in KINDS.values()}
        return {t.command or name: t.summary for name, t in trainings.items() if t is not None}
    return dict(_read_catalogue()["trainings"])


@cache
def _read_catalogue() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return content


def parse_contenders(contenders: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parses the options of contenders such as ``specpv:budget=512:margin=8``. Returns {contender: options}."""
    options_by_contender = {}
    for contender in contenders:
        method, *pairs = contender.split(":")
        values = {key.strip(): _parse_value(value.strip()) for key, _, value in (pair.partition("=") for pair in pairs)}
        method_pairs = [pair for pair in pairs if pair.partition("=")[0].strip() not in SHARED_OPTIONS]
        if pairs:  # the benchmark's Settings check the shared options
            shared = {key: values[key] for key in SHARED_OPTIONS if key in values}
            options_by_contender[contender] = parse_options(method, method_pairs) | shared
    return options_by_contender


def _parse_value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), parse_number(text))


def split_commas(text: str) -> list[str]:
    """Returns the parts of a text between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_ints(name: str, text: str) -> tuple[int, ...]:
    """Parses whole numbers separated by commas. Raises SettingError, with the option's ``name`` in the message."""
    return _parse_numbers(name, text, int, "whole numbers")


def parse_floats(name: str, text: str) -> tuple[float, ...]:
    """Parses numbers separated by commas. Raises SettingError, with the option's ``name`` in the message."""
    return _parse_numbers(name, text, float, "numbers")


def _parse_numbers(name: str, text: str, parse: Callable[[str], Number], noun: str) -> tuple[Number, ...]:
    try:
        return tuple(parse(part) for part in split_commas(text))
    except ValueError:
        raise SettingError(f"{name} takes {noun} separated by commas, not {text!r}.") from None
