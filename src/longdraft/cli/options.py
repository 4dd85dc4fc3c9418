"""Options that several commands share, and the error for bad values."""

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
from longdraft.model.load.embedded import EMBEDDED_ID

if TYPE_CHECKING:
    from longdraft.model.load.checkpoints import Progress

# Panel of ``--help`` -> the parameters that it shows, in any command. Other parameters have no panel and come first.
_PANELS = {
    "Sampling": (
        "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "foresee", "stop", "raw",
        "system", "think",
    ),
    "Draft and tree": (
        "draft", "option", "speculative_config", "plan", "tree", "depth", "nodes", "widths", "tree_top_k", "threshold",
    ),
    "Model and memory": (
        "dtype", "device", "weights", "arithmetic", "rope_factor", "threads", "offload", "kv_dtype",
        "prefill_window", "deterministic", "kv_cache", "prefix_gib", "snapshots", "snapshot_gib",
    ),
    "Limits": ("queue", "timeout", "allow_host", "allow_origin"),
    "Ray": ("ray", "replicas", "ray_config"),
    "Data": ("short", "limit"),
    "Everything else": ("user_files", "debug", "profile"),
}  # fmt: skip


class SettingError(LongdraftError, ValueError):
    """A value on the command line is invalid."""


_debug = False


def debugging() -> bool:
    """True if ``--debug`` is set."""
    return _debug


def set_debug(value: bool) -> bool:
    """Turns tracebacks and logs on if ``value`` is True. False turns nothing off: --debug may precede the command."""
    global _debug
    if value:
        _debug = True
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    return value


def reset_debug() -> None:
    """Turns tracebacks off, as at the start of a process."""
    global _debug
    _debug = False


def run_user_files(paths: list[Path] | None) -> list[Path] | None:
    """Runs Python files that define methods (``longdraft.compose``) or kinds of drafts (``longdraft.register``).

    Returns the paths, because replicas run the files too. Raises SettingError for a file that is missing or fails.
    """
    for path in paths or []:
        try:
            runpy.run_path(str(path))
        except Exception as error:  # the user's code may raise anything
            raise SettingError(f"--load {path}: {type(error).__name__}: {error}") from error
    return paths


UserFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--load",
        callback=run_user_files,
        is_eager=True,
        help="Run this Python file first: it may define methods (longdraft.compose) or kinds of drafts "
        "(longdraft.register); repeatable.",
        show_default="none",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Show logs and tracebacks.")]
Offload = Annotated[
    str | None,
    typer.Option(
        help="On a GPU: offload the KV cache to host memory. host: the GPU keeps the layers that fit; host:N: it keeps "
        "N layers.",
        show_default="no offload",
    ),
]
Foresee = Annotated[
    bool,
    typer.Option(
        "--foresee/--no-foresee",
        help="Above temperature 0: drafts use the random numbers of the next samples, so more tokens are accepted.",
    ),
]


def _method_names(incomplete: str) -> list[str]:
    from longdraft.cli.method_options import catalogue

    return [name for name in catalogue()[0] if name.startswith(incomplete)]


Method = Annotated[
    str | None,
    typer.Option(
        autocompletion=_method_names,
        help="Decoding method; `longdraft methods` lists them.",
        show_default="the first of self, longspec and prompt-lookup that suits the model",
    ),
]
MethodOptionPairs = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="An option of the method as name=value; repeatable.")
]
Plan = Annotated[
    str | None,
    typer.Option(
        help="auto: draft trees of the size that is fastest on this machine, or no drafts; fixed: the method's trees.",
        show_default="auto; fixed if a tree option is set",
    ),
]


class OptionGroup:
    """Base class: options that are one parameter of a command or of another group; see :func:`expand_groups`."""


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """Options of machine-readable and debugging output."""

    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object as the last line of stdout.")] = False
    debug: Debug = False

    def print_json(self, value: Any) -> None:
        """Prints the JSON object if --json is set."""
        if self.as_json:
            console.print_line(json.dumps(value))


