"""The training loop of all kinds of draft, on accelerate: one process, DDP or FSDP2. A kind says its loss.

Everything random is a function of the seed and the step. So a killed run that resumes from its last checkpoint ends
with the same weights, and two processes get the weights of one that accumulates twice the batches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft.drafts import draft_folder, hub
from longdraft.errors import CheckpointError, NumericalError, PromptError
from longdraft.files import atomic_write, file_errors, read_json
from longdraft.training.config import EVAL_DEPTH, RunConfig
from longdraft.training.features import Features
from longdraft.training.session import TrainingSession
from longdraft.training.simulated_acceptance import SimulatedAcceptance, simulate
from longdraft.training.trainer import DraftTrainer, StepOutput

LOG, CHECKPOINTS, STATE = "log.jsonl", "checkpoints", "state.json"
# Held-out documents of a measurement: enough to compare, few enough to be quick.
MAX_EVAL_DOCUMENTS = 48
# Devices on which torch updates all weights in one kernel.
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
# Settings that a resumed run may change: its weights stay the same, up to how batches are shared out.
RESUME_MAY_CHANGE = {
    "out", "save_every", "keep", "track", "threads", "cache", "measure_every", "device", "accumulate", "recompute",
}  # fmt: skip


class BatchIndices(NamedTuple):
    """Numbers of packed documents, the shift j of each (flash noisy training), and the epoch from 0 on."""

    documents: Sequence[int]
    shifts: Sequence[int]
    epoch: int = 0


class BatchSampler:
    """The batches of each step, a group of ``processes * accumulate``: a function of the seed alone.

    An incomplete last group of an epoch is left out; the next epoch's shuffle puts other documents into it. If an epoch
    makes no complete group, its one step takes as many batches as all processes can have alike, so that none waits for
    the others; :meth:`batches` then returns no batch if there are fewer batches than processes.

    Args:
        rows: learned tokens of each document. A batch is closed when one more would exceed ``config.loss_tokens``.
        shifts: those of documents are uniform in 1 .. shifts.

    Attributes:
        counts: steps of each epoch. steps: of all. width: batches of a step.
    """

    def __init__(self, loss_tokens: Sequence[int], config: RunConfig, max_shift: int = 1, processes: int = 1) -> None:
        self._rows, self._config, self._shifts, self._processes = loss_tokens, config, max_shift, processes
        self._epoch = lru_cache(1)(self._laid_out)
        self.batches_per_step, epochs = processes * config.accumulate, config.epochs
        self.steps_per_epoch = [
            max(1, len(self._epoch(i)[2]) // self.batches_per_step) for i in range(math.ceil(epochs))
        ]
        if epochs % 1:
            self.steps_per_epoch[-1] = max(1, int(self.steps_per_epoch[-1] * (epochs % 1)))
        self.steps = min(sum(self.steps_per_epoch), config.max_steps or sum(self.steps_per_epoch))

    def batches(self, step: int) -> list[BatchIndices]:
        """The batches of one step. Process i takes every n-th of them from the i-th on."""
        number = 0
        while step >= self.steps_per_epoch[number]:
            step -= self.steps_per_epoch[number]
            number += 1
        order, shifts, ends = self._epoch(number)
        first = step * self.batches_per_step
        count = min(self.batches_per_step, len(ends) - first) // self._processes * self._processes
        places = [slice(ends[i - 1] if i else 0, ends[i]) for i in range(first, first + count)]
        return [BatchIndices(order[each], shifts[each], number) for each in places]

    def _laid_out(self, epoch: int) -> tuple[array[int], array[int], array[int]]:
        """An epoch's documents in their order, each one's shift, and where batches end: 8 bytes a document."""
        rng = random.Random(f"{self._config.seed}/{epoch}")
        order = array("i", range(len(self._rows)))
        rng.shuffle(order)
        ends, filled = array("i"), 0
        for place, i in enumerate(order):
            if place and filled + self._rows[i] > self._config.rows:
                ends.append(place)
                filled = 0
            filled += self._rows[i]
        ends.append(len(order))
        return order, array("i", (rng.randint(1, self._shifts) for _ in order)), ends


@dataclass(frozen=True)
class StepReport:
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
    simulated: SimulatedAcceptance | None = None


class TrainingLoop:
    """Trains one module on the learned documents of a session; a resumed run must have the same.

    Args:
        layers: decoder layers whose hidden states the draft reads; (): the last layer's KV; None: the text alone.
        kind, described: the draft's kind, and what its config.json adds to the common entries.
        levels: the largest depth that the trainee reports. measured: levels that simulated acceptance drafts.
        shifts: the largest shift that a document is given.
        fit: called with a document's features before the first step.

    Raises:
        PromptError: the data make fewer batches than there are processes.
    """

    def __init__(
        self,
        session: TrainingSession,
        trainer: DraftTrainer,
        layers: tuple[int, ...] | None,
        kind: str,
        draft_config: Mapping[str, Any],
        *,
        levels: int,
        eval_levels: int = EVAL_DEPTH,
        max_shift: int = 1,
        on_start: Callable[[Features], None] | None = None,
    ) -> None:
        config, accelerator, held_out = session.config, session.accelerator, session.held_out
        self.session, self.config, self.accelerator, self.trainer = session, config, accelerator, trainer
        self.kind, self.draft_config = kind, {"base_model": hub.base_model_name(config.target), **draft_config}
        self.levels, self.eval_levels, self.out = levels, eval_levels, Path(config.out)
        self._documents, self._reader = (
            session.train_documents,
            session.feature_reader(layers, trainer.needs_target_argmax),
        )
        if on_start is not None:
            on_start(self._features(0, 0))
        if config.distill:
            trainer.measure_logit_scale(session.runner)
        trainer.to(session.runner.device)
        # Documents to measure on have more learned tokens than a round has levels.
        spans = zip(held_out.lengths, held_out.starts, held_out.masked_counts, strict=True)
        long = [i for i, (length, start, context) in enumerate(spans) if length - start - context > eval_levels]
        if config.held_out and not long:
            raise PromptError(f"No held-out document has more than {eval_levels} learned tokens: raise held_out.")
        self.held_out = [held_out[i] for i in long[:: max(1, len(long) // MAX_EVAL_DOCUMENTS)][:MAX_EVAL_DOCUMENTS]]
        processes = accelerator.num_processes
        rows = array("i", (self._rows(i, 0) for i in range(len(self._documents))))
        self.sampler = BatchSampler(rows, config, max_shift, processes)
        if not self.sampler.batches(0):
            raise PromptError(f"The data make fewer batches than {processes} processes: give more text or lower rows.")
        weights, betas = list(trainer.parameters()), (config.betas[0], config.betas[1])
        groups: list[dict[str, Any]] = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        fused = weights[0].device.type in FUSED_DEVICES
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
        self.module, self.optimizer = accelerator.prepare(trainer, optimizer)
        # Tokens a round, of the best draft so far: a dead one has 1.
        self.step, self.best = 0, 1.0
        self._simulated: SimulatedAcceptance | None = None

    def run(self) -> Iterator[StepReport]:
        """Trains to the end and yields a report for each step. The session's ``stop`` writes a checkpoint and ends.

        Every process iterates and gets the same reports; the ``stop`` of any of them stops all.

        Raises:
            CheckpointError: a checkpoint is damaged or of other settings or data, or the disk is full.
            NumericalError: the loss or a gradient is not a number, or the draft is never right; checkpoints are kept.
        """
        self._resume()
        steps, accelerator = self.sampler.steps, self.accelerator
        if self.step == steps:
            self.session.progress(f"{self.out} holds all {steps:,} steps of this run: nothing is left to train")
        elif self.step:
            self.session.progress(f"resuming at step {self.step:,} of {steps:,}")
        if accelerator.is_main_process:
            self._cut_log()
        accelerator.init_trackers("longdraft")
        try:
            while self.step < steps:
                report = self._step()
                self._log(report)
                yield report
                if self.session.stop():
                    accelerator.set_trigger()
                last, stopping = self.step == steps, accelerator.check_trigger()
                if last or stopping or _due(self.step, self.config.save_every):
                    self._save()
                if stopping and not last:
                    return
            self._save_draft("last", *([] if self.held_out else ["best"]))
            if self.held_out and self.best <= 1:
                raise NumericalError(
                    f"The draft learned nothing: on {len(self.held_out)} held-out documents it is never right. Lower "
                    f"lr, or give more text or steps, and another `out`. The last draft is in {self.out / 'last'}."
                )
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()

    def _rows(self, i: int, shift: int) -> int:
        """Learned rows of a document with a shift."""
        documents = self._documents
        return (
            self.trainer.num_loss_tokens(documents.lengths[i], documents.starts[i], shift) - documents.masked_counts[i]
        )

    def _features(self, i: int, epoch: int) -> Features:
        offset = self.session.anchor_offset
        return self._reader.read(self._documents[i], offset(i, epoch), cached_offset=offset(i, 0))

    def _step(self) -> StepReport:
        """One step of the optimizer, and a measurement if one is due."""
        started, config, steps = time.perf_counter(), self.config, self.sampler.steps
        world, levels = self.accelerator.num_processes, self.levels
        lr = learning_rate(self.step, steps, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = self.sampler.batches(self.step)
        # Every process knows the rows of all, so nothing has to be summed before the backward pass.
        rows = sum(self._rows(i, j) for b in batches for i, j in zip(b.documents, b.shifts, strict=True))
        mine = batches[self.accelerator.process_index :: world]
        # The loss, then the hits of each depth, then the rows of each depth.
        sums = torch.zeros(1 + 2 * levels, dtype=torch.float64)
        self.module.train()
        for batch in mine:
            documents = [self._features(i, batch.epoch) for i in batch.documents]
            with nullcontext() if batch is mine[-1] else self.accelerator.no_sync(self.module):
                out: StepOutput = self.module(documents, batch.shifts)
                # Gradients are averaged over processes; times their number, the loss is the mean over all rows.
                self.accelerator.backward(out.loss * (world / rows))
            right, learned = out.ranks == 0, slice(None) if out.loss_mask is None else out.loss_mask
            counted = out.depths[learned][right[learned]], out.depths[learned]
            each = (depths.cpu().bincount(minlength=levels + 1)[1:] for depths in counted)
            sums += torch.cat([out.loss.detach().cpu()[None], *each])  # not every device has float64
        if world > 1:
            sums = self._summed(sums.float()).double()
        loss = float(sums[0]) / rows
        norm = float(self.accelerator.clip_grad_norm_(self.module.parameters(), config.clip))
        for what, number in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(number):
                step = self.step + 1
                raise NumericalError(f"The {what} is {number} at step {step}. Lower lr: the last checkpoint is kept.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        speed = rows / (time.perf_counter() - started)
        self.step += 1
        hits, counts = sums[1:].view(2, levels).tolist()
        agreement = {j + 1: hits[j] / counts[j] for j in range(levels) if counts[j]}
        due = self.step == steps or _due(self.step, config.measure_every)
        return StepReport(self.step, steps, loss, lr, agreement, speed, self._measure() if due else None)

    def _measure(self) -> SimulatedAcceptance | None:
        """Simulated acceptance. Saves the draft if it is the best so far."""
        if not self.held_out:
            return None
        self.module.eval()
        # Every process measures all; of sums, their figures are the same whatever the last bits.
        held_out = map(self._reader.read, self.held_out)
        simulated = simulate(self.module, held_out, self.eval_levels, self.trainer.level_mode, self._summed)
        self._simulated = simulated
        if simulated.tree > self.best:
            self.best = simulated.tree
            self._save_draft("best")
        return simulated

    def _summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Sums over all processes."""
        total: torch.Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return total.cpu()

    def _save_draft(self, *names: str) -> None:
        weights = self.accelerator.get_state_dict(self.module)  # by every process, as each has its shards
        if self.accelerator.is_main_process:
            tensors = {name.removeprefix("block."): t for name, t in weights.items()}
            target = self.session.runner.shared_parts.description
            described = {**self.draft_config, "training": self._history()}
            draft = draft_folder.from_training(self.kind, described, tensors, self.trainer.draft_to_target, target)
            for name in names:
                draft_folder.save(self.out / name, draft)
        self.accelerator.wait_for_everyone()

    def _history(self) -> dict[str, Any]:
        """Returns the training data, steps and simulated acceptance, for the draft's config.json and card."""
        config, documents, simulated = self.config, self._documents, self._simulated
        return {
            "data": [Path(place).name for place in config.data],
            "documents": len(documents),
            "tokens": sum(documents.lengths) - sum(documents.starts) - sum(documents.masked_counts),
            "steps": self.step,
            "epochs": config.epochs,
            **({"init": Path(config.init).name} if config.init else {}),
            **({} if simulated is None else {"held_out": len(self.held_out), "simulated": asdict(simulated)}),
        }

    # --- the log: a row a step ---

    def _cut_log(self) -> None:
        """Drops the rows of steps that are computed again."""
        if (path := self.out / LOG).exists():
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
            with atomic_write(path) as part:
                part.write_text("".join(rows[: self.step]), encoding="utf-8")

    def _log(self, report: StepReport) -> None:
        """Appends a row to the log and tells the trackers."""
        row = {name: value for name, value in asdict(report).items() if name != "steps" and value is not None}
        if self.accelerator.is_main_process:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                with (self.out / LOG).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise CheckpointError(f"{self.out / LOG} cannot be written: {error}.") from error
        values = {name: row[name] for name in ("loss", "lr", "tokens_per_second")}
        values |= {f"agreement/{level}": share for level, share in report.agreement.items()}
        if report.simulated is not None:
            values |= {"simulated/chain": report.simulated.chain, "simulated/tree": report.simulated.tree}
        self.accelerator.log(values, report.step)

    # --- checkpoints: a folder for each, whole once it has its state; all processes must see the same disk ---

    def _checkpoints(self) -> list[Path]:
        """Those that are whole, oldest first."""
        return sorted(path.parent for path in (self.out / CHECKPOINTS).glob(f"step-*/{STATE}"))

    def _save(self) -> None:
        """Writes a checkpoint and drops old ones. Raises CheckpointError if that fails; earlier ones are kept."""
        path = self.out / CHECKPOINTS / f"step-{self.step:08d}"
        state = {"step": self.step, "best": self.best, **self._identity}
        try:
            self.accelerator.save_state(str(path))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                with atomic_write(path / STATE) as part:
                    part.write_text(json.dumps(state), encoding="utf-8")
                for old in {*path.parent.glob("step-*")} - {*self._checkpoints()[-self.config.keep :]}:
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise CheckpointError(f"Could not write the checkpoint {path}: {error}. Earlier ones are kept.") from error
        self.accelerator.wait_for_everyone()

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Settings and data that a resumed run must have in common with its checkpoint, as JSON returns them."""
        config = {name: value for name, value in self.config.as_dict().items() if name not in RESUME_MAY_CHANGE}
        own = {
            "steps": self.sampler.steps,
            "documents": self._documents.digest(),
            "width": self.sampler.batches_per_step,
        }
        found: dict[str, Any] = json.loads(json.dumps({"config": config} | own))
        return found

    def _resume(self) -> None:
        """Loads the newest checkpoint, if there is one. A run at its end goes on if it is given more epochs or steps.

        Raises CheckpointError if it is of another run.
        """
        for path in self._checkpoints()[-1:]:
            with file_errors(path, f"The checkpoint {path} cannot be read", "Delete it, to go on from the one before."):
                state, own = read_json(path / STATE), self._identity
                # A setting that came later than the checkpoint had its default.
                there = {f.name: f.default for f in dataclasses.fields(self.config)} | state["config"] | state
                here = own | own["config"]
                longer = state["step"] == state["steps"] < self.sampler.steps
                names = sorted({*here} - {"config"} - ({"epochs", "max_steps", "steps"} if longer else set()))
                different = [f"{n}: {there.get(n)} there, {here[n]} here" for n in names if there.get(n) != here[n]]
                if different:
                    what = f"{self.out} holds a run with other settings or data ({'; '.join(different)})"
                    raise CheckpointError(f"{what}. Give another `out`, or delete its checkpoints.")
                self.accelerator.load_state(str(path))
                self.step, self.best = int(state["step"]), max(1.0, float(state["best"]))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def learning_rate(step: int, steps: int, config: RunConfig) -> float:
    """Linear warm-up, then half a cosine down to ``min_lr`` of the peak; ``step`` counts from 0."""
    warm = max(1, round(config.warmup * steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))
