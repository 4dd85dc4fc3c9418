"""The log of a run: a JSON object for each step; curves and TensorBoard event files if asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.training import curves
from longdraft.training.measure import Simulated

FILE, BOARD, CURVES = "log.jsonl", "tensorboard", "curves.png"


@dataclass(frozen=True)
class Report:
    """The figures of a step, summed over all processes.

    Attributes:
        step, steps: this step, from 1, and all steps of the run.
        loss: mean over the step's learned rows, in nats.
        agreement: share of the rows where the draft's first choice is the text's next token, by level 1, 2, ...
        tokens_per_second: learned rows (prompts do not count) / seconds of the step, without measuring.
        simulated: measured on held-out documents; None if this step did not measure.
    """

    step: int
    steps: int
    loss: float
    lr: float
    agreement: dict[int, float]
    tokens_per_second: float
    simulated: Simulated | None = None


class RunLog:
    """Appends reports to ``log.jsonl``.

    Args:
        folder: folder of the run.
        done: steps before the one that a resumed run continues with. Later ones are dropped from the file, because they
            are computed again.
        tensorboard: also write event files. picture: also draw curves, at every measurement and in the end.

    Raises:
        CapabilityError: TensorBoard or curves are asked for, and what draws them is not installed.
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, done: int, tensorboard: bool, picture: bool) -> None:
        self._path, self._picture = folder / FILE, picture
        if picture:
            curves.available()
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise CapabilityError(
                    "tensorboard: true needs the package tensorboard: pip install tensorboard, or leave the setting "
                    f"out (every step is in {self._path} anyway)."
                ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._drop_after(done)
            if tensorboard:
                self._board = SummaryWriter(str(folder / BOARD), purge_step=done + 1)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written to: {error}.") from error

    def _drop_after(self, done: int) -> None:
        lines = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    lines.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # cut off by a kill
        part = self._path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        part.replace(self._path)

    def add(self, report: Report) -> None:
        row = asdict(report)
        row.pop("steps")
        if report.simulated is None:
            row.pop("simulated")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if self._picture and report.simulated is not None:
                curves.draw(self._path, self._path.with_name(CURVES))
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {error}.") from error
        if self._board is None:
            return
        values = {"loss": report.loss, "lr": report.lr, "rows_per_second": report.tokens_per_second}
        values |= {f"agreement/{level}": share for level, share in report.agreement.items()}
        if report.simulated is not None:
            values |= {"simulated/chain": report.simulated.chain, "simulated/tree": report.simulated.tree}
        for name, value in values.items():
            self._board.add_scalar(name, value, report.step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