@dataclass(frozen=True)
class TemplateOptions(OptionGroup):
    """Options of the chat template."""

    system: Annotated[str | None, typer.Option(help="System message, before the prompt.")] = None
    think: Annotated[
        bool, typer.Option("--think/--no-think", help="Let a model with a thinking mode reason before it answers.")
    ] = True

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template, if they differ from its defaults."""
        return {} if self.think else {"enable_thinking": False}

    @property
    def chat_prompt_kwargs(self) -> dict[str, Any]:
        """Arguments of ``chat_prompt``: the system message, if there is one, and :attr:`template_kwargs`."""
        return self.template_kwargs if self.system is None else {"system": self.system, **self.template_kwargs}


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Options of the model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model: a Hugging Face id, a folder or a .gguf file.", show_default="embedded SmolLM2"
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="dtype of the model: auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[
        str | None, typer.Option(help="Device: cpu, cuda, cuda:N or mps.", show_default="the best one")
    ] = None
    weights: Annotated[
        Literal["stored", "float32"] | None,
        typer.Option(
            help="stored: compute on the file's quantized or 16-bit weights; float32: dequantize them first.",
            show_default="stored, if this CPU has kernels for it",
        ),
    ] = None
    arithmetic: Annotated[
        Literal["int8", "float32"] | None,
        typer.Option(
            help="int8: quantize activations to 8 bits for products with stored weights; float32: do not.",
            show_default="int8 for GGUF files of 8 bits or fewer, on a CPU",
        ),
    ] = None
    rope_factor: Annotated[
        float | None, typer.Option("--rope-factor", help="Stretch the model's context by this factor (YaRN).")
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Number of CPU threads; use fewer if other programs run.", show_default="all cores"),
    ] = None

    @property
    def name(self) -> str:
        """The model's name: --model, or the embedded model's."""
        return self.model or EMBEDDED_ID

    @property
    def uses_gpu(self) -> bool:
        """True if the model goes to a CUDA device, by --device or by default."""
        import torch

        return torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")

    def preload(self) -> None:
        """Starts to allocate memory for :meth:`load` in the background, while torch and transformers are imported."""
        # Weights that are converted to floats need other memory.
        as_floats = "float32" in (self.weights, self.arithmetic) or self.dtype not in ("auto", "float32")
        if self.device in (None, "cpu") and not as_floats:
            huge_pages.prefault(self.model, memory_info.available_host_bytes())

    def load(self, progress: Progress) -> longdraft.LoadedModel:
        """Loads the model and its tokenizer. Under torchrun, each process loads a part of the model."""
        self.preload()
        import torch

        from longdraft.model.load import loading

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        arguments = {name: value for name, value in vars(self).items() if name not in ("model", "threads")}
        if processes.num_processes() == 1:
            try:
                return longdraft.load(self.model, **arguments, progress=progress)
            finally:
                huge_pages.drop_prefaulted()
        for name in (name for name, value in arguments.items() if name != "dtype" and value is not None):
            raise SettingError(f"{name} cannot be set under torchrun, where processes share a model: leave it out.")
        return loading.load_tensor_parallel(self.model, self.dtype, progress)


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """Options of sampling."""

    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="Sample from the K most probable tokens.")] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0, max=1, help="Sample from the fewest tokens with this total probability."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", min=0, max=1, help="Drop tokens below this share of the highest probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", help="Above 1, repeated tokens are less likely; 1: off."),
    ] = None
    repetition_window: Annotated[
        int | None,
        typer.Option(help="Number of last tokens that the penalty applies to.", show_default="all"),
    ] = None
    foresee: Foresee = True

    def sampling(self) -> longdraft.Sampling:
        """Makes the sampling settings. Notes flags without effect. Raises RequestError for bad values."""
        sampling = longdraft.Sampling(**vars(self))
        unused = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p") if vars(self)[name] is not None]
        if sampling.greedy and unused:
            console.note(f"{', '.join(unused)}: no effect at temperature 0; set --temperature (-t) above 0.")
        return sampling


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command for typer: each option of the command's groups becomes a parameter."""
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=_with_panel(p)) for p in _flatten(command)]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        command(**_nest(command, values))

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameters(owner: Callable[..., Any]) -> list[tuple[Parameter, type[OptionGroup] | None]]:
    """Returns (parameter, its option group or None) for each parameter of ``owner``, a command or an option group."""
    hints = get_type_hints(owner, include_extras=True)  # resolves inherited annotations in their own modules
    resolved = [p.replace(annotation=hints[p.name]) for p in inspect.signature(owner).parameters.values()]
    is_group = [isinstance(p.annotation, type) and issubclass(p.annotation, OptionGroup) for p in resolved]
    return [(p, p.annotation if group else None) for p, group in zip(resolved, is_group, strict=True)]


def _flatten(owner: Callable[..., Any]) -> Iterator[Parameter]:
    """Yields all single options of ``owner``, those of its groups included."""
    for parameter, group in _parameters(owner):
        yield from [parameter] if group is None else _flatten(group)


def _nest(owner: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``owner``. Groups among the arguments are made from the values of single options."""
    parameters = _parameters(owner)
    return {p.name: values[p.name] if group is None else group(**_nest(group, values)) for p, group in parameters}


def _with_panel(parameter: Parameter) -> Any:
    """Returns the parameter's annotation, with the option put into a help panel."""
    panel = next((panel for panel, names in _PANELS.items() if parameter.name in names), None)
    if panel is None or get_origin(parameter.annotation) is not Annotated:
        return parameter.annotation
    # Options are copied, because commands share them.
    parts = [copy(part) if isinstance(part, OptionInfo) else part for part in get_args(parameter.annotation)]
    for part in parts:
        if isinstance(part, OptionInfo):
            part.rich_help_panel = panel
    return Annotated[tuple(parts)]


def settings_checked() -> AbstractContextManager[None]:
    """Returns a context manager that turns a ValueError or TypeError into a SettingError, for checks of user values."""
    return values_checked(SettingError, (ValueError, TypeError))
