"""Reports the quality of partial verification: rows for programs, tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench.drift import Drift, bucket
from longdraft.bench.quality import FULL, METHOD, REFERENCE, Answered, Compared, Likeness, Quality
from longdraft.bench.tables import circumstances, count, figure, filled, mean_of, median_of, ratio, table

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
DRIFT_DEFINITION = (
    "drift: cosine of hidden states to those of one full forward over the same text, means of the tokens whose "
    "distance from the last full pass lies in the bucket; 0: computed by a full pass. least: of any token and layer."
)
NEEDLE_DEFINITION = (
    "needle: answers whose first number is the code, by depth of the needle in the text (several: that of the one that "
    "is asked for). tracking: share of the names of variables that are in the answer."
)

LIKENESS = ("rouge_l_mean", "rouge_l_min", "same_tokens", "same_share", "identical")
COLUMNS = (
    ("ROUGE-L", "rouge_l_mean", "{:.3f}"),
    ("least", "rouge_l_min", "{:.3f}"),
    ("same", "same_tokens", "{:.1f}"),
    ("share", "same_share", "{:.0%}"),
    ("equal", "equal", "{}"),
    ("nats", "surprise", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("vs full", "speedup_vs_full", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"),
    ("partial", "partial_share", "{:.0%}"),
    ("score", "score", "{:.3f}"),
    ("view", "view", "{}"),
)


def document(
    quality: Quality, compared: Sequence[Compared], asked: Sequence[str] = (), answered: Sequence[Answered] = ()
) -> dict[str, Any]:
    """The report as one JSON object, with the keys that docs/figures.md defines.

    Args:
        asked: contenders of the needle test. answered: its haystacks.
    """
    groups: dict[str, list[Compared]] = {}
    for c in compared:
        groups.setdefault(c.prompt.sample.dataset, []).append(c)
    kinds: dict[str, list[Answered]] = {}
    for a in answered:
        kinds.setdefault(a.haystack.kind, []).append(a)
    order = [REFERENCE, FULL, *quality.approximate]
    return {
        "drafter": quality.drafter,
        "layers": list(quality.runner.layers),
        "rows": [_row(quality, name, own) for own in groups.values() for name in order],
        "drift": [row for own in groups.values() for name in quality.variants for row in _drift(quality, name, own)],
        "needle": [_needle(quality, name, own) for own in kinds.values() for name in asked],
        "texts": _answers(quality, compared),
        **circumstances(),
    }


def _answers(quality: Quality, compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Every text beside its reference, for scores that are made elsewhere."""
    return [
        {
            "dataset": c.prompt.sample.dataset,
            "origin": c.prompt.sample.origin,
            "method": name,
            "text": quality.text(run.tokens),
            "reference": of,
            "reference_text": None if of is None else quality.text(c.runs[of].tokens),
            "answer": c.answers[name] if quality.settings.answer_tokens else None,
        }
        for c in compared
        for name, run in c.runs.items()
        for of in [quality.reference(name)]
    ]


def _head(quality: Quality, name: str) -> dict[str, Any]:
    variant = quality.variants.get(name)
    return {
        "method": METHOD if variant else name,
        "selector": variant and variant.selector,
        "budget": variant and variant.budget,
        "margin": variant and variant.margin,
    }


def _row(quality: Quality, name: str, own: Sequence[Compared]) -> dict[str, Any]:
    runs = [c.runs[name] for c in own]
    likeness = [c.likeness[name] for c in own if name in c.likeness]
    rounds = sum(r.rounds for r in runs)
    return {
        **_head(quality, name),
        "dataset": own[0].prompt.sample.dataset,
        "context_tokens": round(median(len(c.prompt.tokens) for c in own)),
        "samples": len(own),
        "reference": quality.reference(name),
        **(_likeness(likeness) if likeness else dict.fromkeys(LIKENESS)),
        "surprise": mean(r.surprise for r in runs if r.surprise is not None),
        "tokens_per_second": median_of(r.tokens_per_second for r in runs),
        "speedup_vs_full": median_of(
            ratio(c.runs[name].tokens_per_second, c.runs[FULL].tokens_per_second) for c in own
        ),
        "mean_accepted_length": sum(len(r.tokens) - 1 for r in runs) / rounds if rounds else None,
        "partial_share": sum(r.partial_rounds for r in runs) / rounds if rounds else None,
        "scored": own[0].prompt.sample.score or None,
        "score": mean_of(c.scores.get(name) for c in own),
        "view": quality.seen(name),
    }


def _likeness(found: Sequence[Likeness]) -> dict[str, float]:
    scores = [x.rouge_l for x in found]
    values = mean(scores), min(scores), mean(x.same for x in found), mean(x.share for x in found)
    return dict(zip(LIKENESS, (*values, sum(x.share == 1.0 for x in found)), strict=True))


