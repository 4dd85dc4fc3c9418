"""Reports the quality of partial verification: rows for programs, tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench.quality import FULL, METHOD, VARIED, Quality, figures
from longdraft.bench.tables import Report, circumstances, count, figure, filled, median_of, ratio, table

DEFINITIONS = (
    "full: full verification with the same drafter. Its likeness to ar is the noise floor; a variant's is to full, and "
    "that of rounded KV to ar.",
    "ROUGE-L: F1, words stemmed, of a text against its reference; mean and least of the samples.",
    "same: tokens before the first difference, the mean; and their share of the text. equal: identical samples.",
    "nats: mean -log p of the text's tokens by the exact target, means of the samples; ar's own beside it.",
    "tokens/s: new tokens / decode seconds; vs full: over those of full on the same sample; medians, of one run each.",
    "accepted: mean accepted length = new tokens / target forwards, the prefill's token not counted.",
    "score: of the answers against the references, by data set (docs/figures.md); the mean of the samples.",
    "view: rows of the partial cache: first rows + chunks x rows of each + last rows.",
    "partial: target forwards on the partial cache / all of them, after the prefill.",
)
COLUMNS = (
    ("ROUGE-L", "rouge_l_mean", "{:.3f}"),
    ("least", "rouge_l_min", "{:.3f}"),
    ("same", "same_tokens", "{:.1f}"),
    ("share", "same_share", "{:.0%}"),
    ("equal", "identical", "{}"),
    ("nats", "surprise", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("vs full", "speedup_vs_full", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"),
    ("partial", "partial_share", "{:.0%}"),
    ("score", "score", "{:.3f}"),
    ("view", "view", "{}"),
)


def shown(quality: Quality, compared: Sequence[Mapping[str, Any]], complete: bool = True) -> Report:
    """The report of prompts that :meth:`Quality.compare` decoded; keys are those that docs/figures.md defines."""
    groups = [[c for c in compared if c["dataset"] == name] for name in dict.fromkeys(c["dataset"] for c in compared)]
    document = {
        "drafter": quality.drafter,
        "rows": [_row(quality, name, own) for own in groups for name in quality.names],
        "texts": [text for c in compared for text in _texts(quality, c)],
        **circumstances(),
        "complete": complete,
    }
    return Report(document, _tables(document), definitions=DEFINITIONS, name="longdraft bench quality")


def _row(quality: Quality, name: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    variant = quality.settings.variants.get(name)
    rates = [[c["runs"][each]["tokens_per_second"] for c in own] for each in (name, FULL)]
    return {
        "method": METHOD if variant else name,
        **{each: variant and variant.get(each) for each in VARIED},
        "dataset": own[0]["dataset"],
        "context_tokens": round(median(c["context_tokens"] for c in own)),
        "reference": quality.reference(name),
        **figures([c["runs"][name] for c in own]),
        "speedup_vs_full": median_of(map(ratio, *rates)),
        "scored": own[0]["scored"],
    }


def _texts(quality: Quality, compared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A prompt's texts beside their references, for scores that are made elsewhere."""
    runs = compared["runs"]
    return [
        {
            "dataset": compared["dataset"],
            "origin": compared["origin"],
            "method": name,
            "text": run["text"],
            "reference": of,
            "reference_text": None if of is None else runs[of]["text"],
            "answer": run["answer"] if quality.settings.answer_tokens else None,
        }
        for name, run in runs.items()
        for of in [quality.reference(name)]
    ]


def _tables(report: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """A title and a table for each data set."""
    found: dict[str, tuple[str, Table]] = {}
    shown = filled(report["rows"], COLUMNS)
    for row in report["rows"]:
        samples = count(row["samples"], "sample")
        title = f"{row['dataset']}: {samples}, {row['context_tokens']:,} prompt tokens, drafts by {report['drafter']}"
        empty = table(["method", "selector"], ["budget", "margin", *(head for head, *_ in shown)])
        _, made = found.setdefault(row["dataset"], (title, empty))
        contender = (figure(row[key], form) for key, form in (("selector", "{}"), ("budget", "{:,}"), ("margin", "{}")))
        made.add_row(Text(row["method"]), *contender, *(figure(row[key], form) for _, key, form in shown))
    return list(found.values())
