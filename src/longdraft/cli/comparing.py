"""``--compare``: plain decoding beside a method, on the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

import longdraft
from longdraft.bench.tables import ratio, table
from longdraft.cli.figures import payload

if TYPE_CHECKING:
    from longdraft.bench.ties import Difference


def compared(own: longdraft.Result, ar: longdraft.Result, difference: Difference | None) -> dict[str, Any]:
    """The value of ``compare`` in the JSON object; ``near_tie`` is null where all tokens agree, ``speedup_vs_ar`` where
    one of them decoded nothing."""
    return {
        "ar": payload(ar),
        "speedup_vs_ar": ratio(own.tokens_per_second or None, ar.tokens_per_second),
        "tokens_agree": difference is None,
        "near_tie": None if difference is None else difference.near_tie,
    }


def shown(
    own: longdraft.Result, ar: longdraft.Result, difference: Difference | None, decode: Callable[[list[int]], str]
) -> Group:
    """The two beside each other, and where they first differ, for people."""
    made = table(["compared"], ["tokens/s", "decode", "tokens", "forwards", "accepted"])
    for result in (own, ar):
        made.add_row(
            Text(result.method), f"{result.tokens_per_second:.1f}", f"{result.decode_seconds:.2f} s",
            f"{result.new_tokens:,}", f"{result.rounds:,}", f"{result.mean_accepted_length:.2f}",
        )  # fmt: skip
    lines, style = [], ""
    if speedup := ratio(own.tokens_per_second or None, ar.tokens_per_second):
        said = Text(f"{speedup:.2f} times the tokens/s of ar", style="bold")
        lines.append(said.append(" (one run each; `longdraft bench` measures medians)", style="not bold"))
    text = f"all {own.new_tokens:,} tokens agree with ar"
    if (d := difference) is not None:
        style = "" if d.near_tie or not own.exact else "red"
        tokens = ("the end" if t is None else repr(decode([t])) for t in (d.token, d.reference))
        text = "tokens first differ at new token {}: {}, ar has {}".format(d.position + 1, *tokens)
        if d.token is not None and d.reference is not None:
            near = f"a near tie: the logits are {d.gap:.1g} apart, which is rounding"
            text += f"; {near if d.near_tie else f'no near tie, the logits are {d.gap:.3g} apart'}"
    return Group(made, *lines, Text(text, style=style))
