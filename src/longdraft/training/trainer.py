"""The training loop of all kinds of draft, on accelerate: one process, DDP or FSDP2.

Everything random is a function of the seed and the step. So a killed run that resumes from its last checkpoint ends
with the same weights, and two processes get the weights of one that accumulates twice the batches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from longdraft.errors import CheckpointError, NumericalError, PromptError
from longdraft.training import checkpoints
from longdraft.training.ahead import Ahead, FeatureSource
from longdraft.training.batches import Batch, Schedule
from longdraft.training.config import RunConfig
from longdraft.training.corpus import Documents
from longdraft.training.features import Features
from longdraft.training.measure import Simulated
from longdraft.training.run_log import Report, RunLog
from longdraft.training.trainee import StepOutput, Trainee

# Devices on which torch updates all weights in one kernel.
FUSED = ("cpu", "cuda", "mps", "xpu")


class Trainer:
    """Trains one module.

    Args:
        documents: the learned documents; a resumed run must have the same. source: their features.
        measure: simulated acceptance of the module on held-out documents, called by every process, the same in all;
            None if there are none.
        save_draft: writes weights to the folder of a name under ``config.out``; called by the main process.
        shifts: the largest shift that a document is given. levels: the largest depth that the module reports.
        ahead: reads features.

    Raises:
        PromptError: the data make fewer batches than there are processes.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        module: Trainee,
        documents: Documents,
        source: FeatureSource,
        measure: Callable[[Callable[..., StepOutput]], Simulated] | None,
        save_draft: Callable[[Mapping[str, torch.Tensor], str], None],
        shifts: int,
        levels: int,
        ahead: Ahead,
    ) -> None:
        self.config, self.accelerator, self.source = config, accelerator, source
        self.measure, self.save_draft, self.levels, self.ahead = measure, save_draft, levels, ahead
        self._documents, self._learned, self._digest = documents, module.learned, documents.digest()
        self.out = Path(config.out)
        processes = accelerator.num_processes
        rows = array("i", (self._rows(i, 0) for i in range(len(documents))))
        self.schedule = Schedule(rows, config.rows, shifts, config.seed, config.epochs, processes, config.accumulate,
                                 config.max_steps)  # fmt: skip
        if not self.schedule.at(0):
            raise PromptError(
                f"The data make fewer batches than there are processes ({processes}): give more text or lower `rows`."
            )
        decayed = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=decayed[0].device.type in FUSED,
        )
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.step = 0
        self.best = 0.0
        self.worse = 0  # measurements since the best one

    def run(self, stop: Callable[[], bool], say: Callable[[str], None]) -> Iterator[Report]:
        """Trains to the end and yields a report for each step. If ``stop`` returns True, writes a checkpoint and ends.

        Every process iterates and gets the same reports; the ``stop`` of any of them stops all.

        Args:
            say: called with a line that says where a resumed run continues.

        Raises:
            CheckpointError: a checkpoint is damaged or of other settings or data, or the disk is full.
            NumericalError: the loss is not a number; checkpoints are kept.
            CapabilityError: TensorBoard or curves are asked for, and what draws them is not installed.
        """
        self._resume()
        steps, config = self.schedule.steps, self.config
        if self._over():
            say(f"{self.out} holds this run with all of its {self.step:,} steps: nothing is left to train")
        elif self.step:
            say(f"resuming at step {self.step:,} of {steps:,}")
        main = self.accelerator.is_main_process
        log = RunLog(self.out, self.step, config.tensorboard, config.curves) if main else None
        try:
            yield from self._steps(stop, log)
        finally:
            if log is not None:
                log.close()
        if self._over() and self.step < steps:
            say(
                f"ended at step {self.step:,} of {steps:,}: no better simulated acceptance than {self.best:.2f} in "
                f"{self.worse} measurements"
            )

    def _over(self) -> bool:
        """True after the last step, or after ``patience`` measurements without a better one."""
        return self.step == self.schedule.steps or 0 < self.config.patience <= self.worse

    def _steps(self, stop: Callable[[], bool], log: RunLog | None) -> Iterator[Report]:
        steps, config = self.schedule.steps, self.config
        mine = (batch.documents for step in range(self.step, steps) for batch in self._mine(step))
        features = self.ahead.read(self.source, mine)
        while not self._over():
            started = time.perf_counter()
            lr = learning_rate(self.step, steps, config)
            loss, agreement, rows = self._step(self.schedule.at(self.step), features, lr)
            speed = rows / (time.perf_counter() - started)
            self.step += 1
            simulated = self._measure() if self._over() or _due(self.step, config.measure_every) else None
            last = self._over()
            report = Report(self.step, steps, loss, lr, agreement, speed, simulated)
            if log is not None:
                log.add(report)
            yield report
            stopping = self._any(stop())
            if last or stopping or _due(self.step, config.save_every):
                self._save()
            if stopping and not last:
                return
        self._save_draft("last", *([] if self.best else ["best"]))

    def _rows(self, document: int, shift: int) -> int:
        """Learned rows of a document with a shift."""
        return self._learned(self._documents.lengths[document], self._documents.starts[document], shift)

    def _mine(self, step: int) -> list[Batch]:
        """The batches of this process."""
        return self.schedule.at(step)[self.accelerator.process_index :: self.accelerator.num_processes]

    def _step(
        self, batches: list[Batch], features: Iterator[list[Features]], lr: float
    ) -> tuple[float, dict[int, float], int]:
        """One optimizer step; returns loss, agreement and number of learned rows over all processes.

        Args:
            features: those of this process's batches, one after the other.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        world, levels = self.accelerator.num_processes, self.levels
        # Every process knows the rows of all, so nothing has to be summed before the backward pass.
        rows = sum(self._rows(i, j) for b in batches for i, j in zip(b.documents, b.shifts, strict=True))
        mine = self._mine(self.step)
        # The loss, then the hits of each depth, then the rows of each depth.
        sums = torch.zeros(1 + 2 * levels, dtype=torch.float64)
        self.module.train()
        for k, batch in enumerate(mine):
            wait = self.accelerator.no_sync(self.module) if k < len(mine) - 1 else nullcontext()
            documents = next(features)
            with wait:
                with self.accelerator.autocast():
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
        self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        hits, counts = sums[1 : 1 + levels].tolist(), sums[1 + levels :].tolist()
        return loss, {j + 1: hits[j] / counts[j] for j in range(levels) if counts[j]}, rows

    def _measure(self) -> Simulated | None:
        """Simulated acceptance. Saves the draft if it is the best so far."""
        if self.measure is None:
            return None
        self.module.eval()
        with self.accelerator.autocast():
            simulated = self.measure(self.module)
        self.worse += 1
        if simulated.tree > self.best:
            self.best, self.worse = simulated.tree, 0
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

    def _save(self) -> None:
        state = {
            "best": self.best,
            "worse": self.worse,
            "config": _comparable(self.config),
            "steps": self.schedule.steps,
            "documents": self._digest,
            "width": self.schedule.width,
        }
        checkpoints.save(self.accelerator, self.out / "checkpoints", self.step, state, self.config.keep)

    def _resume(self) -> None:
        newest = checkpoints.newest(self.out / "checkpoints")
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
        checkpoints.restore(path, self.accelerator)
        self.step, self.best, self.worse = state["step"], state["best"], state.get("worse", 0)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _by_depth(depths: torch.Tensor, levels: int) -> torch.Tensor:
    """The number of rows of each of the depths 1 .. levels."""
    return torch.bincount(depths.cpu(), minlength=levels + 1)[1:].double()


# Settings that a resumed run may change: its weights stay the same, up to how batches are shared out.
FREE = {
    "out", "save_every", "keep", "tensorboard", "curves", "threads", "cache", "measure_every", "patience", "device",
    "accumulate", "read_ahead", "recompute",
}  # fmt: skip


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
