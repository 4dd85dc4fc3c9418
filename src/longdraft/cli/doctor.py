"""``longdraft doctor``: what this machine has, which attention path runs on it, how much context fits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import longdraft
from longdraft.cli import console, options
from longdraft.drafts import shipped
from longdraft.errors import LongdraftError
from longdraft.memory import sizes

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner


def doctor(
    *,
    loading: options.ModelOptions,
    draft: Annotated[Path | None, typer.Option("--draft", help="Check this draft folder or .gguf file too.")] = None,
    composed: options.Load = None,
    output: options.Output,
) -> None:
    """Examine machine and model. Ends with code 1 where the model, or the draft that is named, cannot be used."""
    from longdraft.bench import machine
    from longdraft.bench.break_even import break_even
    from longdraft.model.runner import TargetRunner

    with console.status() as status:
        status("Examining")
        found: dict[str, Any] = {"hardware": machine.hardware(), "versions": machine.versions()}
        runner: TargetRunner | None = None
        loaded: longdraft.LoadedModel | None = None
        try:
            loaded = loading.load(status)
            found |= _examined(loaded)
            if found["model"]["hosted"]:
                runner = TargetRunner(loaded.model)
        except LongdraftError as error:
            found |= {
                "attention": None,
                "kernels": _kernels(None),
                "model": {"name": loading.model, "hosted": False, "reason": str(error)},
            }
        found["drafts"] = [_draft(folder, runner, True) for folder in shipped.folders()]
        if draft is not None:
            found["drafts"].append(_draft(draft, runner, False))
            if loaded is not None and found["drafts"][-1]["fits"]:
                status("Measuring what must be accepted for the draft to pay")
                found["break_even"] = [
                    asdict(each) | {"accepted": each.accepted, "line": str(each)}
                    for each in break_even(loaded, draft, status)
                ]
    _show(found, console.stdout())
    output.json(found)
    if not found["model"]["hosted"] or any(d["reason"] is not None for d in found["drafts"] if not d["shipped"]):
        raise typer.Exit(1)


def _examined(loaded: longdraft.LoadedModel) -> dict[str, Any]:
    from longdraft.attention import dispatch
    from longdraft.model import graphs, hosting
    from longdraft.model.kinds import described
    from longdraft.model.runner import TargetRunner
    from longdraft.model.stored import parameters

    model, runner, shape, reason = loaded.model, None, None, None
    try:
        runner = TargetRunner(model)
    except LongdraftError as error:
        reason = str(error)
    with suppress(LongdraftError):
        shape = hosting.kv_shape(model)
        shape = shape if runner is None else replace(shape, dtype=runner.kv_dtype)
    found: dict[str, Any] = {
        "attention": None,
        "kernels": _kernels(runner),
        "model": {
            "name": model.name_or_path or type(model).__name__,
            "class": type(model).__name__,
            "parameters": parameters(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "layers": described(model),
            "context_tokens": hosting.context_length(model),
            "kv_bytes_per_1k_tokens": None,
            "kv_tokens_that_fit": None,
            "hosted": reason is None,
            "reason": reason,
        },
    }
    if shape is None:
        return found
    free = sizes.available_bytes(model.device)
    found["model"] |= {
        "kv_bytes_per_1k_tokens": 1024 * shape.bytes_per_token,
        "kv_tokens_that_fit": None if free is None else free // shape.bytes_per_token,
    }
    why_not = {name: dispatch.unavailable(name, model.device, model.dtype, shape.head_dim) for name in dispatch.PATHS}
    path = None if runner is None else runner.attention_path
    found["attention"] = {
        "path": path,
        "unavailable": {n: why for n, why in why_not.items() if why is not None},
        "no_graphs": None if path is None else graphs.unavailable(model.device, path),
    }
    return found


def _kernels(runner: TargetRunner | None) -> dict[str, Any]:
    from longdraft.model.kernel_report import kernel_report

    found = kernel_report(runner)
    return asdict(found) | {"line": found.line}


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

    found: dict[str, Any] = {
        "name": folder.name if shipped else str(folder), "shipped": shipped, "method": None, "parameters": None,
        "vocabulary": None, "trained_length": None, "fits": None, "reason": None, "remarks": [],
    }  # fmt: skip
    try:
        draft = kind_of(folder).load(folder)
    except LongdraftError as error:
        return found | {"fits": False, "reason": str(error)}
    found |= {
        "method": draft.kind,
        "parameters": draft.parameters,
        "vocabulary": draft.vocabulary,
        "trained_length": draft.trained_length,
    }
    if runner is None:
        return found
    try:
        draft.check(runner)
    except LongdraftError as error:
        return found | {"fits": False, "reason": None if shipped else str(error)}
    return found | {"fits": True, "remarks": draft.remarks(runner)}


def _show(found: dict[str, Any], out: Console) -> None:
    from longdraft.attention import dispatch

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    def row(name: str, value: str, style: str = "") -> None:
        grid.add_row(name, Text(value, style=style))

    hardware = found["hardware"]
    row("processor", f"{hardware['cpu']}, {hardware['cores']} cores, threads in use: {hardware['threads']}")
    row("memory", f"{_bytes(hardware['memory_available_bytes'])} free of {_bytes(hardware['memory_bytes'])}")
    for gpu in hardware["gpus"]:
        memory = f"{_bytes(gpu['memory_available_bytes'])} free of {_bytes(gpu['memory_bytes'])}"
        row("GPU", f"{gpu['name']}, {memory}")
    if not hardware["gpus"]:
        row("GPU", "none that torch can use")
    idle = () if hardware["gpus"] else ("hybrid", "triton")  # nothing to do about them here
    versions = [f"{name} {version or 'none'}" for name, version in found["versions"].items() if name not in idle]
    row("versions", ", ".join(versions))
    row("kernels", found["kernels"]["line"], "yellow" if found["kernels"]["cost"] else "")
    model, attention = found["model"], found["attention"]
    if attention is not None:
        row("attention", f"{attention['path'] or 'none'} is used ({dispatch.ENVIRONMENT}=name forces another)")
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
        row("KV cache", f"{sizes.human(model['kv_bytes_per_1k_tokens'])} for 1,024 tokens of context{room}")
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
    for i, each in enumerate(found.get("break_even", ())):
        row("" if i else "break-even", each["line"])
    if not found["drafts"]:
        row("draft", "none comes with longdraft; --draft DIR checks one", "dim")
    console.show(out, grid)


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else sizes.human(count)
