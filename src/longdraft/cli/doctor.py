"""``longdraft doctor``: what this machine has, which attention path runs on it, how much context fits."""

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

_FREE = "memory_available_bytes"


def doctor(
    *,
    loading: options.ModelOptions,
    draft: Annotated[Path | None, typer.Option("--draft", help="Check this draft folder or .gguf file too.")] = None,
    composed: options.Load = None,
    output: options.OutputOptions,
) -> None:
    """Examine machine and model. Ends with code 1 where the model, or the draft that is named, cannot be used."""
    from longdraft.bench import machine
    from longdraft.model.kernel_report import kernel_report
    from longdraft.model.runner import TargetRunner

    with console.status() as status:
        status("Examining")
        found: dict[str, Any] = {"hardware": machine.hardware(), "versions": machine.versions(), "attention": None}
        runner, loaded = None, None
        try:
            loaded = loading.load(status)
            runner = TargetRunner(loaded.model)
            reason = None
        except LongdraftError as error:
            reason = str(error)
        kernels = kernel_report(runner)
        found["kernels"] = asdict(kernels) | {"line": kernels.line}
        found["model"] = {"name": loading.model, "hosted": reason is None, "reason": reason}
        if loaded is not None:
            _examine(found, loaded.model, runner)
        found["drafts"] = [_draft(folder, runner, True) for folder in shipped.folders()]
        if draft is not None:
            found["drafts"].append(_draft(draft, runner, False))
    _show(found, console.stdout())
    output.print_json(found)
    if not found["model"]["hosted"] or any(d["reason"] is not None for d in found["drafts"] if not d["shipped"]):
        raise typer.Exit(1)


