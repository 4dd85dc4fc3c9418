"""``--compare``: plain decoding beside a method, on the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

import longdraft
from longdraft.bench.tables import table
from longdraft.cli.figures import payload

if TYPE_CHECKING:
    from longdraft.bench.ties import Difference


@dataclass(frozen=True)
class Comparison:
    """A method's run, that of ``ar``, and where they first differ."""

    own: longdraft.Result
    ar: longdraft.Result
    difference: Difference | None

    @property
    def speedup(self) -> float | None:
        """Ratio of the tokens/s; None when one of them decoded nothing."""
        if not self.own.tokens_per_second or not self.ar.tokens_per_second:
            return None
        return self.own.tokens_per_second / self.ar.tokens_per_second

    def payload(self) -> dict[str, Any]:
        """The value of ``compare`` in the JSON object; ``near_tie`` is null where all tokens agree."""
        return {
            "ar": payload(self.ar),
            "speedup_vs_ar": self.speedup,
            "tokens_agree": self.difference is None,
            "near_tie": None if self.difference is None else self.difference.near_tie,
        }

    def shown(self, decode: Callable[[list[int]], str]) -> Group:
        """For people."""
        made = table(["compared"], ["tokens/s", "decode", "tokens", "forwards", "accepted"])
        for result in (self.own, self.ar):
            made.add_row(
                Text(result.method),
                f"{result.tokens_per_second:.1f}",
                f"{result.decode_seconds:.2f} s",
                f"{result.new_tokens:,}",
                f"{result.rounds:,}",
                f"{result.mean_accepted_length:.2f}",
            )
        sound = self.difference is None or self.difference.near_tie or not self.own.exact
        lines = [Text(self._agreement(decode), style="" if sound else "red")]
        if self.speedup is not None:
            said = Text(f"{self.speedup:.2f} times the tokens/s of ar", style="bold")
            lines.insert(0, said.append(" (one run each; `longdraft bench` measures medians)", style="not bold"))
        return Group(made, *lines)

    def _agreement(self, decode: Callable[[list[int]], str]) -> str:
        d = self.difference
        if d is None:
            return f"all {self.own.new_tokens:,} tokens agree with ar"
        own, ar = ("the end" if t is None else repr(decode([t])) for t in (d.token, d.reference))
        where = f"tokens first differ at new token {d.position + 1}: {own}, ar has {ar}"
        if d.token is None or d.reference is None:
            return where
        if d.near_tie:
            return f"{where}; a near tie: the logits are {d.gap:.1g} apart, which is rounding"
        return f"{where}; no near tie, the logits are {d.gap:.3g} apart"
