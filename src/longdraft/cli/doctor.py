"""``longdraft doctor``: checks the machine, the attention path, the context that fits, the model, and drafts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longdraft.cli import console, options
from longdraft.drafts import shipped
from longdraft.errors import LongdraftError
from longdraft.memory import memory_info

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

_FREE = "memory_available_bytes"  # key of the free memory of a device


def doctor(
    *,
    model_options: options.ModelOptions,
    draft: Annotated[Path | None, typer.Option("--draft", help="Also check this draft folder or .gguf file.")] = None,
    user_files: options.UserFiles = None,
    output: options.OutputOptions,
) -> None:
    """Check machine, model and drafts. The exit code is 1 if the model, or the draft in --draft, cannot be used."""
    from longdraft.bench import machine
    from longdraft.cli.kernel_report import kernel_report
    from longdraft.model.runner import TargetRunner

    with console.status() as status:
        status("Examining")
        info: dict[str, Any] = machine.environment() | {"attention": None}
        runner, loaded = None, None
        try:
            loaded = model_options.load(status)
            runner = TargetRunner(loaded.model)
            reason = None
        except LongdraftError as error:
            reason = str(error)
        kernels = kernel_report(runner)
        info["kernels"] = asdict(kernels) | {"line": kernels.line}
        info["model"] = {"name": model_options.model, "hosted": reason is None, "reason": reason}
        if loaded is not None:
            _check_model(info, loaded.model, runner)
        info["drafts"] = [_check_draft(folder, runner, shipped=True) for folder in shipped.folders()]
        if draft is not None:
            info["drafts"].append(_check_draft(draft, runner, shipped=False))
    _show(info, console.stdout())
    output.print_json(info)
    if not info["model"]["hosted"] or any(d["reason"] is not None for d in info["drafts"] if not d["shipped"]):
        raise typer.Exit(1)


def _check_model(info: dict[str, Any], model: Any, runner: TargetRunner | None) -> None:
    """Adds to ``info``: the loaded model, the size of its KV cache, and its attention path."""
    from longdraft.attention import dispatch
    from longdraft.model.gpu import cuda_graphs
    from longdraft.model.layout import config_kv_shape, describe_layers
    from longdraft.model.model_parts import context_length
    from longdraft.model.quant.stored_model import num_parameters

    info["model"] |= {
        "name": model.name_or_path or type(model).__name__, "class": type(model).__name__,
        "parameters": num_parameters(model), "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device), "layers": describe_layers(model),
        "context_tokens": context_length(model), "kv_bytes_per_1k_tokens": None, "kv_tokens_that_fit": None,
    }  # fmt: skip
    try:
        kv_shape = config_kv_shape(model) if runner is None else runner.execution_model.layout.shape
    except LongdraftError:
        return
    if runner is not None:  # the KV cache may have a smaller dtype than the model
        kv_shape = replace(kv_shape, dtype=runner.kv_dtype)
    free = memory_info.available_bytes(model.device)
    info["model"] |= {
        "kv_bytes_per_1k_tokens": 1024 * kv_shape.bytes_per_token,
        "kv_tokens_that_fit": None if free is None else free // kv_shape.bytes_per_token,
    }
    device, dtype = model.device, model.dtype
    reasons = {name: dispatch.why_unavailable(name, device, dtype, kv_shape.head_dim) for name in dispatch.PATHS}
    path = None if runner is None else runner.attention_path
    info["attention"] = {
        "path": path,
        "unavailable": {name: reason for name, reason in reasons.items() if reason is not None},
        "no_graphs": None if path is None else cuda_graphs.unavailable_reason(model.device, path),
    }


def _check_draft(folder: Path, runner: TargetRunner | None, shipped: bool) -> dict[str, Any]:
    """Checks a draft's folder by loading it, and checks that the draft fits the target.

    Args:
        runner: the target; None: only the draft's folder is checked.
        shipped: True if the draft comes with the package. Such a draft may be for another target.

    Returns:
        ``name, shipped, method, parameters, vocabulary, trained_length, fits, reason, remarks``: ``fits`` is None
        without a target, ``reason`` says why the draft cannot be used, ``remarks`` are warnings about it.
    """
    from longdraft.registry import kind_of

    info: dict[str, Any] = dict.fromkeys(
        ("name", "shipped", "method", "parameters", "vocabulary", "trained_length", "fits", "reason", "remarks")
    )
    info |= {"name": folder.name if shipped else str(folder), "shipped": shipped, "remarks": []}
    is_loaded = False
    try:
        draft = kind_of(folder).load(folder)
        is_loaded = True
        info |= {"method": draft.kind, "parameters": draft.parameters, "vocabulary": draft.vocabulary}
        info["trained_length"] = draft.trained_length
        if runner is not None:
            draft.check(runner)
            info |= {"fits": True, "remarks": draft.remarks(runner)}
    except LongdraftError as error:
        # A shipped draft that loads is for another target, which is no error.
        info |= {"fits": False, "reason": None if shipped and is_loaded else str(error)}
    return info


def _show(info: dict[str, Any], out: Console) -> None:
    """Prints what the checks found, as a table."""
    from longdraft.attention import dispatch

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    def row(name: str, value: str, style: str = "") -> None:
        grid.add_row(name, Text(value, style=style))

    def memory(device: dict[str, Any]) -> str:
        sizes = device[_FREE], device["memory_bytes"]
        return "{} free of {}".format(*("unknown" if n is None else memory_info.format_bytes(n) for n in sizes))

    hardware, model, attention = info["hardware"], info["model"], info["attention"]
    row("processor", f"{hardware['cpu']}, {hardware['cores']} cores, threads in use: {hardware['threads']}")
    row("memory", memory(hardware))
    for gpu in hardware["gpus"]:
        row("GPU", f"{gpu['name']}, {memory(gpu)}")
    if not hardware["gpus"]:
        row("GPU", "none that torch can use")
    irrelevant = () if hardware["gpus"] else ("hybrid", "triton")  # hybrid attention and triton need a GPU
    versions = [f"{name} {version or 'none'}" for name, version in info["versions"].items() if name not in irrelevant]
    row("versions", ", ".join(versions))
    row("kernels", info["kernels"]["line"], "yellow" if info["kernels"]["cost"] else "")
    if attention is not None:
        row("attention", f"{attention['path'] or 'none'} is used ({dispatch.ENVIRONMENT_VARIABLE}=name forces another)")
        for name, reason in attention["unavailable"].items():
            if name not in irrelevant:
                row("", f"{name} cannot run: {reason}", "dim")
        if hardware["gpus"]:
            reason = attention["no_graphs"]
            row("CUDA graphs", "for verification, one for each tree size" if reason is None else f"none: {reason}")
    if "class" in model:
        size = f"{model['parameters'] / 1e6:,.0f}M parameters"
        row("model", f"{model['name']}: {model['class']}, {size}, {model['dtype']} on {model['device']}")
        row("", model["layers"])
        row("context", f"{model['context_tokens']:,} tokens")
    if attention is not None:
        fits = model["kv_tokens_that_fit"]
        limit = "" if fits is None else f"; {fits:,} tokens fit the free memory"
        size = memory_info.format_bytes(model["kv_bytes_per_1k_tokens"])
        row("KV cache", f"{size} for 1,024 tokens of context{limit}")
    if model["hosted"]:
        row("hosted", "yes: every method can decode with this model", "green")
    else:
        row("hosted", f"no: {model['reason']}", "red")
    for entry in info["drafts"]:
        name = f"{entry['name']} (comes with longdraft)" if entry["shipped"] else entry["name"]
        if entry["parameters"] is not None:
            name += f": {entry['method']}, {entry['parameters'] / 1e6:,.1f}M parameters"
        if entry["reason"] is None:
            fits, style = ("fits", "green") if entry["fits"] else ("for another target", "dim")
            row("draft", f"{name}; {fits}", style)
        else:
            row("draft", f"{name}; cannot be used: {entry['reason']}", "red")
        for remark in entry["remarks"]:
            row("", remark, "yellow")
        if entry["fits"] and not entry["shipped"]:
            row("", f"measure whether it pays off: longdraft bench length --draft {entry['name']}", "dim")
    if not info["drafts"]:
        row("draft", "none comes with longdraft; --draft DIR checks one", "dim")
    console.print_renderable(out, grid)