def _examine(found: dict[str, Any], model: Any, runner: TargetRunner | None) -> None:
    """Adds what a loaded model is, what its KV takes, and which attention runs on it."""
    from longdraft.attention import dispatch
    from longdraft.model import hosting
    from longdraft.model.gpu import cuda_graphs
    from longdraft.model.layout import describe_layers, layout_of
    from longdraft.model.stored_model import num_parameters

    found["model"] |= {
        "name": model.name_or_path or type(model).__name__,
        "class": type(model).__name__,
        "parameters": num_parameters(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "layers": describe_layers(model),
        "context_tokens": hosting.context_length(model),
        "kv_bytes_per_1k_tokens": None,
        "kv_tokens_that_fit": None,
    }
    try:
        shape = layout_of(model).shape
    except LongdraftError:
        return
    shape = shape if runner is None else replace(shape, dtype=runner.kv_dtype)
    free = memory_info.available_bytes(model.device)
    found["model"] |= {
        "kv_bytes_per_1k_tokens": 1024 * shape.bytes_per_token,
        "kv_tokens_that_fit": None if free is None else free // shape.bytes_per_token,
    }
    why_not = {name: dispatch.unavailable(name, model.device, model.dtype, shape.head_dim) for name in dispatch.PATHS}
    path = None if runner is None else runner.attention_path
    found["attention"] = {
        "path": path,
        "unavailable": {n: why for n, why in why_not.items() if why is not None},
        "no_graphs": None if path is None else cuda_graphs.unavailable_reason(model.device, path),
    }


def _draft(folder: Path, runner: TargetRunner | None, shipped: bool) -> dict[str, Any]:
    """Reads a draft, checks its tensors against its sizes, and it against the target.

    Args:
        runner: the target; None where there is none, and only the folder is checked.
        shipped: it comes with the package: one made for another target is nothing to complain about.

    Returns:
        ``name, shipped, method, parameters, vocabulary, trained_length, fits, reason, remarks``: ``fits`` is None where
        it was not found out, ``reason`` says why the draft cannot be used, ``remarks`` what looks wrong otherwise.
    """

    from longdraft.drafts.kinds import kind_of

    found: dict[str, Any] = dict.fromkeys(
        ("name", "shipped", "method", "parameters", "vocabulary", "trained_length", "fits", "reason", "remarks")
    )
    found |= {"name": folder.name if shipped else str(folder), "shipped": shipped, "remarks": []}
    known = False
    try:
        draft = kind_of(folder).load(folder)
        known = True
        found |= {"method": draft.kind} | {n: getattr(draft, n) for n in ("parameters", "vocabulary", "trained_length")}
        if runner is not None:
            draft.check(runner)
            found |= {"fits": True, "remarks": draft.remarks(runner)}
    except LongdraftError as error:
        found |= {"fits": False, "reason": None if shipped and known else str(error)}
    return found


def _show(found: dict[str, Any], out: Console) -> None:
    from longdraft.attention import dispatch

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    def row(name: str, value: str, style: str = "") -> None:
        grid.add_row(name, Text(value, style=style))

    def free(of: dict[str, Any]) -> str:
        left, whole = ("unknown" if n is None else memory_info.format_bytes(n) for n in (of[_FREE], of["memory_bytes"]))
        return f"{left} free of {whole}"

    hardware, model, attention = found["hardware"], found["model"], found["attention"]
    row("processor", f"{hardware['cpu']}, {hardware['cores']} cores, threads in use: {hardware['threads']}")
    row("memory", free(hardware))
    for gpu in hardware["gpus"]:
        row("GPU", f"{gpu['name']}, {free(gpu)}")
    if not hardware["gpus"]:
        row("GPU", "none that torch can use")
    idle = () if hardware["gpus"] else ("hybrid", "triton")  # a path and a package: nothing to do about them here
    versions = [f"{name} {version or 'none'}" for name, version in found["versions"].items() if name not in idle]
    row("versions", ", ".join(versions))
    row("kernels", found["kernels"]["line"], "yellow" if found["kernels"]["cost"] else "")
    if attention is not None:
        row("attention", f"{attention['path'] or 'none'} is used ({dispatch.ENVIRONMENT_VARIABLE}=name forces another)")
        for name, why in attention["unavailable"].items():
            if name not in idle:
                row("", f"{name} cannot run: {why}", "dim")
        if hardware["gpus"]:
            why = attention["no_graphs"]
            row("CUDA graphs", "of verifications, a graph a tree size" if why is None else f"none: {why}")
    if "class" in model:
        kind = f"{model['class']}, {model['parameters'] / 1e6:,.0f}M parameters, {model['dtype']} on {model['device']}"
        row("model", f"{model['name']}: {kind}")
        row("", model["layers"])
        row("context", f"{model['context_tokens']:,} tokens")
    if attention is not None:
        fits = model["kv_tokens_that_fit"]
        room = "" if fits is None else f"; {fits:,} tokens fit the free memory"
        row(
            "KV cache", f"{memory_info.format_bytes(model['kv_bytes_per_1k_tokens'])} for 1,024 tokens of context{room}"
        )
    if model["hosted"]:
        row("hosted", "yes, every method runs on it exactly as the method says", "green")
    else:
        row("hosted", f"no: {model['reason']}", "red")
    for d in found["drafts"]:
        name = f"{d['name']} (comes with longdraft)" if d["shipped"] else d["name"]
        if d["parameters"] is not None:
            name += f": {d['method']}, {d['parameters'] / 1e6:,.1f}M parameters"
        if d["reason"] is None:
            row("draft", f"{name}; {'fits' if d['fits'] else 'for another target'}", "green" if d["fits"] else "dim")
        else:
            row("draft", f"{name}; cannot be used: {d['reason']}", "red")
        for remark in d["remarks"]:
            row("", remark, "yellow")
        if d["fits"] and not d["shipped"]:
            row("", f"what must be accepted for it to pay: longdraft bench length --draft {d['name']}", "dim")
    if not found["drafts"]:
        row("draft", "none comes with longdraft; --draft DIR checks one", "dim")
    console.print_renderable(out, grid)