def _drift(quality: Quality, name: str, own: Sequence[Compared]) -> list[dict[str, Any]]:
    """A row for each bucket of distances."""
    buckets: dict[tuple[int, int], list[Drift]] = {}
    for token in (d for c in own for d in c.drifts.get(name, [])):
        buckets.setdefault(bucket(token.distance), []).append(token)
    found = []
    for (first, last), tokens in sorted(buckets.items()):
        columns = zip(quality.runner.layers, zip(*(t.cosines for t in tokens), strict=True), strict=True)
        found.append(
            {
                **_head(quality, name),
                "dataset": own[0].prompt.sample.dataset,
                "first": first,
                "last": last,
                "tokens": len(tokens),
                "cosine": {str(layer): mean(values) for layer, values in columns},
                "cosine_min": min(min(t.cosines) for t in tokens),
            }
        )
    return found


def _needle(quality: Quality, name: str, answered: Sequence[Answered]) -> dict[str, Any]:
    rounds = sum(a.runs[name].rounds for a in answered)
    partial = sum(a.runs[name].partial_rounds for a in answered)
    return {
        **_head(quality, name),
        "kind": answered[0].haystack.kind,
        "context_tokens": round(median(len(a.haystack.tokens) for a in answered)),
        **_found(name, answered),
        "by_depth": [
            {"depth": depth, **_found(name, [a for a in answered if a.haystack.depth == depth])}
            for depth in sorted({a.haystack.depth for a in answered})
        ],
        "partial_share": partial / rounds if rounds else None,
    }


def _found(name: str, answered: Sequence[Answered]) -> dict[str, float]:
    return {"asked": len(answered), "found": sum(a.right[name] for a in answered)}


def tables(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """Titles and tables for people."""
    found: list[tuple[str, Table]] = []
    for dataset in dict.fromkeys(row["dataset"] for row in report["rows"]):
        own = [row for row in report["rows"] if row["dataset"] == dataset]
        samples = count(own[0]["samples"], "sample")
        title = f"{dataset}: {samples}, {own[0]['context_tokens']:,} prompt tokens, drafts by {report['drafter']}"
        found.append((title, _texts(own)))
        if drift := [row for row in report["drift"] if row["dataset"] == dataset]:
            found.append((f"{dataset}: drift by layer and distance from the last full pass", _drifts(drift)))
    for kind in dict.fromkeys(row["kind"] for row in report["needle"]):
        needles = [row for row in report["needle"] if row["kind"] == kind]
        title = f"needle, {kind}: {needles[0]['asked']} asked, {needles[0]['context_tokens']:,} tokens"
        found.append((title, _needles(needles)))
    return found


def definitions(report: dict[str, Any]) -> list[str]:
    """Definitions of the figures in the tables present."""
    return [
        *(DEFINITIONS if report["rows"] else ()),
        *((DRIFT_DEFINITION,) if report["drift"] else ()),
        *((NEEDLE_DEFINITION,) if report["needle"] else ()),
    ]


def _texts(rows: Sequence[dict[str, Any]]) -> Table:
    equal = (None if row["identical"] is None else f"{row['identical']}/{row['samples']}" for row in rows)
    rows = [row | {"equal": share} for row, share in zip(rows, equal, strict=True)]
    shown = filled(rows, COLUMNS)
    made = _table(*(head for head, *_ in shown))
    for row in rows:
        made.add_row(*_names(row), *(figure(row[key], form) for _, key, form in shown))
    return made


def _drifts(rows: Sequence[dict[str, Any]]) -> Table:
    layers = list(rows[0]["cosine"])
    made = _table("distance", "tokens", *(f"layer {layer}" for layer in layers), "least")
    for row in rows:
        distance = str(row["first"]) if row["first"] == row["last"] else f"{row['first']}-{row['last']}"
        cosines = (f"{value:.4f}" for value in (*row["cosine"].values(), row["cosine_min"]))
        made.add_row(*_names(row), distance, str(row["tokens"]), *cosines)
    return made


def _needles(rows: Sequence[dict[str, Any]]) -> Table:
    made = _table("found", *(f"at {each['depth']:g}" for each in rows[0]["by_depth"]), "partial")
    for row in rows:
        shares = (f"{each['found']:g}/{each['asked']}" for each in row["by_depth"])
        partial = figure(row["partial_share"], "{:.0%}")
        made.add_row(*_names(row), f"{row['found']:g}/{row['asked']}", *shares, partial)
    return made


def _names(row: dict[str, Any]) -> list[Text | str]:
    budget, margin = (figure(row[key], "{:,}") for key in ("budget", "margin"))
    return [Text(row["method"]), row["selector"] or "-", budget, margin]


def _table(*figures: str) -> Table:
    """Contender columns on the left, figures behind them."""
    return table(["method", "selector"], ["budget", "margin", *figures])
