"""The sentences of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.bench.json_lines import mapping
from longdraft.bench.peers import HF, PEERS
from longdraft.bench.report import over
from longdraft.bench.report_parts import Part
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import Tally, count
from longdraft.memory.sizes import human

_GENERATE = "transformers' generate (hf)"


@dataclass(frozen=True)
class Best:
    """The fastest exact method over all prompts of a part.

    Attributes:
        over_ar, over_hf: the prompts' speed-ups; None where nothing was measured to compare with.
        prompts: how many.
        mismatches, near_ties: of its outputs; None where they cannot be compared.
    """

    method: str
    over_ar: Tally
    over_hf: Tally | None
    prompts: int
    mismatches: int | None
    near_ties: int | None


def best(part: Part) -> Best | None:
    """None where no exact method but ``ar`` was measured."""
    exact = part.setting("exact") or {}
    found = []
    for name in part.names:
        if name == REFERENCE or name in PEERS or not exact.get(name, _comparable(part, name)):
            continue
        speedup = over(part.measured, name, REFERENCE)
        if speedup is not None:
            own = [row for row in part.rows if row["method"] == name]
            found.append(
                Best(
                    name, speedup, over(part.measured, name, HF),
                    sum(m.batch for m in part.measured if name in m.rounds),
                    _sum(row["mismatches"] for row in own), _sum(row["near_ties"] for row in own),
                )
            )  # fmt: skip
    # One that was measured on some of the prompts alone is not set beside one that was measured on all.
    return max(found, key=lambda b: (b.prompts, b.over_ar.median), default=None)


def title(part: Part) -> str:
    """Model and machine, shortly."""
    return f"{model(part)} on {processor(part)}"


def model(part: Part) -> str:
    name = str(_of(part, "model").get("name") or part.setting("model") or "a model")
    return name.rstrip("/").rpartition("/")[2] or name


def precision(part: Part) -> str | None:
    dtype = _of(part, "model").get("dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def processor(part: Part) -> str:
    """The GPU that computed, else the processor and its usable cores."""
    hardware = _of(part, "hardware")
    gpus = hardware.get("gpus") or []
    if str(_of(part, "model").get("device") or "").startswith("cuda") and gpus:
        return str(gpus[0].get("name"))
    cores = hardware.get("cores")
    return f"{hardware.get('cpu') or 'an unnamed processor'}" + (f", {count(cores, 'core')}" if cores else "")


def headline(part: Part) -> str:
    """The best exact method against ar and hf: wins and losses, and how large they are."""
    found = best(part)
    if found is None:
        own = over(part.measured, REFERENCE, HF)
        return "Plain decoding (ar)" + ("." if own is None else f" runs at {_times(own)} the speed of {_GENERATE}.")
    hf = "" if found.over_hf is None else f"; {_times(found.over_hf)} that of {_GENERATE}"
    won, unit = found.over_ar, "prompt" if all(m.batch == 1 for m in part.measured) else "batch"
    if won.median < 1:
        nearest = f"{found.method} comes nearest" + (f", faster {_counted(won, unit)}" if won.faster else "")
        return f"No exact method is faster than plain decoding (ar) here: {nearest}, at {_times(won)} its speed{hf}."
    if len(won.ratios) == 1:
        return f"{found.method} decodes at {_times(won)} the speed of plain decoding (ar){hf}."
    return f"{found.method} is faster than plain decoding (ar) {_counted(won, unit)}: {_times(won)} its speed{hf}."


def _counted(won: Tally, unit: str) -> str:
    """``on 5 of 8 prompts, slower on 1``."""
    number = len(won.ratios)
    units = f"{number:,} {unit}{'es' if unit == 'batch' else 's'}"
    if won.faster == number:
        return f"on all {units}"
    return f"on {won.faster:,} of {units}, slower on {won.slower or 'none'}"


def _times(won: Tally) -> str:
    """``2.00x``; ``0.95x and 1.51x``; from three on ``0.95x to 1.51x (median 1.10x)``."""
    low, high = (f"{x:.2f}x" for x in won.ends)
    if low == high:
        return low
    return f"{low} and {high}" if len(won.ratios) == 2 else f"{low} to {high} (median {won.median:.2f}x)"


def basis(part: Part) -> str:
    """The basis of the headline: prompts, outputs, model, machine, precision."""
    lengths = [n for m in part.measured for n in m.prompt_tokens]
    span = f"{min(lengths):,} to {max(lengths):,}" if min(lengths) != max(lengths) else f"{lengths[0]:,}"
    found = best(part)
    number = sum(m.batch for m in part.measured) if found is None else found.prompts
    prompts = f"On {count(number, 'prompt')} of {span} tokens"
    said = [prompts, *([_output(found)] if found else [])]
    return f"{', '.join(said)}. {', '.join(_known(model(part), processor(part), precision(part)))}."


def _output(found: Best) -> str:
    if found.mismatches is None:
        return "outputs not compared"
    if found.mismatches:
        return f"{count(found.mismatches, 'output')} different from ar's"
    return f"the same output but for {count(found.near_ties, 'near tie')}" if found.near_ties else "the same output"


def circumstances(part: Part) -> str:
    """The settings of decoding in one line."""
    sampling = part.setting("sampling") or {}
    temperature = sampling.get("temperature")
    said = []
    if temperature is not None:
        filters = [f"{name} {x:g}" for name, x in sampling.items() if name != "temperature" and x is not None]
        said.append("greedy" if not temperature else ", ".join([f"temperature {temperature:g}", *filters]))
    if part.setting("max_tokens"):
        said.append(f"{part.setting('max_tokens')} new tokens at most")
    if part.setting("repeats"):
        said.append(count(part.setting("repeats"), "timed round"))
    if part.setting("offload"):
        said.append(f"cache offloaded ({part.setting('offload')})")
    line = "; ".join(said)
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def agreement(part: Part) -> str:
    """Said where no output differs."""
    compared = [
        name
        for name in part.names
        if name != REFERENCE and all(r["mismatches"] is not None for r in part.rows if r["method"] == name)
    ]
    loose = [name for name in part.names if name not in (*compared, REFERENCE)]
    said = f"Every output of {_listed(compared)} is that of ar, token for token." if compared else ""
    return (
        " ".join(x for x in (said, f"Not compared: {_listed(loose)}." if loose else "") if x) or "Nothing to compare."
    )


def difference(found: Mapping[str, Any]) -> str:
    """One sample whose tokens are not ar's."""
    kind = "Near tie" if found["near_tie"] else "Mismatch"
    gap = "" if found["gap"] is None else f", their logits {found['gap']:.2g} apart"
    context = "" if found.get("context") is None else f", context {found['context']:,}"
    tokens = " and ".join("the end" if found[k] is None else f"token {found[k]}" for k in ("token", "reference"))
    return (
        f"{kind}: {found['method']} on {found['sample']} ({found['dataset']}{context}), new token "
        f"{found['position'] + 1}: {tokens} of ar{gap}."
    )


