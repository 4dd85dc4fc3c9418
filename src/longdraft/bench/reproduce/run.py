"""A table's measurement: which file fills it, what its results file depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.bench import record_files
from longdraft.bench.experiment import Experiment
from longdraft.bench.json_lines import fingerprint
from longdraft.bench.papers.table import Kind, Paper
from longdraft.bench.prompts import Prompt
from longdraft.bench.record_files import Record
from longdraft.bench.reproduce.needles import Needles
from longdraft.bench.reproduce.quality import Likenesses
from longdraft.bench.reproduce.scaled import Cell, Measuring, Scaled, drafts_by_kind
from longdraft.bench.reproduce.speed import Speed
from longdraft.bench.reproduce.texts import Sources, prompts_of
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.embedded import EMBEDDED_ID

FORMAT = "longdraft-reproduce"


@dataclass(frozen=True)
class Reproduction:
    """A table, ready to be measured.

    Attributes:
        header: all that its figures depend on.
    """

    paper: Paper
    scaled: Scaled
    measuring: Measuring
    header: Mapping[str, Any]

    def experiment(self, results: Path | None) -> Experiment[str, Record]:
        """The measurement, unit by unit, with what a file of results has already.

        Raises:
            ConfigError: it holds a run with other settings. CheckpointError: it cannot be used.
        """
        return record_files.experiment(self.measuring.units, self.measuring.measure, results, self.header)

    def cells(self, found: Sequence[Record]) -> list[Cell]:
        """Our figures, from what has been measured."""
        return self.measuring.cells({record["unit"]: record["measured"] for record in found})


def prepare(
    paper: Paper,
    scaled: Scaled,
    loaded: LoadedModel,
    model: str | None,
    sources: Sources,
    drafts: Sequence[Path] = (),
    unpacked: Callable[[], LoadedModel] | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Encodes a table's prompts and settles its methods.

    Args:
        model: as the user named it; None: the embedded one.
        drafts: draft folders and files, one of a kind; others are those that come with longdraft.
        unpacked: as of :class:`~longdraft.bench.run.Bench`.
    """
    by_kind, table = drafts_by_kind(drafts), scaled.table
    prompts: dict[str, list[Prompt]] = {}
    measuring: Measuring
    if table.kind is Kind.needle:
        measuring = Needles(scaled, loaded, sources, by_kind)
    else:
        differs: dict[str, list[str]] = {}
        count = scaled.prompts and max(scaled.prompts, *(column.batch for column in table.columns))
        rows = {name: sources.rows(name, count) for name in table.data}
        seen: dict[tuple[Any, ...], tuple[list[Prompt], list[str]]] = {}
        for column in table.columns:
            key = column.data, scaled.tokens(column), column.batch
            if key not in seen:
                if progress is not None:
                    progress(f"Encoding {column.name}")
                seen[key] = prompts_of(column, scaled, sources, loaded, rows[column.data])
            prompts[column.name], differs[column.name] = seen[key]
        if table.kind is Kind.quality:
            measuring = Likenesses(scaled, loaded, prompts, differs, by_kind)
        else:
            measuring = Speed(scaled, loaded, prompts, differs, by_kind, unpacked, progress)
    content = {
        "paper": paper.name,
        "table": table.name,
        "scale": "small" if scaled.small else "paper",
        "settings": {
            "max_tokens": scaled.max_tokens,
            "prompts": scaled.prompts,
            "plan": scaled.plan,
            **({"foresee": False} if any(table.temperatures) else {}),
        },
        "units": list(measuring.units),
        "drafts": {kind: fingerprint(folder) for kind, folder in by_kind.items()},
    }
    tokens = {name: [prompt.tokens for prompt in own] for name, own in prompts.items()}
    header = record_files.header(FORMAT, content, loaded, model or EMBEDDED_ID, tokens)
    return Reproduction(paper, scaled, measuring, header)
