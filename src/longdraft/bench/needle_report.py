"""Reports how well drafters predict needles: rows for programs, tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench.needle import TARGET, Foreseen
from longdraft.bench.tables import Report, circumstances, count, mean_of, table

DEFINITIONS = (
    "accuracy: tokens of the needle, the first excepted, that are the view's first choice given all before them.",
    "perplexity: exp of the mean negative log-likelihood the view gives them, but for those that its vocabulary lacks.",
    f"code: the same of the code's tokens alone. {TARGET}: the target on its full KV, which drafts nothing.",
)
FIGURES = ("accuracy", "perplexity", "code_accuracy", "code_perplexity")


def shown(measured: Sequence[Mapping[str, Any]], names: Sequence[str], complete: bool = True) -> Report:
    """The report of haystacks that views were asked for; keys are those that docs/figures.md defines.

    Args:
        names: the views, in the order of the rows.
    """
    groups = [[m for m in measured if m["context"] == n] for n in dict.fromkeys(m["context"] for m in measured)]
    rows = [_row(name, own) for own in groups for name in names]
    document = {"rows": rows, **circumstances(), "complete": complete}
    return Report(document, _tables(rows), definitions=DEFINITIONS, name="longdraft bench needle")


def _row(name: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    at: dict[float, list[Foreseen]] = {}
    for m in sorted(own, key=lambda m: m["depth"]):
        at.setdefault(m["depth"], []).extend(Foreseen(*token) for token in m["tokens"][name])
    tokens = [token for found in at.values() for token in found]
    code = [token for token in tokens if token.code]
    return {
        "view": name,
        "context": own[0]["context"],
        "context_tokens": round(median(m["context_tokens"] for m in own)),
        "haystacks": len(own),
        "tokens": len(tokens),
        "accuracy": accuracy(tokens),
        "perplexity": perplexity(tokens),
        "code_tokens": len(code),
        "code_accuracy": accuracy(code),
        "code_perplexity": perplexity(code),
        "lacking": sum(token.log_prob is None for token in tokens),
        "by_depth": [{"depth": depth, "accuracy": accuracy(found)} for depth, found in at.items()],
    }


def accuracy(tokens: Sequence[Foreseen]) -> float | None:
    return mean_of(float(token.right) for token in tokens)


def perplexity(tokens: Sequence[Foreseen]) -> float | None:
    """The perplexity of the tokens that the vocabulary has; None without such tokens, or if it overflows."""
    surprise = mean_of(None if token.log_prob is None else -token.log_prob for token in tokens)
    try:
        return None if surprise is None else math.exp(surprise)
    except OverflowError:
        return None


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Table]]:
    """A title and a table for each length."""
    found = []
    for context in dict.fromkeys(row["context"] for row in rows):
        own = [row for row in rows if row["context"] == context]
        depths = [each["depth"] for each in own[0]["by_depth"]]
        heads = [*(key.replace("_", " ") for key in FIGURES), *(f"at {depth:g}" for depth in depths)]
        made = table(["view"], [*heads, "not in vocabulary"])
        for row in own:
            figures = [*(row[key] for key in FIGURES), *(each["accuracy"] for each in row["by_depth"])]
            made.add_row(Text(row["view"]), *map(_figure, figures), str(row["lacking"]))
        haystacks = count(own[0]["haystacks"], "haystack")
        title = f"{haystacks} of {own[0]['context_tokens']:,} tokens, {own[0]['tokens']} tokens of needles"
        found.append((title, made))
    return found


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1000 else f"{value:.0e}"