def facts(part: Part) -> list[tuple[str, str]]:
    """The origin of the figures: names and values."""
    hardware, versions = _of(part, "hardware"), _of(part, "versions")
    target = _of(part, "model")
    cpu = hardware.get("cpu")
    memory = hardware.get("memory_bytes")
    gpus = [
        ", ".join(_known(g.get("name"), human(g["memory_bytes"]) if g.get("memory_bytes") else None))
        for g in hardware.get("gpus") or []
    ]
    counts = _known(_plural(hardware, "cores", "core"), _plural(hardware, "threads", "thread"))
    found: list[tuple[str, str | None]] = [
        ("Model", ", ".join(str(x) for x in (model(part), precision(part), target.get("device")) if x)),
        ("Processor", cpu and ", ".join([str(cpu), *counts])),
        ("Memory", human(memory) if memory else None),
        ("GPU", "; ".join(gpus)),
        ("Versions", ", ".join(f"{name} {x}" for name, x in versions.items() if x)),
        ("Measured", ", ".join(part.made)),
        ("Data", ", ".join(dict.fromkeys(m.dataset for m in part.measured))),
        ("Seed", None if part.setting("seed") is None else str(part.setting("seed"))),
        ("Switches", " ".join(f"{name}={x}" for name, x in (part.setting("environment") or {}).items())),
        ("Read from", ", ".join(path.name for path in part.paths)),
        *((name, note) for name, note in part.notes.items()),
    ]
    return [(name, value) for name, value in found if value]


def _comparable(part: Part, name: str) -> bool:
    return any(name in m.comparable for m in part.measured)


def _of(part: Part, name: str) -> dict[str, Any]:
    return mapping(part.header.get(name))


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if any(x is None for x in known) else sum(x for x in known if x is not None)


def _plural(values: Mapping[str, Any], key: str, one: str) -> str | None:
    return count(values[key], one) if values.get(key) else None


def _known(*values: str | None) -> list[str]:
    return [x for x in values if x]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
