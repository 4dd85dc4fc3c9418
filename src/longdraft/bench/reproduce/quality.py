"""Tables of partial verification's quality: its texts beside those of full verification (``bench quality``)."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench.experiment import Tick
from longdraft.bench.prompts import Prompt
from longdraft.bench.quality import FULL, METHOD, VARIED, Quality, QualitySettings, Variants, figures
from longdraft.bench.reproduce.scaled import Entry, Measuring, Record, Scaled, with_draft
from longdraft.bench.scores import rouge_l
from longdraft.bench.settings import contender
from longdraft.model.checkpoints import LoadedModel

# Figures of a row, of those that ``bench quality`` has.
_KEYS = ("rouge_l_mean", "score", "view", "surprise", "mean_accepted_length", "tokens_per_second", "partial_share")


class Likenesses(Measuring):
    """A table that ``bench quality`` fills. Lines whose options differ in more than a variant's are compared apart.

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
        self._scaled, self._loaded, self._drafts, self.differs = scaled, loaded, drafts, differs
        self._comparisons: list[tuple[dict[str, Any], Variants]] = []  # common options, and the variants'
        lines: dict[str, tuple[int, str, dict[str, Any]]] = {}  # line -> comparison, contender, options
        for line in scaled.table.lines:
            options = scaled.options(line, scaled.table.columns[0])
            if line.method == FULL:
                lines[line.name] = 0, FULL, options
                continue
            common = {name: x for name, x in options.items() if name not in VARIED}
            index = next((i for i, (each, _) in enumerate(self._comparisons) if each == common), len(self._comparisons))
            if index == len(self._comparisons):
                self._comparisons.append((common, {}))
            varied = {name: options.get(name, usual) for name, usual in VARIED.items()}
            name = contender(METHOD, varied)
            lines[line.name] = index, name, options
            self._comparisons[index][1][name] = varied
        self._prompts: dict[str, tuple[int, Prompt]] = {}
        units: dict[tuple[int, str], list[str]] = {}  # by comparison and column
        for index in range(len(self._comparisons)):
            for column in scaled.table.columns:
                for i, prompt in enumerate(prompts[column.name], 1):
                    unit = f"{column.name}, prompt {i}, comparison {index + 1}"
                    self._prompts[unit] = index, prompt
                    units.setdefault((index, column.name), []).append(unit)
        self.units = {unit: 2 + len(self._comparisons[index][1]) for unit, (index, _) in self._prompts.items()}
        self.entries = [
            Entry(line, column, name, options, units[index, column.name])
            for line, column in scaled.table.cells()
            for index, name, options in [lines[line.name]]
        ]
        self._quality = 0, self._compared(0)

    def _compared(self, index: int) -> Quality:
        """The comparison of all lines that have its common options."""
        common, variants = self._comparisons[index]
        options, small = with_draft(METHOD, common, self._drafts), self._scaled.small
        settings = QualitySettings(variants, self._scaled.max_tokens, ignore_eos=small, options=options)
        found = Quality(self._loaded, settings)
        found.uncut([len(prompt.tokens) + settings.max_tokens for _, prompt in self._prompts.values()])
        return found

    def measure(self, unit: str, tick: Tick) -> Record:
        index, prompt = self._prompts[unit]
        if self._quality[0] != index:
            self._quality = index, self._compared(index)
            gc.collect()
        return self._quality[1].compare(prompt, tick)

    def figures(self, entry: Entry, own: Sequence[Record]) -> tuple[dict[str, float | None], dict[str, Any]]:
        found = figures([unit["runs"][entry.name] for unit in own])
        shown = {
            "rouge_l": 100 * found["rouge_l_mean"],
            "score": None if found["score"] is None else 100 * found["score"],
            "accepted": self._scaled.table.counted(found["mean_accepted_length"]),
            "tokens_per_second": found["tokens_per_second"],
        }
        return shown, {
            "method": entry.name,
            "dataset": entry.column.data,
            "context_tokens": round(median(unit["context_tokens"] for unit in own)),
            "samples": len(own),
            **{key: found[key] for key in _KEYS},
        }
