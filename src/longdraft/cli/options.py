"""Options that several verbs share, and what is wrong with their values."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

import longdraft
from longdraft import huge_pages
from longdraft.cli import console, processes
from longdraft.errors import LongdraftError, values_checked
from longdraft.memory import memory_info
from longdraft.model.embedded import EMBEDDED_ID

if TYPE_CHECKING:
    from longdraft.model.checkpoints import Progress

# Panel of ``--help`` -> the parameters of all verbs that it shows. Others come first.
_PANELS = {
    "Sampling": (
        "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "foresee", "stop", "raw",
        "system", "think",
    ),
    "Draft and tree": ("draft", "option", "plan", "tree", "depth", "nodes", "widths", "tree_top_k", "threshold"),
    "Model and memory": (
        "dtype", "device", "weights", "arithmetic", "rope_factor", "threads", "offload", "kv_dtype",
        "deterministic", "kv_cache", "prefix_gib", "snapshots", "snapshot_gib",
    ),
    "Limits": ("queue", "timeout", "max_body", "allow_host", "allow_origin"),
    "Ray": ("ray", "replicas", "ray_config"),
    "Data": ("short", "limit", "preface", "split", "column"),
    "Everything else": ("load", "composed", "debug", "profile"),
}  # fmt: skip


class SettingError(LongdraftError, ValueError):
    """A value on the command line cannot be used."""


_debug = False


def debugging() -> bool:
    """True if ``--debug`` was given."""
    return _debug


def set_debug(value: bool) -> bool:
    """Turns tracebacks and log lines on, and returns the value; a later option that was not given turns nothing off."""
    global _debug
    if value:
        _debug = True
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    return value


def reset_debug() -> None:
    """Turns debugging off, as at the start of a process."""
    global _debug
    _debug = False


def run_user_files(paths: list[Path] | None) -> list[Path] | None:
    """Runs the user's own Python files, which make methods (``longdraft.compose``) and kinds (``longdraft.register``).

    Returns:
        The paths, which other processes run too.

    Raises:
        SettingError: one that is not there or fails.
    """
    for path in paths or []:
        try:
            runpy.run_path(str(path))
        except Exception as error:  # whatever the user's own code raises
            raise SettingError(f"--load {path}: {type(error).__name__}: {error}") from error
    return paths


Load = Annotated[
    list[Path] | None,
    typer.Option(
        "--load",
        callback=run_user_files,
        is_eager=True,
        help="Run a Python file first, which makes methods with longdraft.compose or kinds of drafts with "
        "longdraft.register; repeatable.",
        show_default="none",
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Show log lines and full tracebacks.")
]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object as the last line of stdout.")]
Offload = Annotated[
    str | None,
    typer.Option(
        "--offload",
        help="Keep the KV cache of a model on a GPU in the host's memory: host (the GPU keeps the layers that fit) or "
        "host:N (it keeps N).",
        show_default="nowhere else",
    ),
]
KVDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="Round the KV cache to bfloat16 or int8: fewer bytes to read and to hold, and a text that is nearly the "
        "model's own (float32 on a CPU; int8 on a GPU).",
        show_default="not rounded",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU: plain decoding and every exact method agree to the bit. Slower, as each forward has 64 rows.",
    ),
]
Foresee = Annotated[
    bool,
    typer.Option(
        "--foresee/--no-foresee",
        help="At temperatures above 0, let drafts know the random numbers of coming samples; the papers' do not.",
    ),
]


def _method_names(incomplete: str) -> list[str]:
    from longdraft.cli.method_options import catalogue

    return [name for name in catalogue()[0] if name.startswith(incomplete)]


Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        autocompletion=_method_names,
        help="How to decode; see `longdraft methods`.",
        show_default="the first of self, longspec and prompt-lookup that suits the model",
    ),
]
MethodOptionPairs = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="An option of the method, name=value; repeatable.")
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="auto: trees as large as pays on this machine, or none; fixed: the method's own.",
        show_default="auto, fixed where a tree is asked for",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N or mps.", show_default="the best there is")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Of the CPU; fewer where it does something else too.", show_default="all cores"),
]


class OptionGroup:
    """Options that belong together. A verb, or another group, takes them as one parameter: :func:`expand_groups`."""


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """Output beside the text for people."""

    as_json: Json = False
    debug: Debug = False

    def print_json(self, found: Any) -> None:
        """Prints the object where it is asked for."""
        if self.as_json:
            console.print_line(json.dumps(found))


@dataclass(frozen=True)
class TemplateOptions(OptionGroup):
    """Arguments of the chat template beside the prompt."""

    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None
    think: Annotated[
        bool, typer.Option("--think/--no-think", help="Let a model that thinks before it answers do so (Qwen3).")
    ] = True

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the template itself; only those that differ from the default."""
        return {} if self.think else {"enable_thinking": False}

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of ``chat_prompt``; only those that differ from the default."""
        return self.template_kwargs if self.system is None else {"system": self.system, **self.template_kwargs}


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """The model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A Hugging Face id, a folder or a .gguf file.", show_default="embedded SmolLM2"
        ),
    ] = None
    dtype: Dtype = "auto"
    device: Device = None
    weights: Annotated[
        Literal["stored", "float32"] | None,
        typer.Option(
            help="stored: compute with the file's own blocks or halves; float32: unpack them.",
            show_default="stored, where this processor has kernels for it",
        ),
    ] = None
    arithmetic: Annotated[
        Literal["int8", "float32"] | None,
        typer.Option(
            help="int8: round what meets stored weights to 8 bits and multiply whole numbers; float32: round nothing.",
            show_default="int8 for GGUF files in 8 bits or fewer, on a CPU",
        ),
    ] = None
    rope_factor: Annotated[
        float | None, typer.Option("--rope-factor", help="Stretch the model's context this many times (YaRN).")
    ] = None
    threads: Threads = None

    @property
    def name(self) -> str:
        """The model as the user named it, or the embedded one."""
        return self.model or EMBEDDED_ID

    @property
    def uses_gpu(self) -> bool:
        """True if the model goes to a GPU: the one asked for, or by default any this machine has."""
        import torch

        return torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")

    def preload(self) -> None:
        """Begins what :meth:`load` needs, in the background: torch and transformers take three seconds to import."""
        floats = "float32" in (self.weights, self.arithmetic) or self.dtype not in ("auto", "float32")
        if self.device in (None, "cpu") and not floats:
            huge_pages.prefault(self.model, memory_info.available_host_bytes())

    def load(self, progress: Progress) -> longdraft.LoadedModel:
        """The model, and what its texts are made of."""
        self.preload()
        import torch

        from longdraft.model import loading

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        chosen = dict(vars(self))
        place, _ = chosen.pop("model"), chosen.pop("threads")
        if processes.num_processes() == 1:
            try:
                return longdraft.load(place, **chosen, progress=progress)
            finally:
                huge_pages.drop_prefaulted()
        for name in (name for name, each in chosen.items() if name != "dtype" and each is not None):
            raise SettingError(f"{name} cannot be chosen for a model that processes share: leave it out.")
        return loading.load_tensor_parallel(place, self.dtype, progress)


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """Sampling."""

    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the most probable token.")] = 0.0
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="Sample from the K most probable tokens.")] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0, max=1, help="Sample from the fewest tokens with this probability."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", min=0, max=1, help="Drop tokens below this share of the best one's probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1 makes tokens less likely to come again.")
    ] = None
    repetition_window: Annotated[
        int | None,
        typer.Option(
            "--repetition-window",
            help="The penalty is for the last so many tokens of the text.",
            show_default="all of it",
        ),
    ] = None
    foresee: Foresee = True

    def sampling(self) -> longdraft.Sampling:
        """Raises RequestError for values that make none."""
        made = longdraft.Sampling(**vars(self))
        idle = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p") if vars(self)[name] is not None]
        if made.greedy and idle:
            console.note(f"{', '.join(idle)}: of no effect at temperature 0; sample with --temperature (-t) above 0.")
        return made


