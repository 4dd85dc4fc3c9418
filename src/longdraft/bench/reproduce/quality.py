"""Tables of partial verification's quality: its texts beside those of full verification (``bench quality``)."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench.papers.table import Column, Line
from longdraft.bench.prompts import Prompt
from longdraft.bench.quality import FULL, METHOD, Quality, QualitySettings, Variant, figures
from longdraft.bench.reproduce.scaled import Cell, Scaled, Tick, differing, with_draft
from longdraft.bench.scores import rouge_l
from longdraft.model.checkpoints import LoadedModel

# Options that variants of one comparison differ in; lines with other options beside them are compared apart.
_VARIED = ("selector", "budget", "margin")
# Figures of a row, of those that ``bench quality`` has.
_KEYS = ("rouge_l_mean", "score", "view", "surprise", "mean_accepted_length", "tokens_per_second", "partial_share")


class Likenesses:
    """A table that ``bench quality`` fills.

    Args:
        prompts: of each column, by its name. differs: what differs in them.
        drafts: drafts by kind, that the user gave.

    Raises:
        CapabilityError: the drafter's draft is missing, or rouge-score is not installed.
        ContextError: no prompt is longer than a partial cache.
    """

    def __init__(
        self,
        scaled: Scaled,
        loaded: LoadedModel,
        prompts: Mapping[str, Sequence[Prompt]],
        differs: Mapping[str, Sequence[str]],
        drafts: Mapping[str, Path],
    ) -> None:
        rouge_l()  # missing, it is missed before anything is measured
        self._scaled, self._loaded, self._differs, self._drafts = scaled, loaded, differs, drafts
        self._comparisons: list[dict[str, Any]] = []  # common options
        self._lines: dict[str, tuple[int, str]] = {}  # line -> comparison, contender
        first = scaled.table.columns[0]
        for line in sorted(scaled.table.lines, key=lambda line: line.method == FULL):
            if line.method == FULL:
                self._lines[line.name] = 0, FULL
                continue
            options = scaled.options(line, first)
            common = {name: x for name, x in options.items() if name not in _VARIED}
            if common not in self._comparisons:
                self._comparisons.append(common)
            self._lines[line.name] = self._comparisons.index(common), _variant(options).name
        self._prompts = {
            f"{column.name}, prompt {i}, comparison {c + 1}": (column, prompt, c)
            for c in range(len(self._comparisons))
            for column in scaled.table.columns
            for i, prompt in enumerate(prompts[column.name], 1)
        }
        self.units, self.notes = list(self._prompts), list[str]()
        self._quality: tuple[int, Quality] = 0, self._compared(0)

    def _compared(self, index: int) -> Quality:
        """The comparison of all lines that have its common options."""
        scaled, first = self._scaled, self._scaled.table.columns[0]
        own = [
            _variant(scaled.options(line, first))
            for line in scaled.table.lines
            if line.method != FULL and self._lines[line.name][0] == index
        ]
        settings = QualitySettings(
            tuple(dict.fromkeys(own)),
            scaled.max_tokens,
            ignore_eos=scaled.small,
            options=with_draft(METHOD, self._comparisons[index], self._drafts),
        )
        found = Quality(self._loaded, settings)
        found.cut([len(prompt.tokens) + scaled.max_tokens for _, prompt, _ in self._prompts.values()])
        return found

    def ticks(self, unit: str) -> int:
        at = self._prompts[unit][2]
        return 2 + sum(each == at and name != FULL for each, name in self._lines.values())

    def measure(self, unit: str, tick: Tick) -> dict[str, Any]:
        _, prompt, at = self._prompts[unit]
        if self._quality[0] != at:
            self._quality = at, self._compared(at)
            gc.collect()
        return self._quality[1].compare(prompt, tick)

    def cells(self, done: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        found = []
        for line, column in self._scaled.table.cells():
            at, name = self._lines[line.name]
            own = [
                done[unit]["runs"][name] | {"context_tokens": done[unit]["context_tokens"]}
                for unit, (its, _, comparison) in self._prompts.items()
                if unit in done and its == column and comparison == at
            ]
            if own:
                found.append(self._cell(line, column, name, own))
        return found

    def _cell(self, line: Line, column: Column, name: str, own: Sequence[Mapping[str, Any]]) -> Cell:
        found = figures(own)
        row = {
            "method": name,
            "dataset": column.data,
            "context_tokens": round(median(run["context_tokens"] for run in own)),
            "samples": len(own),
            **{key: found[key] for key in _KEYS},
        }
        shown = {
            "rouge_l": 100 * found["rouge_l_mean"],
            "accepted": self._scaled.table.counted(found["mean_accepted_length"]),
            "tokens_per_second": found["tokens_per_second"],
        }
        differs = differing(line, self._scaled.options(line, column), self._differs[column.name])
        return Cell(line, column, 0.0, shown, row, differs)


def _variant(options: Mapping[str, Any]) -> Variant:
    return Variant(**{name: options[name] for name in _VARIED if name in options})
