"""Measurements in a file, a line each as soon as it is there: a run that was stopped goes on where it was.

The format is in docs/figures.md. Whatever decides a figure stands in the header; a run whose header is another one
may not go on with the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from longdraft.bench import machine, report
from longdraft.bench.contenders import Run
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Group, Prompt
from longdraft.bench.run import Bench, Disagreement, Measured
from longdraft.bench.ties import Difference
from longdraft.errors import CheckpointError, ConfigError

FORMAT, VERSION = "longdraft-bench", 1
_SAMPLE = 1 << 20  # bytes of either end of a weight file that its fingerprint sees
# Of the hardware: what changes from one run to the next on the same machine decides nothing.
_LOOSE = ("memory_available_bytes",)
# Of the header: what is said of a run and decides nothing.
_SAID = ("created", "command")
_CACHE = "LONGDRAFT_CACHE"


def header(
    bench: Bench, prompts: Sequence[Prompt], model: str, data: Sequence[str], limit: int | None
) -> dict[str, Any]:
    """All that decides the figures of a run, and what is to be known of them.

    Args:
        model, data, limit: what the user named.
    """
    s, target = bench.settings, bench.target
    tokens = hashlib.sha256()
    for prompt in prompts:
        tokens.update(json.dumps([prompt.sample.dataset, prompt.context, prompt.tokens]).encode())
    greedy = s.sampling.greedy
    made = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {
            "contenders": bench.names,
            "options": {name: _plain(s.options(name)) for name in s.contenders if name not in PEERS},
            "plan": {name: s.plan_of(name) for name in s.contenders if name not in PEERS},
            "exact": {c.name: c.comparable(greedy, 1) for c in bench.contenders},
            "contexts": s.contexts,
            "batches": s.batches,
            "max_tokens": s.max_tokens,
            "repeats": s.repeats,
            "sampling": asdict(s.sampling),
            "seed": s.seed,
            "raw": s.raw,
            "ignore_eos": s.ignore_eos,
            "cold": s.cold,
            "offload": None if s.offload is None else str(s.offload),
            "data": data,
            "limit": limit,
            # Switches of this package: all but the place of its cache decide how fast something is.
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("LONGDRAFT_") and k != _CACHE},
        },
        "model": {
            "name": model,
            "dtype": str(target.kv_shape.dtype).removeprefix("torch."),
            "device": target.device.type,
            "weights": target.fingerprint,
        },
        "drafts": {c.name: _fingerprint(c.draft) for c in bench.contenders if c.draft is not None},
        "prompts": tokens.hexdigest()[:16],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "notes": bench.notes,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
    }
    found: dict[str, Any] = json.loads(json.dumps(made))  # as it comes back from a file
    return found


class Results:
    """A file that measurements are added to.

    Args:
        header: of this run, as :func:`header` makes it.

    Attributes:
        measured: what was there already.

    Raises:
        ConfigError: the file holds a run with another header; says what differs.
        CheckpointError: it cannot be read or written, or is no results file.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.measured: list[Measured] = []
        if path.exists() and path.stat().st_size:
            kept, there, self.measured = _contents(path)
            if differing := list(_differences(decisive(there), decisive(header))):
                shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
                raise ConfigError(
                    f"{path} holds another run ({shown}). Go on with the same settings, or name another file."
                )
            with _failures(path, "written"), path.open("r+b") as file:
                file.truncate(kept)
        else:
            self._append(header)

    def has(self, group: Group) -> bool:
        """Whether a batch was measured already."""
        return _key(group[0].sample.dataset, group[0].context, [p.sample.origin for p in group]) in {
            _key(m.dataset, m.context, m.samples) for m in self.measured
        }

    def add(self, measured: Measured) -> None:
        """Appends a line, on the disk when this returns."""
        self._append(line(measured))
        self.measured.append(measured)

    def _append(self, content: Mapping[str, Any]) -> None:
        with _failures(self.path, "written"), self.path.open("ab") as file:
            file.write(json.dumps(content).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """The header and the measurements of a file.

    Raises:
        CheckpointError: it cannot be read, or is no results file.
    """
    _, found, measured = _contents(path)
    return found, measured


def line(measured: Measured) -> dict[str, Any]:
    """A measurement as JSON has it."""
    found = asdict(measured) | {"batch": measured.batch, "comparable": sorted(measured.comparable)}
    del found["disagreements"]
    return found | {"differences": [report.difference(d) for d in measured.disagreements]}


def _measured(found: Mapping[str, Any]) -> Measured:
    return Measured(
        dataset=found["dataset"],
        context=found["context"],
        samples=tuple(found["samples"]),
        prompt_tokens=tuple(found["prompt_tokens"]),
        cold={name: _run(run) for name, run in found["cold"].items()},
        rounds={name: [_run(run) for run in runs] for name, runs in found["rounds"].items()},
        disagreements=[_disagreement(d) for d in found["differences"]],
        comparable=frozenset(found["comparable"]),
        peak_memory_bytes=dict(found["peak_memory_bytes"]),
        profiles=dict(found.get("profiles") or {}),
    )


def _run(found: Mapping[str, Any]) -> Run:
    return Run(
        **{
            **found,
            "tokens": tuple(tuple(tokens) for tokens in found["tokens"]),
            "rounds": tuple(found["rounds"]),
            "accepted": tuple((accepted, room) for accepted, room in found["accepted"]),
        }
    )


def _disagreement(d: Mapping[str, Any]) -> Disagreement:
    gap = math.inf if d["gap"] is None else d["gap"]
    difference = Difference(d["position"], d["token"], d["reference"], gap, d["near_tie"])
    return Disagreement(d["method"], d["dataset"], d["sample"], difference)


def _contents(path: Path) -> tuple[int, dict[str, Any], list[Measured]]:
    """Bytes, header and measurements of a file, all without a last line that was cut short."""
    with _failures(path, "read"):
        content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    first, *rest = content[:whole].splitlines() or [b""]
    try:
        found = json.loads(first)
        known = found["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise CheckpointError(f"{path} is not a results file of the bench: give another name.")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {found.get('version')}, and this version of longdraft reads {VERSION}: name "
            "another file."
        )
    measured = []
    for number, text in enumerate(rest, 2):
        try:
            measured.append(_measured(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}:{number} is damaged ({error!r}): delete that line, and run again to measure it anew."
            ) from None
    return whole, found, measured


def _command() -> str:
    """What this process was started with, as a shell takes it."""
    program, *arguments = sys.argv
    name = Path(program).name
    return shlex.join(["longdraft" if name == "__main__.py" else name, *arguments])


def decisive(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header without what changes by itself."""
    hardware = {k: v for k, v in mapping(header.get("hardware")).items() if k not in _LOOSE}
    gpus = [{k: v for k, v in mapping(gpu).items() if k not in _LOOSE} for gpu in hardware.get("gpus") or []]
    said = {k: v for k, v in header.items() if k not in _SAID}
    return {**said, "hardware": {**hardware, "gpus": gpus}}


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """What differs between a file's header and a run's, a text each."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys((*there, *here)):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield f"{name}: {json.dumps(there)} there, {json.dumps(here)} here"


def _key(dataset: str, context: int | None, samples: Iterable[str]) -> tuple[Any, ...]:
    return dataset, context, *samples


def _fingerprint(weights: Path) -> str:
    """Name and content of a file, or of the files of a folder, as far as their ends and sizes tell it."""
    digest = hashlib.sha256()
    for file in sorted(p for p in weights.glob("*") if p.is_file()) if weights.is_dir() else [weights]:
        if file.is_file():  # else a hub id
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_SAMPLE))
                opened.seek(max(0, size - _SAMPLE))
                digest.update(opened.read())
    return f"{weights.name} {digest.hexdigest()[:16]}"


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them."""
    held = (int, float, bool, str, tuple, type(None))
    return {name: x if isinstance(x, held) else str(x) for name, x in options.items()}


@contextmanager
def _failures(path: Path, what: str) -> Iterator[None]:
    """Inside it, a file that cannot be used ends in a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {what}: {error.strerror}.") from error


def mapping(value: Any) -> dict[str, Any]:
    """A value of a results file that should be an object."""
    return dict(value) if isinstance(value, Mapping) else {}