def expand_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose groups of options are options of its own, as typer wants them."""
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=_placed(p.name, p.annotation)) for p in _flat(verb)]

    @functools.wraps(verb)
    def spreading(**given: Any) -> None:
        verb(**_grouped(verb, given))

    spreading.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spreading.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spreading


def _parts(call: Callable[..., Any]) -> list[tuple[Parameter, type[OptionGroup] | None]]:
    """The parameters of a verb or a group, each with the group that it is."""
    hints = get_type_hints(call, include_extras=True)  # of a group's bases each in its own module
    found = [p.replace(annotation=hints[p.name]) for p in inspect.signature(call).parameters.values()]
    return [
        (p, p.annotation if isinstance(p.annotation, type) and issubclass(p.annotation, OptionGroup) else None)
        for p in found
    ]


def _flat(call: Callable[..., Any]) -> Iterator[Parameter]:
    for parameter, group in _parts(call):
        yield from [parameter] if group is None else _flat(group)


def _grouped(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    return {p.name: given[p.name] if group is None else group(**_grouped(group, given)) for p, group in _parts(call)}


def _placed(name: str, annotation: Any) -> Any:
    """A parameter's annotation, whose option knows its panel."""
    panel = next((panel for panel, names in _PANELS.items() if name in names), None)
    if panel is None or get_origin(annotation) is not Annotated:
        return annotation
    parts = [copy(part) if isinstance(part, OptionInfo) else part for part in get_args(annotation)]  # other verbs' too
    for part in parts:
        if isinstance(part, OptionInfo):
            part.rich_help_panel = panel
    return Annotated[tuple(parts)]


def settings_checked() -> AbstractContextManager[None]:
    """Inside it, a ValueError or TypeError is about a value that the user gave, and a SettingError."""
    return values_checked(SettingError, (ValueError, TypeError))
