"""What a report says in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.bench.json_lines import mapping
from longdraft.bench.peers import HF, PEERS
from longdraft.bench.report_parts import Part
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import count, median_of, ratio
from longdraft.kv.memory import human

_GENERATE = "transformers' generate (hf)"


@dataclass(frozen=True)
class Best:
    """The fastest exact method over all prompts of a part.

    Attributes:
        over_ar, over_hf: median of the samples' speed-ups; None where nothing was measured to compare with.
        prompts: how many.
        mismatches, near_ties: of its outputs; None where they cannot be compared.
    """

    method: str
    over_ar: float
    over_hf: float | None
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
        speedup = over(part, name, REFERENCE)
        if speedup is not None:
            own = [row for row in part.rows if row["method"] == name]
            found.append(
                Best(
                    name, speedup, over(part, name, HF), sum(m.batch for m in part.measured if name in m.rounds),
                    _sum(row["mismatches"] for row in own), _sum(row["near_ties"] for row in own),
                )
            )  # fmt: skip
    return max(found, key=lambda b: b.over_ar, default=None)


def over(part: Part, name: str, reference: str) -> float | None:
    """Median over all samples of a method's tokens/s / the reference's."""
    both = [m for m in part.measured if name in m.rounds and reference in m.rounds]
    return median_of(ratio(m.tokens_per_second(name), m.tokens_per_second(reference)) for m in both)


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
    """What computed: the GPU where one did, else the processor and the cores that could be used."""
    hardware = _of(part, "hardware")
    gpus = hardware.get("gpus") or []
    if str(_of(part, "model").get("device") or "").startswith("cuda") and gpus:
        return str(gpus[0].get("name"))
    cores = hardware.get("cores")
    return f"{hardware.get('cpu') or 'an unnamed processor'}" + (f", {count(cores, 'core')}" if cores else "")


def headline(part: Part) -> str:
    """The best exact method against ar and hf."""
    found = best(part)
    if found is None:
        ratio = over(part, REFERENCE, HF)
        return "Plain decoding (ar)" + ("." if ratio is None else f" runs at {ratio:.2f}x the speed of {_GENERATE}.")
    hf = "" if found.over_hf is None else f" and {found.over_hf:.2f}x that of {_GENERATE}"
    if found.over_ar < 1:
        return (
            f"No exact method is faster than plain decoding (ar) here: {found.method} comes nearest, at "
            f"{found.over_ar:.2f}x its speed{hf}."
        )
    return f"{found.method} decodes at {found.over_ar:.2f}x the speed of plain decoding (ar){hf}."


def basis(part: Part) -> str:
    """What the headline rests on: prompts, outputs, model, machine, precision."""
    lengths = [n for m in part.measured for n in m.prompt_tokens]
    span = f"{min(lengths):,} to {max(lengths):,}" if min(lengths) != max(lengths) else f"{lengths[0]:,}"
    found = best(part)
    number = sum(m.batch for m in part.measured) if found is None else found.prompts
    prompts = f"{'On' if number == 1 else 'Median over'} {count(number, 'prompt')} of {span} tokens"
    said = [prompts, *([_output(found)] if found else [])]
    return f"{', '.join(said)}. {', '.join(_known(model(part), processor(part), precision(part)))}."


def _output(found: Best) -> str:
    if found.mismatches is None:
        return "outputs not compared"
    if found.mismatches:
        return f"{count(found.mismatches, 'output')} different from ar's"
    return f"the same output but for {count(found.near_ties, 'near tie')}" if found.near_ties else "the same output"


def circumstances(part: Part) -> str:
    """How texts were decoded, in a line."""
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
    """Where the figures come from: name and value."""
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
