"""One chapter of the report: the tables and charts of measurements that can be set beside each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from longdraft.bench import charts, report, tree_drawing
from longdraft.bench import report_words as words
from longdraft.bench.charts import Point, Style
from longdraft.bench.report_parts import Part, profiles
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import depth_accepted, figure
from longdraft.memory.sizes import human

MISSING = "\N{EN DASH}"
MEMORY = {"weights": "weights", "packed": "packed copy", "kv": "KV cache", "draft": "draft", "peak": "peak"}

Row = dict[str, Any]
Group = tuple[str, int]
"""A dataset and a batch size."""


@dataclass(frozen=True)
class Table:
    """A table of the page; the first cell of a row is a method's name."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def _table(caption: str, rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """A table whose columns are made of the rows; a column without any figure is left out."""
    cells = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if any(x not in ("", MISSING) for x in column)}
    return Table(caption, list(cells), list(zip(*cells.values(), strict=True)))


class Chapter:
    """The tables and charts of one part.

    Args:
        style: the style of every method of the report.
        prefix: begins the names of the chart files.

    Attributes:
        images: every chart as a PNG file, by file name.
    """

    def __init__(self, part: Part, style: Mapping[str, Style], prefix: str = "") -> None:
        self._part, self._style, self._prefix = part, style, prefix
        self._rows = _grouped(part.rows)
        self._profiles = _grouped(profiles(part))
        self.images: dict[str, bytes] = {}

    def content(self) -> dict[str, Any]:
        """The template's variables."""
        part = self._part
        speed = ("tokens/s", "tokens_per_second", "tokens_per_second_spread", None)
        speedup = ("speed-up over ar", "speedup_vs_ar", "speedup_vs_ar_range", 1.0)
        accepted = ("accepted length", "mean_accepted_length", "", 1.0)
        return {
            "title": words.title(part),
            "headline": words.headline(part),
            "figures": [self._figures(group, rows) for group, rows in self._rows.items()],
            "speed": [*self._by_context(*speed), *self._by_context(*speedup)],
            "acceptance": [*self._by_context(*accepted), *self._depths()],
            "rounds": [self._round_chart(group, own) for group, own in self._profiles.items()],
            "round_tables": [self._round_table(group, own) for group, own in self._profiles.items()],
            "memory": self._memory(),
            "trees": self._trees(),
            "differences": [{"mismatch": not d["near_tie"], "text": words.difference(d)} for d in part.differences],
            "agreement": words.agreement(part),
            "facts": words.facts(part),
            "commands": part.commands,
        }

    def _name(self, group: Group) -> str:
        dataset, batch = group
        return dataset + (f", batches of {batch}" if len({b for _, b in self._rows}) > 1 or batch > 1 else "")

    def _figures(self, group: Group, rows: list[Row]) -> Table:
        columns: dict[str, Callable[[Row], str]] = {"method": _method, "context": _context}
        for head, key, form in report.columns(rows):
            columns[head] = lambda row, key=key, form=form: figure(row.get(key), form, MISSING)  # type: ignore[misc]
            if key == "speedup_vs_ar":
                columns["from \N{EN DASH} to"] = lambda row: _range(row.get("speedup_vs_ar_range"), ".2f")
        columns["spread of tokens/s"] = lambda row: _range(row.get("tokens_per_second_spread"), ".1f")
        columns |= {"prompts": lambda row: f"{row['samples']:,}", "differ": _differing}
        return _table(self._name(group), rows, columns)

    def _by_context(self, label: str, key: str, spread: str, reference: float | None) -> list[Markup]:
        """A chart over contexts for each dataset and batch size that has the figure."""
        found = []
        for group, rows in self._rows.items():
            series: dict[str, list[Point]] = defaultdict(list)
            for row in rows:
                # The line of the reference is that of ar.
                if row.get(key) is not None and not (reference and row["method"] == REFERENCE):
                    point = Point(row["context_tokens"], row[key], *(row.get(spread) or ()))
                    series[row["method"]].append(point)
            if series:
                title = f"{label[0].upper()}{label[1:]}: {self._name(group)}"
                drawn = charts.lines(title, series, self._style, "prompt tokens", label, reference)
                found.append(self._kept(f"{label} {self._name(group)}", drawn))
        return found

    def _depths(self) -> list[Markup]:
        """A chart of all prompts: the share of rounds that accepted so many drafted tokens."""
        series = {}
        for name in self._part.names:
            rounds = [pair for m in self._part.measured for run in m.rounds.get(name, []) for pair in run.accepted]
            if shares := depth_accepted(rounds):
                # Deeper than the deepest there is none: the line ends at 0.
                series[name] = [Point(depth, share) for depth, share in enumerate([*shares, 0.0], 1)]
        if not series:
            return []
        title = "Rounds that accepted this many drafted tokens or more"
        drawn = charts.lines(title, series, self._style, "drafted tokens accepted", "share of rounds", share=True)
        return [self._kept("accepted by depth", drawn)]

    def _round_chart(self, group: Group, own: list[Row]) -> Markup:
        bars = {
            f"{p['method']} at {p['context_tokens']:,}": {part: 1000 * s for part, s in p["seconds"].items()}
            for p in own
        }
        drawn = charts.stacked(f"A round: {self._name(group)}", bars, "ms a round")
        return self._kept(f"round {self._name(group)}", drawn)

    def _round_table(self, group: Group, own: list[Row]) -> Table:
        columns: dict[str, Callable[[Row], str]] = {
            "method": _method,
            "context": _context,
            "round": lambda p: f"{1000 * sum(p['seconds'].values()):,.1f} ms",
        }
        for part, (name, _) in charts.PARTS.items():
            columns[name] = lambda p, part=part: _share_of_round(p["seconds"], part)  # type: ignore[misc]
        columns["context's share of keys"] = lambda p: figure(p["prefix_share"], "{:.1%}", MISSING)
        return _table(self._name(group), own, columns)

    def _memory(self) -> Table | None:
        """The bytes that each method held, the most over all datasets."""
        held: dict[tuple[Any, ...], Row] = {}
        profiled = [p | {"memory": dict(p["memory"])} for own in self._profiles.values() for p in own]
        for row in [*(row for rows in self._rows.values() for row in rows), *profiled]:
            own = held.setdefault((row["context"], row["batch"], row["method"]), {**row, "context_tokens": 0})
            own["context_tokens"] = max(own["context_tokens"], row["context_tokens"])
            for name, size in {"peak": row.get("peak_memory_bytes"), **row.get("memory", {})}.items():
                own[name] = max(size or 0, own.get(name, 0))
        sizes = {
            head: lambda row, name=name: human(row[name]) if row.get(name) else "" for name, head in MEMORY.items()
        }
        columns = {
            "method": _method,
            "context": _context,
            "batch": lambda row: f"{row['batch']}" if row["batch"] > 1 else "",
            **sizes,
        }
        found = _table("", list(held.values()), columns)
        return found if set(found.heads) & set(MEMORY.values()) else None

    def _trees(self) -> list[dict[str, str]]:
        """A tree of each method, from its first profile."""
        found: dict[str, dict[str, str]] = {}
        for p in (p for own in self._profiles.values() for p in own):
            if (tree := p["tree"]) and p["method"] not in found:
                counts = f"{len(tree['path']) - 1} of {len(tree['tokens']) - 1} drafted tokens accepted"
                caption = f"{p['method']}, {p['dataset']}, {p['context_tokens']:,} prompt tokens: {counts}"
                found[p["method"]] = {"caption": caption, "text": tree_drawing.draw(tree)}
        return list(found.values())

    def _kept(self, name: str, drawn: Any) -> Markup:
        """The SVG of a chart for the page; its PNG is kept for a file."""
        self.images[_file_name(self._prefix + name, self.images)] = charts.image(drawn, "png")
        return Markup(charts.inline(drawn))


