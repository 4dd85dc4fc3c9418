"""Tables of needles: how well drafters foresee a sentence that lies in a long text (``bench needle``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longdraft.bench import tasks
from longdraft.bench.needle import Foreseen, NeedleDrafts, haystacks, view
from longdraft.bench.needle_report import accuracy, perplexity
from longdraft.bench.reproduce.scaled import Cell, Scaled, Tick, differing
from longdraft.bench.reproduce.texts import MODULES, Sources
from longdraft.drafts.kinds import KINDS
from longdraft.errors import ContextError, PromptError
from longdraft.model.checkpoints import LoadedModel


class Needles:
    """A table that ``bench needle`` fills. A line's method is one of its views.

    Args:
        drafts: drafts by kind, that the user gave.

    Raises:
        CapabilityError: a view's draft is missing.
        ContextError: the haystacks do not fit the model's context.
    """

    def __init__(self, scaled: Scaled, loaded: LoadedModel, sources: Sources, drafts: Mapping[str, Path]) -> None:
        self._scaled, (self._column,) = scaled, scaled.table.columns
        self._views = {line.name: view(line.method, scaled.options(line, self._column)) for line in scaled.table.lines}
        read = {kind: KINDS[kind].load(folder) for kind, folder in drafts.items()}
        self._measuring = NeedleDrafts(loaded, list(self._views.values()), read)
        asked = scaled.tokens(self._column) or 0
        limit = self._measuring.runner.context_length
        if asked > limit and not scaled.small:
            raise ContextError(
                f"Haystacks have {asked:,} tokens, and the model's context is {limit:,}: take --scale small."
            )
        (self._length,) = self._measuring.contexts([min(asked, limit)])
        file, self._text = _haystack(sources, self._column.data)
        found = haystacks(file, self._length, loaded.tokenizer, samples=scaled.prompts or 1, **scaled.asked)
        self._haystacks = {
            f"haystack {i}, needle at {each.sample.needles[0][0]:g}": each for i, each in enumerate(found, 1)
        }
        self.units, self.notes = list(self._haystacks), list[str]()

    def ticks(self, unit: str) -> int:
        return len(self._measuring.names)

    def measure(self, unit: str, tick: Tick) -> dict[str, Any]:
        found = self._measuring.measure(self._haystacks[unit], tick)
        tokens = {name: found["tokens"][own.name] for name, own in self._views.items()}
        return {"tokens": tokens, "context_tokens": found["context_tokens"]}

    def cells(self, done: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        if not done:
            return []
        found = []
        for line in self._scaled.table.lines:
            tokens = [Foreseen(*each) for unit in done.values() for each in unit["tokens"][line.name]]
            shown = {"accuracy": accuracy(tokens), "perplexity": perplexity(tokens)}
            row = {
                "view": self._views[line.name].name,
                "context_tokens": round(sum(unit["context_tokens"] for unit in done.values()) / len(done)),
                "haystacks": len(done),
                "tokens": len(tokens),
                **shown,
            }
            differs = differing(
                line, self._scaled.options(line, self._column), (f"haystacks of {self._length:,} tokens", self._text)
            )
            found.append(Cell(line, self._column, 0.0, shown, row, differs))
        return found


def _haystack(sources: Sources, dataset: str) -> tuple[Path, str]:
    """A file with a long text, and what it is.

    Raises:
        PromptError: the paper's scale without a file.
    """
    if file := sources.file(dataset):
        return Path(file).expanduser(), f"the text is {Path(file).name}"
    if not sources.stand_ins:
        raise PromptError(
            f"Needles lie in a long text: give one, plain or JSONL, as --data {dataset}=FILE (a book of PG-19)."
        )
    path = tasks.source(MODULES[0])
    return path, f"the text is {path.name} of Python's library"
