"""One chapter of the report: the tables and charts of measurements that can be set beside each other."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longdraft.bench import charts, report, tree_drawing
from longdraft.bench import report_words as words
from longdraft.bench.charts import DARK, LIGHT, Chart, Look, Point
from longdraft.bench.profile import PARTS
from longdraft.bench.report_parts import Part, profiles
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import figure
from longdraft.memory.sizes import human

NONE = "\N{EN DASH}"  # where there is no figure
MEMORY = {"weights": "weights", "packed": "packed copy", "kv": "KV cache", "draft": "draft", "peak": "peak"}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text, what stands smaller beside it, a CSS class, a method's colours."""

    text: str
    beside: str = ""
    kind: str = ""
    own: tuple[str, str] | None = None


Row = Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """Rows come in groups, a line between them: a group for each context."""

    heads: Sequence[str]
    groups: Sequence[Sequence[Row]]
    caption: str = ""

    def filled(self) -> Table:
        """Without the columns that no row has anything in."""
        rows = [row for group in self.groups for row in group]
        kept = [i for i in range(len(self.heads)) if any(row[i].text not in ("", NONE) for row in rows)]
        groups = [[[row[i] for i in kept] for row in group] for group in self.groups]
        return Table([self.heads[i] for i in kept], groups, self.caption)


@dataclass(frozen=True)
class Picture:
    """A chart in the page: two data URIs, and what is said to those who cannot see it."""

    light: str
    dark: str
    alt: str