def _grouped(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Rows by dataset and batch size, the shortest context first: only contexts share an axis."""
    found: dict[Group, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["context_tokens"]):
        found.setdefault((row["dataset"], row["batch"]), []).append(row)
    return found


def _method(row: Row) -> str:
    return str(row["method"])


def _context(row: Row) -> str:
    return f"{row['context_tokens']:,}"


def _differing(row: Row) -> str:
    if row["mismatches"] is None:
        return "not comparable"
    return f"{row['mismatches']}" + (f" (and {row['near_ties']} near)" if row["near_ties"] else "")


def _share_of_round(seconds: Mapping[str, float], part: str) -> str:
    total, own = sum(seconds.values()), seconds.get(part, 0.0)
    return f"{1000 * own:,.1f} ms ({own / total:.0%})" if total else MISSING


def _range(spread: Sequence[float] | None, form: str) -> str:
    return "" if not spread or spread[0] == spread[-1] else f"{spread[0]:{form}}\N{EN DASH}{spread[-1]:{form}}"


def _file_name(name: str, taken: Iterable[str]) -> str:
    """A name such as ``tokens-s-qmsum.png``: letters, digits and hyphens, whatever the dataset's name."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    candidates = (f"{plain}{suffix}.png" for suffix in ("", *(f"-{i}" for i in range(2, 10_000))))
    return next(candidate for candidate in candidates if candidate not in taken)
