"""Tables that compare trainings: each line trains a draft here, from short texts, which the bench then measures."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longdraft.bench.papers.table import Kind, Line
from longdraft.bench.prompts import Prompt
from longdraft.bench.reproduce.scaled import Cell, Scaled, Tick
from longdraft.bench.reproduce.speed import Speed
from longdraft.bench.reproduce.texts import MODULES
from longdraft.drafts.kinds import KINDS
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

# Of the small scale: tokens of a text in the short stage and in the long one, characters of all texts, tokens of a
# batch. The draft's MLP is small: what is compared is two trainings, not sizes.
SHORT, LONG, CHARACTERS, ROWS, MLP = 256, 2048, 240_000, 2048, 512


class Trainings:
    """A table whose lines are settings of training.

    Args:
        folder: where drafts are trained; a training that was stopped there goes on.
        model: the target as the user named it; None: the embedded one.
        prompts, differs: as of :class:`~longdraft.bench.reproduce.speed.Speed`.

    Raises:
        CapabilityError: the paper's scale: that is weeks of training.
    """

    def __init__(
        self,
        scaled: Scaled,
        loaded: LoadedModel,
        model: str | None,
        prompts: Mapping[str, Sequence[Prompt]],
        differs: Mapping[str, Sequence[str]],
        folder: Path,
        unpacked: Callable[[], LoadedModel] | None = None,
    ) -> None:
        if not scaled.small:
            raise CapabilityError(
                "Trainings at the paper's scale are `longdraft train longspec --config configs/longspec/1-short.yaml` "
                "(anchor_offset=0 for the other), then 2-long.yaml; measure them with `longdraft bench`. --scale small "
                "compares small ones here."
            )
        self._scaled, self._loaded, self._model, self._folder = scaled, loaded, model, folder
        self._prompts, self._differs, self._unpacked = prompts, differs, unpacked
        self._losses = scaled.table.figures == ("loss",)
        self._lines = {f"training {line.name}": line for line in scaled.table.lines}
        measured = [] if self._losses else [f"measuring {line.name}" for line in scaled.table.lines]
        self.units, self.notes = [*self._lines, *measured], list[str]()

    def ticks(self, unit: str) -> int:
        # ar reads a prompt, and decodes; the draft decodes.
        return 1 if unit in self._lines else 3 * sum(map(len, self._prompts.values()))

    def measure(self, unit: str, tick: Tick) -> dict[str, Any]:
        if unit in self._lines:
            return {"losses": list(self._train(self._lines[unit], tick))}
        line = self._measured(unit)
        speed = self._speed(line)
        cells = speed.cells({part: speed.measure(part, tick) for part in speed.units})
        return {
            "cells": {
                cell.column.name: {"shown": dict(cell.shown), "row": dict(cell.row), "differs": list(cell.differs)}
                for cell in cells
            }
        }

    def cells(self, done: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        found: list[Cell] = []
        for unit, line in self._lines.items():
            losses = done.get(unit, {}).get("losses")
            said = (f"trained on texts of {SHORT} tokens, an MLP of {MLP}, {CHARACTERS // 1000},000 characters",)
            if self._losses and losses:
                (column,) = self._scaled.table.columns
                row = {"method": line.name, "losses": losses, "first_loss": losses[0], "last_loss": losses[-1]}
                found.append(Cell(line, column, 0.0, {"loss": losses[-1]}, row, said))
            measured = done.get(f"measuring {line.name}", {}).get("cells", {})
            for column in self._scaled.table.columns:
                if column.name in measured:
                    own = measured[column.name]
                    found.append(Cell(line, column, 0.0, own["shown"], own["row"], (*own["differs"], *said)))
        return found

    def _measured(self, unit: str) -> Line:
        return self._lines[unit.replace("measuring", "training", 1)]

    def _folder_of(self, line: Line) -> Path:
        return self._folder / f"offset-{line.options['anchor_offset']}"

    def _speed(self, line: Line) -> Speed:
        """The measurement of one line's draft, as a table of speed with one line."""
        table = replace(self._scaled.table, kind=Kind.speed, lines=(Line(line.name, line.method),))
        drafts = {line.method: self._folder_of(line) / "short" / "last"}
        scaled = replace(self._scaled, table=table)
        return Speed(scaled, self._loaded, self._prompts, self._differs, drafts, self._unpacked)

    def _train(self, line: Line, tick: Tick) -> Iterator[float]:
        """Trains a line's draft, and yields its losses: of the short stage, or of the long one behind it."""
        training = KINDS[line.method].training
        assert training is not None
        tick("training")
        files = self._texts()
        room = TargetRunner(self._loaded.model).context_length
        common = {
            "target": self._model, "held_out": 0.0, "rows": ROWS, "save_every": 0, "measure_every": 0,
            "intermediate_size": MLP, "precision": "no",
        }  # fmt: skip
        offset = min(line.options["anchor_offset"], room - SHORT)
        short = training.load_settings()(
            data=(str(files),),
            out=str(self._folder_of(line) / "short"),
            max_length=SHORT,
            anchor_offset=offset,
            **common,
        )
        for report in training.load_run()(short):
            if not self._losses:
                yield report.loss
        if self._losses:
            # At the paper's small rate of the long stage, so that what the short one learned shows.
            long = training.load_settings()(
                data=(str(files),), out=str(self._folder_of(line) / "long"), max_length=min(LONG, room),
                init=str(self._folder_of(line) / "short" / "last"), lr=5e-5, **{**common, "intermediate_size": None},
            )  # fmt: skip
            for report in training.load_run()(long):
                yield report.loss

    def _texts(self) -> Path:
        """Sources of Python's library that no prompt is made of."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, left = self._folder / "texts.jsonl", CHARACTERS
        if not path.exists():
            rows = []
            for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
                if source.stem not in MODULES and left > 0:
                    text = source.read_text(encoding="utf-8", errors="replace")[:left]
                    left -= len(text)
                    rows.append(json.dumps({"text": text}) + "\n")
            path.write_text("".join(rows), encoding="utf-8")
        return path