class Chapter:
    """Args:
        look: of every method of the report.
        prefix: of the names of the chart files.

    Attributes:
        images: the charts that were drawn, as PNG by file name.
    """

    def __init__(self, part: Part, look: Mapping[str, Look], prefix: str = "") -> None:
        self._part, self._look, self._prefix = part, look, prefix
        self._profiles = profiles(part)
        self.images: dict[str, bytes] = {}
        # Tables and charts come for each dataset and batch size: only contexts share an axis.
        self._groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in part.rows:
            self._groups.setdefault((row["dataset"], row["batch"]), []).append(row)

    def content(self) -> dict[str, Any]:
        """Values for the template."""
        part = self._part
        return {
            "title": words.title(part),
            "headline": words.headline(part),
            "basis": words.basis(part),
            "circumstances": words.circumstances(part),
            "figures": [self._figures(key, rows) for key, rows in self._groups.items()],
            "speed": [
                *self._by_context("tokens/s", "tokens_per_second", "tokens_per_second_spread"),
                *self._by_context("speed-up over ar", "speedup_vs_ar", "speedup_vs_ar_range", 1.0),
            ],
            "acceptance": [*self._by_context("accepted length", "mean_accepted_length", None, 1.0), *self._depths()],
            "rounds": self._round_charts(),
            "round_tables": self._round_tables(),
            "memory": self._memory(),
            "trees": self._trees(),
            "differences": [{"mismatch": not d["near_tie"], "text": words.difference(d)} for d in part.differences],
            "agreement": words.agreement(part),
            "facts": words.facts(part),
            "commands": part.commands,
        }

    def _name(self, group: tuple[str, int]) -> str:
        """Name of a data set, with the batch size if there are several or one above 1."""
        dataset, batch = group
        return dataset + (f", batches of {batch}" if batch > 1 or len({b for _, b in self._groups}) > 1 else "")

    def _method(self, name: str) -> Cell:
        return Cell(name, own=self._look[name].colours)

    # --- the table of figures ---

    def _figures(self, group: tuple[str, int], rows: list[dict[str, Any]]) -> Table:
        shown = report.columns(rows)
        figures = [h for head, key, _ in shown for h in (head, *(["from \N{EN DASH} to"] * (key == "speedup_vs_ar")))]
        heads = ["method", "context", *figures, "spread of tokens/s", "prompts", "differ"]
        groups: dict[int | None, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row["context_tokens"]):
            alike = [other["speedup_vs_ar"] or 0.0 for other in rows if other["context"] == row["context"]]
            best = "best" if row["speedup_vs_ar"] and row["speedup_vs_ar"] == max(alike) else ""
            cells = [
                self._method(row["method"]),
                Cell(f"{row['context_tokens']:,}"),
                *(cell for _, key, form in shown for cell in _figure(row, key, form, best)),
                Cell(_range(row.get("tokens_per_second_spread"), ".1f"), kind="spread"),
                Cell(f"{row['samples']:,}"),
                _differing(row),
            ]
            groups.setdefault(row["context"], []).append(cells)
        return Table(heads, list(groups.values()), self._name(group)).filled()

    # --- charts over contexts ---

    def _by_context(self, label: str, key: str, spread: str | None, reference: float | None = None) -> list[Picture]:
        """A chart for each dataset and batch size that has the figure."""
        found = []
        for group, rows in self._groups.items():
            series: dict[str, list[Point]] = {}
            for row in sorted(rows, key=lambda row: row["context_tokens"]):
                # ar is the line at 1.
                if row.get(key) is not None and not (reference and row["method"] == REFERENCE):
                    ends = (spread and row.get(spread)) or (None, None)
                    series.setdefault(row["method"], []).append(Point(row["context_tokens"], row[key], *ends))
            if series:
                title = f"{label[0].upper()}{label[1:]}: {self._name(group)}"
                chart = charts.Lines(title, series, self._look, "prompt tokens", label, reference=reference)
                found.append(self._drawn(f"{label} {self._name(group)}", title, chart))
        return found

    def _depths(self) -> list[Picture]:
        """One chart of all prompts: how deep rounds accepted what was drafted."""
        series: dict[str, list[Point]] = {}
        for name in self._part.names:
            rounds = [pair for m in self._part.measured for run in m.rounds.get(name, []) for pair in run.accepted]
            shares = report.depth_accepted(rounds)
            # Behind the deepest there is none: the line ends there, not in the air.
            series[name] = [Point(depth, share) for depth, share in enumerate([*shares, 0.0], 1)] if shares else []
        if not any(series.values()):
            return []
        title = "Of all rounds, those that accepted so many drafted tokens or more"
        chart = charts.Lines(title, series, self._look, "drafted tokens accepted", "share of rounds", share=True)
        return [self._drawn("accepted by depth", title, chart)]

    # --- what the profile says ---

    def _round_charts(self) -> list[Picture]:
        found = []
        for group, own in self._profiled().items():
            several = len({p["context_tokens"] for p in own}) > 1
            bars = [
                (
                    p["method"] + (f" at {p['context_tokens']:,}" if several else ""),
                    {part: 1000 * p["seconds"].get(part, 0.0) for part in PARTS},
                )
                for p in own
            ]
            title = f"A round: {self._name(group)}" + (
                "" if several else f", {own[0]['context_tokens']:,} prompt tokens"
            )
            found.append(self._drawn(f"round {self._name(group)}", title, charts.Stacked(title, bars, "ms a round")))
        return found

    def _round_tables(self) -> list[Table]:
        heads = ["method", "context", "round", *(charts.PART_NAMES[part] for part in PARTS), "context's share of keys"]
        found = []
        for group, own in self._profiled().items():
            groups: dict[int, list[Row]] = {}
            for p in own:
                cells = [
                    self._method(p["method"]),
                    Cell(f"{p['context_tokens']:,}"),
                    Cell(f"{1000 * sum(p['seconds'].values()):,.1f} ms"),
                    *(_part_of_round(p["seconds"], part) for part in PARTS),
                    Cell(figure(p["prefix_share"], "{:.1%}", NONE)),
                ]
                groups.setdefault(p["context_tokens"], []).append(cells)
            rounds = sorted({p["rounds"] for p in own})
            count = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
            caption = f"{self._name(group)}: means of {count} rounds"
            found.append(Table(heads, list(groups.values()), caption).filled())
        return found

    def _profiled(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for p in sorted(self._profiles, key=lambda p: p["context_tokens"]):
            found.setdefault((p["dataset"], p["batch"]), []).append(p)
        return found

    def _memory(self) -> Table | None:
        """Memory by the profile, or the peaks alone: the maximum over all data sets."""
        held: dict[tuple[int | None, int, str], dict[str, int]] = {}
        tokens: dict[int | None, int] = {}
        for row in sorted(self._part.rows, key=lambda row: row["context_tokens"]):
            own = held.setdefault((row["context"], row["batch"], row["method"]), {})
            _most(own, {"peak": row.get("peak_memory_bytes")})
            tokens[row["context"]] = max(row["context_tokens"], tokens.get(row["context"], 0))
        for p in self._profiles:
            _most(held[p["context"], p["batch"], p["method"]], p["memory"])
        parts = [name for name in MEMORY if any(own.get(name) for own in held.values())]
        batches = len({batch for _, batch, _ in held}) > 1
        groups: dict[tuple[int | None, int], list[Row]] = {}
        for (context, batch, method), own in held.items():
            where = [Cell(f"{tokens[context]:,}"), *([Cell(str(batch))] if batches else [])]
            sizes = [Cell(human(own[name]) if name in own else NONE) for name in parts]
            if own:
                groups.setdefault((context, batch), []).append([self._method(method), *where, *sizes])
        heads = ["method", "context", *(["batch"] if batches else []), *(MEMORY[name] for name in parts)]
        return Table(heads, list(groups.values())) if groups else None

    def _trees(self) -> list[dict[str, Any]]:
        """One tree a method: that of its first profile."""
        found: dict[str, dict[str, Any]] = {}
        for p in self._profiles:
            tree = p["tree"]
            if tree and p["method"] not in found:
                accepted, drafted = len(tree["path"]) - 1, len(tree["tokens"]) - 1
                caption = (
                    f"{p['method']}, {p['dataset']}, {p['context_tokens']:,} prompt tokens: {accepted} of {drafted} "
                    "drafted tokens accepted"
                )
                found[p["method"]] = {"caption": caption, "text": tree_drawing.draw(tree)}
        return list(found.values())

    def _drawn(self, name: str, alt: str, chart: Chart) -> Picture:
        """Draws a chart for the page and for a file."""
        self.images[_file_name(self._prefix + name, self.images)] = charts.png(chart)
        light, dark = (_data_uri(charts.svg(chart, theme)) for theme in (LIGHT, DARK))
        return Picture(light, dark, alt)


def _figure(row: Mapping[str, Any], key: str, form: str, best: str) -> list[Cell]:
    """A figure; behind a speed-up over ``ar``, the least and the largest of its prompts."""
    text = figure(row.get(key), form, NONE)
    if key != "speedup_vs_ar":
        return [Cell(text)]
    return [Cell(text, kind=best), Cell(_range(row.get("speedup_vs_ar_range"), ".2f"), kind="spread")]


def _differing(row: Mapping[str, Any]) -> Cell:
    if row["mismatches"] is None:
        return Cell("not comparable", kind="muted")
    ties = f"{row['near_ties']} near" if row["near_ties"] else ""
    if row["mismatches"]:
        return Cell(str(row["mismatches"]), beside=ties, kind="bad")
    return Cell(ties or "0")


def _part_of_round(seconds: Mapping[str, float], part: str) -> Cell:
    whole = sum(seconds.values())
    own = seconds.get(part, 0.0)
    return Cell(f"{1000 * own:,.1f} ms", f"{own / whole:.0%}" if whole else "")


def _range(spread: Sequence[float] | None, form: str) -> str:
    return "" if not spread or spread[0] == spread[-1] else f"{spread[0]:{form}}\N{EN DASH}{spread[-1]:{form}}"


def _most(own: dict[str, int], more: Mapping[str, int | None]) -> None:
    """Raises sizes to those of ``more``."""
    for name, size in more.items():
        if size is not None:
            own[name] = max(size, own.get(name, 0))


def _file_name(name: str, taken: Iterable[str]) -> str:
    """``tokens-s-qmsum.png``: letters, digits and hyphens, whatever a dataset is called."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    candidates = (f"{plain}{suffix}.png" for suffix in ("", *(f"-{i}" for i in range(2, 10_000))))
    return next(candidate for candidate in candidates if candidate not in taken)


def _data_uri(data: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode("ascii")
