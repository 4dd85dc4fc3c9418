"""The sentences of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from longdraft.bench.json_lines import mapping
from longdraft.bench.peers import HF, PEERS
from longdraft.bench.report import faster, over, slower
from longdraft.bench.report_parts import Part
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import count
from longdraft.memory.sizes import human

_GENERATE = "transformers' generate (hf)"


@dataclass(frozen=True)
class Best:
    """The fastest exact method over all prompts of a part.

    Attributes:
        over_ar, over_hf: its speed-ups, one a batch; empty if ``hf`` was not measured.
        prompts: count of prompts it decoded.
    """

    method: str
    over_ar: list[float]
    over_hf: list[float]
    prompts: int


def best(part: Part) -> Best | None:
    """The fastest exact method; None if none but ``ar`` was measured."""
    exact = part.setting("exact") or {}
    found = []
    for name in part.names:
        comparable = any(name in m.comparable for m in part.measured)
        speedups = over(part.measured, name, REFERENCE)
        if name == REFERENCE or name in PEERS or not speedups or not exact.get(name, comparable):
            continue
        prompts = sum(m.batch for m in part.measured if name in m.rounds)
        found.append(Best(name, speedups, over(part.measured, name, HF), prompts))
    # A method that decoded some of the prompts is not compared with one that decoded all.
    return max(found, key=lambda b: (b.prompts, median(b.over_ar)), default=None)


def headline(part: Part) -> str:
    """The best exact method against ``ar`` and ``hf``: wins and losses, and their size."""
    found = best(part)
    if found is None:
        return "Plain decoding (ar)."
    won, speed = found.over_ar, _times(found.over_ar)
    hf = f"; {_times(found.over_hf)} that of {_GENERATE}" if found.over_hf else ""
    if len(won) == 1 and won[0] >= 1:
        return f"{found.method} decodes at {speed} the speed of plain decoding (ar){hf}."
    units = f"{len(won):,} prompts" if all(m.batch == 1 for m in part.measured) else f"{len(won):,} batches"
    counts = f"on {faster(won):,} of {units}, slower on {slower(won) or 'none'}"
    if faster(won) == len(won):
        counts = f"on all {units}"
    if median(won) >= 1:
        return f"{found.method} is faster than plain decoding (ar) {counts}: {speed} its speed{hf}."
    nearest = f"{found.method} comes nearest" + (f", faster {counts}" if faster(won) else "")
    return f"No exact method is faster than plain decoding (ar) here: {nearest}, at {speed} its speed{hf}."


def _times(ratios: list[float]) -> str:
    """``2.00x``; ``0.95x and 1.51x``; of three or more ``0.95x to 1.51x (median 1.10x)``."""
    low, high = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
    if low == high:
        return low
    return f"{low} and {high}" if len(ratios) == 2 else f"{low} to {high} (median {median(ratios):.2f}x)"


def title(part: Part) -> str:
    """Model and machine."""
    return f"{model(part)} on {processor(part)}"


def model(part: Part) -> str:
    """The model's name without its folders."""
    name = str(_section(part, "model").get("name") or part.setting("model") or "a model")
    return name.rstrip("/").rpartition("/")[2] or name


def processor(part: Part) -> str:
    """The GPU if the model ran on one, else the processor."""
    hardware = _section(part, "hardware")
    gpus = hardware.get("gpus") or []
    on_gpu = gpus and str(_section(part, "model").get("device") or "").startswith("cuda")
    return str(gpus[0].get("name") if on_gpu else hardware.get("cpu") or "an unnamed processor")


def agreement(part: Part) -> str:
    """A sentence for the case that no output differs."""
    others = [name for name in part.names if name != REFERENCE]
    loose = [name for name in others if any(r["mismatches"] is None for r in part.rows if r["method"] == name)]
    same = [name for name in others if name not in loose]
    sentences = [f"Every output of {', '.join(same)} is that of ar, token for token."] if same else []
    sentences += [f"Not compared: {', '.join(loose)}."] if loose else []
    return " ".join(sentences) or "Nothing to compare."


def difference(found: Mapping[str, Any]) -> str:
    """One sample whose tokens are not those of ``ar``."""
    kind = "Near tie" if found["near_tie"] else "Mismatch"
    own, reference = ("the end" if found[k] is None else f"token {found[k]}" for k in ("token", "reference"))
    gap = "" if found["gap"] is None else f", logits {found['gap']:.2g} apart"
    where = f"{found['method']} on {found['sample']} ({found['dataset']}), new token {found['position'] + 1}"
    return f"{kind}: {where}: {own}, ar has {reference}{gap}."


def facts(part: Part) -> dict[str, str]:
    """The origin of the figures: values by name, without those that the files do not have."""
    hardware, target = _section(part, "hardware"), _section(part, "model")
    lengths = sorted(n for m in part.measured for n in m.prompt_tokens)
    span = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if lengths[-1] > lengths[0] else "")
    sampling = part.setting("sampling") or {}
    settings = {name: part.setting(name) for name in ("max_tokens", "repeats", "seed", "offload")} | sampling
    cores, memory = hardware.get("cores"), hardware.get("memory_bytes")
    found = {
        "Model": _listed(model(part), target.get("dtype"), target.get("device")),
        "Prompts": f"{count(len(lengths), 'prompt')} of {span} tokens, "
        + _listed(*dict.fromkeys(m.dataset for m in part.measured)),
        "Settings": _pairs({name: x for name, x in settings.items() if x is not None}),
        "Processor": _listed(hardware.get("cpu"), cores and count(cores, "core"), memory and human(memory)),
        "GPU": _listed(*(gpu.get("name") for gpu in hardware.get("gpus") or [])),
        "Versions": _pairs(_section(part, "versions")),
        "Switches": _pairs(part.setting("environment") or {}),
        "Measured": _listed(*part.made),
        "Files": _listed(*(path.name for path in part.paths)),
        **part.notes,
    }
    return {name: value for name, value in found.items() if value}


def _section(part: Part, name: str) -> dict[str, Any]:
    return mapping(part.header.get(name))


def _listed(*values: Any) -> str:
    return ", ".join(str(value) for value in values if value)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
