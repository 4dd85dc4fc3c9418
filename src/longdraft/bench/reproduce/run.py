"""A table's measurement: which file fills it, what its results file depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.bench import machine
from longdraft.bench.json_lines import JsonLines, fingerprint, signed
from longdraft.bench.papers.table import Kind, Paper
from longdraft.bench.prompts import Prompt
from longdraft.bench.reproduce.needles import Needles
from longdraft.bench.reproduce.quality import Likenesses
from longdraft.bench.reproduce.scaled import Measuring, Scaled, drafts_by_kind
from longdraft.bench.reproduce.speed import Speed
from longdraft.bench.reproduce.texts import Sources, prompts_of
from longdraft.bench.results import model_of
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.embedded import EMBEDDED_ID
from longdraft.model.runner import TargetRunner

FORMAT, VERSION = "longdraft-reproduce", 1


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

    def results(self, path: Path) -> JsonLines[dict[str, Any]]:
        """A file of measured units, which an earlier run may have begun.

        Raises:
            ConfigError: it holds a run with other settings. CheckpointError: it cannot be used.
        """
        return JsonLines(path, self.header, dict)


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
        rows = {name: sources.rows(name, scaled.prompts and max(scaled.prompts, _batch(scaled))) for name in table.data}
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
    name = model or EMBEDDED_ID
    return Reproduction(paper, scaled, measuring, _header(paper, scaled, loaded, name, by_kind, prompts, measuring))


def _batch(scaled: Scaled) -> int:
    return max(column.batch for column in scaled.table.columns)


def _header(
    paper: Paper,
    scaled: Scaled,
    loaded: LoadedModel,
    name: str,
    drafts: Mapping[str, Path],
    prompts: Mapping[str, Sequence[Prompt]],
    measuring: Measuring,
) -> dict[str, Any]:
    tokens = hashlib.sha256(json.dumps({c: [p.tokens for p in own] for c, own in prompts.items()}).encode())
    sampled = {"foresee": False} if any(scaled.table.temperatures) else {}
    content = {
        "paper": paper.name,
        "table": scaled.table.name,
        "scale": "small" if scaled.small else "paper",
        "settings": {"max_tokens": scaled.max_tokens, "prompts": scaled.prompts, "plan": scaled.plan, **sampled},
        "units": list(measuring.units),
        "model": model_of(TargetRunner(loaded.model), name),
        "drafts": {kind: fingerprint(folder) for kind, folder in drafts.items()},
        "prompts": tokens.hexdigest()[:16],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
    }
    return signed(FORMAT, VERSION, content)
