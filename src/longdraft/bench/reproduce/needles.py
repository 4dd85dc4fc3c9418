"""Tables of needles: how well drafters foresee a sentence that lies in a long text (``bench needle``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from longdraft.bench import tasks
from longdraft.bench.experiment import Tick
from longdraft.bench.needle import Foreseen, NeedleDrafts, depth_of, haystacks, view
from longdraft.bench.needle_report import accuracy, perplexity
from longdraft.bench.reproduce.scaled import Entry, Measuring, Record, Scaled
from longdraft.bench.reproduce.texts import MODULES, Sources
from longdraft.drafts.kinds import KINDS
from longdraft.errors import ContextError, PromptError
from longdraft.model.checkpoints import LoadedModel


class Needles(Measuring):
    """A table that ``bench needle`` fills. A line's method is one of its views.

    Args:
        drafts: drafts by kind, that the user gave.

    Raises:
        CapabilityError: a view's draft is missing.
        ContextError: the haystacks do not fit the model's context.
    """

    def __init__(self, scaled: Scaled, loaded: LoadedModel, sources: Sources, drafts: Mapping[str, Path]) -> None:
        (column,) = scaled.table.columns
        options = {line.name: scaled.options(line, column) for line in scaled.table.lines}
        self._views = {line.name: view(line.method, options[line.name]) for line in scaled.table.lines}
        read = {kind: KINDS[kind].load(folder) for kind, folder in drafts.items()}
        self._asked = NeedleDrafts(loaded, list(self._views.values()), read)
        tokens, limit = scaled.tokens(column) or 0, self._asked.runner.context_length
        if tokens > limit and not scaled.small:
            raise ContextError(
                f"Haystacks have {tokens:,} tokens, and the model's context is {limit:,}: take --scale small."
            )
        (length,) = self._asked.contexts([min(tokens, limit)])
        file, text = _haystack(sources, column.data)
        found = haystacks(file, length, loaded.tokenizer, samples=scaled.prompts or 1, **scaled.asked)
        self._haystacks = {f"haystack {i}, needle at {depth_of(each):g}": each for i, each in enumerate(found, 1)}
        self.units = dict.fromkeys(self._haystacks, len(self._asked.names))
        self.differs = {column.name: (f"haystacks of {length:,} tokens", text)}
        units = list(self.units)
        self.entries = [Entry(line, column, line.name, options[line.name], units) for line in scaled.table.lines]

    def measure(self, unit: str, tick: Tick) -> Record:
        found = self._asked.measure(self._haystacks[unit], tick)
        tokens = {name: found["tokens"][own.name] for name, own in self._views.items()}
        return {"tokens": tokens, "context_tokens": found["context_tokens"]}

    def figures(self, entry: Entry, own: Sequence[Record]) -> tuple[dict[str, float | None], dict[str, Any]]:
        tokens = [Foreseen(*each) for unit in own for each in unit["tokens"][entry.name]]
        shown = {"accuracy": accuracy(tokens), "perplexity": perplexity(tokens)}
        return shown, {
            "view": self._views[entry.name].name,
            "context_tokens": round(mean(unit["context_tokens"] for unit in own)),
            "haystacks": len(own),
            "tokens": len(tokens),
            **shown,
        }


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
