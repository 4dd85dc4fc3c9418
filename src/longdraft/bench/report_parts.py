"""Reads results files, and joins those whose figures can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from longdraft.bench import report, results, tree_drawing
from longdraft.bench.json_lines import decisive, mapping
from longdraft.bench.run import Measured
from longdraft.errors import CheckpointError

Cell = tuple[str, int | None, int]
"""Dataset, requested context, batch size."""

# Settings that may differ within a part: they choose prompts and methods, and do not change how these are measured.
_WHICH = ("contenders", "options", "exact", "contexts", "batches", "data", "limit")


@dataclass
class Part:
    """Measurements of one model on one machine, measured alike.

    Attributes:
        header: the first file's.
        names: contenders, in the order of the tables.
        rows: as :func:`longdraft.bench.report.rows` makes them, of all files.
        measured: the batches that the rows sum up.
        notes: a remark on a contender, by name.
        made, commands: time and command line that each file was begun with.
        contenders: by name, what has to be the same in all files: its draft and its options.
    """

    paths: list[Path]
    header: Mapping[str, Any]
    names: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    contenders: dict[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> set[Cell]:
        return {(m.dataset, m.context, m.batch) for m in self.measured}

    @property
    def differences(self) -> list[dict[str, Any]]:
        """Samples whose tokens are not those of ``ar``; mismatches first."""
        found = [report.difference(d) for m in self.measured for d in m.disagreements]
        return sorted(found, key=lambda d: bool(d["near_tie"]))

    def setting(self, name: str) -> Any:
        return mapping(self.header.get("settings")).get(name)


def parts(paths: Sequence[Path]) -> list[Part]:
    """Reads results files. Those that were measured alike, each on prompts of its own, make one part.

    Raises:
        CheckpointError: a file that cannot be read, is no results file, or has no measurement.
    """
    found: list[Part] = []
    for path in paths:
        one = _read(path)
        home = next((part for part in found if _alike(part, one)), None)
        if home is None:
            found.append(one)
        else:
            _join(home, one)
    return found


def profiles(part: Part) -> list[dict[str, Any]]:
    """A part's profiles, one for each method, dataset, context and batch: the mean of its samples'."""
    cells: dict[tuple[str, Cell], list[tuple[Measured, Mapping[str, Any]]]] = {}
    for m in part.measured:
        for name, profile in m.profiles.items():
            cells.setdefault((name, (m.dataset, m.context, m.batch)), []).append((m, profile))
    rows = {(row["method"], (row["dataset"], row["context"], row["batch"])): row for row in part.rows}
    found = []
    for key, own in cells.items():
        each = [profile for _, profile in own]
        shares = [p["prefix_share"] for p in each if p["prefix_share"] is not None]
        found.append(
            {
                **{name: rows[key][name] for name in ("method", "dataset", "context", "context_tokens", "batch")},
                "seconds": {part: mean(p["seconds"].get(part, 0.0) for p in each) for part in each[0]["seconds"]},
                "prefix_share": mean(shares) if shares else None,
                "memory": {name: max(p["memory"].get(name, 0) for p in each) for name in each[0]["memory"]},
                "tree": next((p["tree"] for p in each if p["tree"]), None),
            }
        )
    return found


def _read(path: Path) -> Part:
    header, measured = results.read(path)
    if not measured:
        raise CheckpointError(f"{path} has no measurement yet: let `longdraft bench --results {path}` go on.")
    for m in measured:
        for name, profile in m.profiles.items():
            try:
                _check(profile)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise CheckpointError(
                    f"{path}: the profile of {name} on {', '.join(m.samples)} is none that the bench wrote. "
                    "Measure again, or take the line out."
                ) from None
    settings = mapping(header.get("settings"))
    asked = settings.get("contenders") or list(measured[0].rounds)
    names = [name for name in asked if all(name in m.rounds for m in measured)]
    part = Part([path], header, names, report.rows(names, measured), measured)
    part.notes = mapping(header.get("notes"))
    part.made = [str(header["created"])] if header.get("created") else []
    part.commands = [str(header["command"])] if header.get("command") else []
    drafts, options = mapping(header.get("drafts")), mapping(settings.get("options"))
    part.contenders = {name: (drafts.get(name), options.get(name)) for name in names}
    return part


def _check(profile: Mapping[str, Any]) -> None:
    """Raises what reading a profile raises that the bench did not write."""
    numbers = [profile["rounds"], *profile["seconds"].values(), *profile["memory"].values()]
    shares = [] if profile["prefix_share"] is None else [profile["prefix_share"]]
    if not profile["seconds"] or not all(isinstance(x, int | float) for x in numbers + shares):
        raise ValueError("not a number")
    if profile["tree"] is not None:
        tree_drawing.draw(profile["tree"])


def _alike(a: Part, b: Part) -> bool:
    shared = a.contenders.keys() & b.contenders.keys()
    same_methods = all(a.contenders[name] == b.contenders[name] for name in shared)
    return _kind(a) == _kind(b) and same_methods and not a.cells & b.cells


def _join(home: Part, other: Part) -> None:
    home.paths += other.paths
    home.names += [name for name in other.names if name not in home.names]
    home.rows += other.rows
    home.measured += other.measured
    home.notes |= other.notes
    home.made += other.made
    home.commands += other.commands
    home.contenders |= other.contenders


def _kind(part: Part) -> tuple[Any, ...]:
    """Values that have to be equal for figures to be set beside each other."""
    header = decisive(part.header)
    settings = {name: x for name, x in mapping(header.get("settings")).items() if name not in _WHICH}
    return header["hardware"], header.get("model"), header.get("versions"), settings
