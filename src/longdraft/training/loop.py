"""The training loop of all kinds of draft, on accelerate: one process, DDP or FSDP2. A kind says its loss.

Everything random is a function of the seed and the step. So a killed run that resumes from its last checkpoint ends
with the same weights, and two processes get the weights of one that accumulates twice the batches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from longdraft.errors import CheckpointError, NumericalError, PromptError
from longdraft.files import naming, read_json
from longdraft.training.batches import Batch, Schedule
from longdraft.training.config import RunConfig
from longdraft.training.corpus import Documents
from longdraft.training.features import FeatureSource
from longdraft.training.measure import Simulated
from longdraft.training.trainee import StepOutput, Trainee

LOG, CHECKPOINTS, STATE = "log.jsonl", "checkpoints", "state.json"
# Devices on which torch updates all weights in one kernel.
FUSED = ("cpu", "cuda", "mps", "xpu")
# Settings that a resumed run may change: its weights stay the same, up to how batches are shared out.
FREE = {
    "out", "save_every", "keep", "track", "threads", "cache", "measure_every", "device", "accumulate", "recompute",
}  # fmt: skip


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


class Loop:
    """Trains one module.

    Args:
        documents: the learned documents; a resumed run must have the same. features: theirs.
        measure: simulated acceptance of the module on held-out documents, called by every process, the same in all;
            None if there are none.
        save_draft: writes weights to the folder of a name under ``config.out``; called by the main process.
        shifts: the largest shift that a document is given. levels: the largest depth that the module reports.

    Raises:
        PromptError: the data make fewer batches than there are processes.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        trainee: Trainee,
        documents: Documents,
        features: FeatureSource,
        measure: Callable[[Callable[..., StepOutput]], Simulated] | None,
        save_draft: Callable[[Mapping[str, torch.Tensor], str], None],
        shifts: int,
        levels: int,
    ) -> None:
        self.config, self.accelerator, self.features = config, accelerator, features
        self.measure, self.save_draft, self.levels = measure, save_draft, levels
        self._documents, self._learned, self._digest = documents, trainee.learned, documents.digest()
        self.out, self.checkpoints = Path(config.out), Checkpoints(accelerator, Path(config.out), config.keep)
        processes = accelerator.num_processes
        rows = array("i", (self._rows(i, 0) for i in range(len(documents))))
        self.schedule = Schedule(rows, config.rows, shifts, config.seed, config.epochs, processes, config.accumulate,
                                 config.max_steps)  # fmt: skip
        if not self.schedule.at(0):
            raise PromptError(
                f"The data make fewer batches than there are processes ({processes}): give more text or lower `rows`."
            )
        decayed = [p for p in trainee.parameters() if p.ndim > 1]
        others = [p for p in trainee.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=decayed[0].device.type in FUSED,
        )
        self.module, self.optimizer = accelerator.prepare(trainee, optimizer)
        self.step, self.best = 0, 0.0

    def run(self, stop: Callable[[], bool], say: Callable[[str], None]) -> Iterator[Report]:
        """Trains to the end and yields a report for each step. If ``stop`` returns True, writes a checkpoint and ends.

        Every process iterates and gets the same reports; the ``stop`` of any of them stops all.

        Args:
            say: called with a line that says where a resumed run continues.

        Raises:
            CheckpointError: a checkpoint is damaged or of other settings or data, or the disk is full.
            NumericalError: the loss is not a number; checkpoints are kept.
        """
        self._resume()
        steps, config = self.schedule.steps, self.config
        if self.step == steps:
            say(f"{self.out} holds this run with all of its {steps:,} steps: nothing is left to train")
        elif self.step:
            say(f"resuming at step {self.step:,} of {steps:,}")
        self._drop_log_after(self.step)
        self.accelerator.init_trackers("longdraft")
        try:
            while self.step < steps:
                report = self._step()
                self._log(report)
                yield report
                last, stopping = self.step == steps, self._any(stop())
                if last or stopping or _due(self.step, config.save_every):
                    self._save()
                if stopping and not last:
                    return
            self._save_draft("last", *([] if self.best else ["best"]))
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _rows(self, document: int, shift: int) -> int:
        """Learned rows of a document with a shift."""
        return self._learned(self._documents.lengths[document], self._documents.starts[document], shift)

    def _step(self) -> Report:
        """One step of the optimizer, and a measurement if one is due."""
        started, config = time.perf_counter(), self.config
        world, levels = self.accelerator.num_processes, self.levels
        lr = learning_rate(self.step, self.schedule.steps, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = self.schedule.at(self.step)
        # Every process knows the rows of all, so nothing has to be summed before the backward pass.
        rows = sum(self._rows(i, j) for b in batches for i, j in zip(b.documents, b.shifts, strict=True))
        mine: list[Batch] = batches[self.accelerator.process_index :: world]
        # The loss, then the hits of each depth, then the rows of each depth.
        sums = torch.zeros(1 + 2 * levels, dtype=torch.float64)
        self.module.train()
        for k, batch in enumerate(mine):
            documents = [self.features[i] for i in batch.documents]
            with self.accelerator.no_sync(self.module) if k < len(mine) - 1 else nullcontext():
                out: StepOutput = self.module(documents, batch.shifts)
                # Gradients are averaged over processes; times their number, the loss is the mean over all rows.
                self.accelerator.backward(out.loss * (world / rows))
            sums[0] += out.loss.detach().cpu()  # not every device has float64
            sums[1 : 1 + levels] += _by_depth(out.depths[out.ranks == 0], levels)
            sums[1 + levels :] += _by_depth(out.depths, levels)
        if world > 1:
            sums = self.accelerator.reduce(sums.float().to(self.accelerator.device), "sum").double().cpu()
        loss = float(sums[0]) / rows
        if not math.isfinite(loss):
            raise NumericalError(
                f"The loss is {loss} at step {self.step + 1}. The last checkpoint is kept; lower lr, or check the data."
            )
        self.accelerator.clip_grad_norm_(self.module.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        speed = rows / (time.perf_counter() - started)
        self.step += 1
        due = self.step == self.schedule.steps or _due(self.step, config.measure_every)
        hits, counts = sums[1 : 1 + levels].tolist(), sums[1 + levels :].tolist()
        agreement = {j + 1: hits[j] / counts[j] for j in range(levels) if counts[j]}
        return Report(self.step, self.schedule.steps, loss, lr, agreement, speed, self._measure() if due else None)

    def _measure(self) -> Simulated | None:
        """Simulated acceptance. Saves the draft if it is the best so far."""
        if self.measure is None:
            return None
        self.module.eval()
        simulated = self.measure(self.module)
        if simulated.tree > self.best:
            self.best = simulated.tree
            self._save_draft("best")
        return simulated

    def _any(self, flag: bool) -> bool:
        """True if the flag is set in any process."""
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum") > 0)

    def _save_draft(self, *names: str) -> None:
        weights = self.accelerator.get_state_dict(self.module)  # by every process, as each has its shards
        if self.accelerator.is_main_process:
            for name in names:
                self.save_draft(weights, name)
        self.accelerator.wait_for_everyone()

    # --- the log ---

    def _drop_log_after(self, step: int) -> None:
        """Drops the log's rows of steps that are computed again, and one that a kill cut off."""
        path, lines = self.out / LOG, []
        if not self.accelerator.is_main_process:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                try:
                    if json.loads(line)["step"] <= step:
                        lines.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue
            if lines or path.exists():
                part = path.with_suffix(".part")
                part.write_text("".join(lines), encoding="utf-8")
                part.replace(path)
        except OSError as error:
            raise CheckpointError(f"{self.out} cannot be written to: {error}.") from error

    def _log(self, report: Report) -> None:
        """Appends a row to the log and tells the trackers."""
        row = {name: value for name, value in asdict(report).items() if name != "steps" and value is not None}
        if self.accelerator.is_main_process:
            try:
                with (self.out / LOG).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise CheckpointError(f"{self.out / LOG} cannot be written: {error}.") from error
        values = {"loss": report.loss, "lr": report.lr, "tokens_per_second": report.tokens_per_second}
        values |= {f"agreement/{level}": share for level, share in report.agreement.items()}
        if report.simulated is not None:
            values |= {"simulated/chain": report.simulated.chain, "simulated/tree": report.simulated.tree}
        self.accelerator.log(values, report.step)

    # --- checkpoints ---

    def _save(self) -> None:
        state = {
            "step": self.step,
            "best": self.best,
            "config": _comparable(self.config),
            "steps": self.schedule.steps,
            "documents": self._digest,
            "width": self.schedule.width,
        }
        self.checkpoints.save(state)

    def _resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is None:
            return
        path, state = newest
        # A setting that came later than the checkpoint had its default.
        usual = {f.name: f.default for f in dataclasses.fields(self.config)}
        here, there = _comparable(self.config), {**usual, **state.get("config", {})}
        different = sorted(f"{k}: {there.get(k)} there, {here[k]} here" for k in here if there.get(k) != here[k])
        if (state.get("documents", self._digest), state.get("steps")) != (self._digest, self.schedule.steps):
            different.append("the documents")
        if self.config.distill and "top" in there:
            different.append("an earlier version's loss")
        if state.get("width", self.schedule.width) != self.schedule.width:
            different.append("processes times accumulate")
        if different:
            raise CheckpointError(
                f"{self.out} holds a run with other settings or data ({'; '.join(different)}). Give another `out`, or "
                "delete its checkpoints."
            )
        with naming(path, f"The checkpoint {path} cannot be read", DAMAGED):
            self.accelerator.load_state(str(path))
        self.step, self.best = state["step"], state["best"]


# What to do about a damaged checkpoint.
DAMAGED = "Delete it: the run then continues from the one before."


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of the run in ``out``: a folder for each, which appears whole or not at all; the last ``keep``.

    Every process calls all methods; all must see the same disk.
    """

    accelerator: Accelerator
    out: Path
    keep: int

    def _whole(self) -> list[Path]:
        """The checkpoints, oldest first."""
        found = (path.parent for path in (self.out / CHECKPOINTS).glob(f"step-*/{STATE}"))
        return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name))

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint. Raises CheckpointError if that fails; earlier ones are kept."""
        final = self.out / CHECKPOINTS / f"step-{state['step']:08d}"
        part, main = final.with_name(f".{final.name}.part"), self.accelerator.is_main_process
        try:
            if main:
                for unfinished in final.parent.glob(".step-*.part"):  # left by a killed run
                    shutil.rmtree(unfinished, ignore_errors=True)
                part.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(part))
            self.accelerator.wait_for_everyone()
            if main:
                (part / STATE).write_text(json.dumps(state), encoding="utf-8")
                shutil.rmtree(final, ignore_errors=True)
                part.replace(final)
                for old in self._whole()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(f"Could not write the checkpoint {final}: {error}. Earlier ones are kept.") from error
        self.accelerator.wait_for_everyone()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint and the state that :meth:`save` was given; None if there is none."""
        for path in self._whole()[-1:]:
            with naming(path, f"The checkpoint {path} cannot be read", DAMAGED):
                state = read_json(path / STATE)
                if not {"step", "best"} <= state.keys() or not isinstance(state.get("config", {}), dict):
                    raise ValueError(f"its {STATE} lacks what a run goes on from")
                return path, state
        return None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _by_depth(depths: torch.Tensor, levels: int) -> torch.Tensor:
    """The number of rows of each of the depths 1 .. levels."""
    return torch.bincount(depths.cpu(), minlength=levels + 1)[1:].double()


def _comparable(config: RunConfig) -> dict[str, Any]:
    """The settings that a resumed run may not change, as JSON returns them."""
    values: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    return {k: v for k, v in values.items() if k not in FREE}


def learning_rate(step: int, steps: int, config: RunConfig) -> float:
    """Linear warm-up, then half a cosine down to ``min_lr`` of the peak; ``step`` counts from 0."""
    warm = max(1, round(config.warmup * steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))
