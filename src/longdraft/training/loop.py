"""The training loop of all kinds of draft, on accelerate: one process, DDP or FSDP2.

All random choices depend only on the seed and the step. So a run that was killed and resumes from its last checkpoint
ends with the same weights, and two processes get the weights of one process that accumulates twice the batches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from longdraft.drafts import draft_folder, hub
from longdraft.errors import CheckpointError, NumericalError, PromptError
from longdraft.files import atomic_write, file_errors, read_json
from longdraft.training.batch_sampler import BatchSampler
from longdraft.training.config import EVAL_DEPTH, RunConfig
from longdraft.training.features import Features
from longdraft.training.session import TrainingSession
from longdraft.training.simulated_acceptance import SimulatedAcceptance, simulate
from longdraft.training.trainer import DraftTrainer, StepOutput

LOG, CHECKPOINTS, STATE = "log.jsonl", "checkpoints", "state.json"
MAX_EVAL_DOCUMENTS = 48  # documents of a measurement: enough to compare drafts, few enough to be quick
MAX_LOSS_DOCUMENTS = 8  # documents on which the target's loss is measured with and without anchor-offsets
# Devices on which torch has a fused AdamW.
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
# Settings that a resumed run may change, because they do not affect the weights.
RESUME_MAY_CHANGE = {"out", "save_every", "keep", "track", "threads", "cache", "measure_every", "device"}
RESUME_MAY_CHANGE |= {"accumulate", "recompute"}


@dataclass(frozen=True)
class StepReport:
    """The metrics of a step, over all processes."""

    step: int  # number of this step, from 1
    steps: int  # number of steps of the run
    loss: float  # mean over the tokens in the loss, in nats
    lr: float
    agreement: dict[int, float]  # share of the tokens in the loss that are the draft's first choice, by level
    tokens_per_second: float  # tokens in the loss (without prompts) / seconds of the step, without measurements
    simulated: SimulatedAcceptance | None = None  # on held-out documents; None: not measured at this step


Reports = Iterator[StepReport]


class TrainingLoop:
    """Trains a draft on a session's documents, and writes log, checkpoints and drafts. Raises PromptError if the data
    make fewer batches than there are processes.

    Args:
        layers: decoder layers whose output states the draft reads; (): the last layer's KV; None: token ids alone.
        draft_config: entries of the draft's config.json that its kind needs.
        levels: largest depth in the trainer's results.
        eval_levels: depth of simulated acceptance.
        max_shift: largest shift of a document.
        on_start: called with the features of the first document before the first step.
    """

    def __init__(
        self, session: TrainingSession, trainer: DraftTrainer, layers: tuple[int, ...] | None, kind: str,
        draft_config: Mapping[str, Any], *, levels: int, eval_levels: int = EVAL_DEPTH, max_shift: int = 1,
        on_start: Callable[[Features], None] | None = None,
    ) -> None:  # fmt: skip
        config, accelerator, held_out = session.config, session.accelerator, session.held_out
        self.session, self.config, self.accelerator, self.trainer = session, config, accelerator, trainer
        self.kind, self.draft_config = kind, {"base_model": hub.base_model_name(config.target), **draft_config}
        self.levels, self.eval_levels, self.out = levels, eval_levels, Path(config.out)
        self._documents = session.train_documents
        self._reader = session.feature_reader(layers, trainer.needs_target_argmax)
        if on_start is not None:
            on_start(self._features(0, 0))
        if config.distill:
            trainer.measure_logit_scale(session.runner)
        trainer.to(session.runner.device)
        sizes = zip(held_out.lengths, held_out.starts, held_out.masked_counts, strict=True)
        usable = [i for i, (length, start, masked) in enumerate(sizes) if length - start - masked > eval_levels]
        if config.held_out and not usable:
            raise PromptError(f"No held-out document has more than {eval_levels} tokens in the loss: raise held_out.")
        stride = max(1, len(usable) // MAX_EVAL_DOCUMENTS)  # evenly spread over the data
        self.held_out = [held_out[i] for i in usable[::stride][:MAX_EVAL_DOCUMENTS]]
        loss_tokens = array("i", (self._count_loss_tokens(i, 0) for i in range(len(self._documents))))
        self.sampler = BatchSampler(loss_tokens, config, max_shift, accelerator.num_processes)
        if not self.sampler.batches(0):
            problem = f"The data make fewer batches than {accelerator.num_processes} processes"
            raise PromptError(f"{problem}: give more text, or lower rows.")
        weights, betas = list(trainer.parameters()), (config.betas[0], config.betas[1])
        groups: list[dict[str, Any]] = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        fused = weights[0].device.type in FUSED_DEVICES
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
        self.module, self.optimizer = accelerator.prepare(trainer, optimizer)
        # ``best``: the highest simulated acceptance so far, in tokens a round. A draft that is never right has 1.
        self.step, self.best = 0, 1.0
        self._simulated: SimulatedAcceptance | None = None

    def run(self) -> Reports:
        """Trains to the end and yields a report for each step, the same in every process. If ``session.stop()`` returns
        True in any process, all processes write a checkpoint and end.

        Raises:
            CheckpointError: a checkpoint is damaged or of other settings or data, or the disk is full.
            NumericalError: the loss or a gradient is not finite, or the draft is never right. Checkpoints are kept.
        """
        self._resume()
        steps, accelerator = self.sampler.steps, self.accelerator
        if self.step == steps:
            self.session.progress(f"{self.out} holds all {steps:,} steps of this run: nothing is left to train")
        elif self.step:
            self.session.progress(f"resuming at step {self.step:,} of {steps:,}")
        elif self.config.anchor_offset and self.held_out:
            self._report_target_loss()
        if accelerator.is_main_process:
            self._truncate_log()
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

    def _report_target_loss(self) -> None:
        """Reports how the target's loss changes with anchor-offsets (LongSpec, 3.2: by 0.001), on some held-out
        documents."""
        documents, losses = self.held_out[:MAX_LOSS_DOCUMENTS], list[float]()
        for largest in (0, self.config.anchor_offset):
            offsets = [largest * (i + 1) // len(documents) for i in range(len(documents))]  # spread evenly
            losses.append(mean(map(self._reader.target_loss, documents, offsets)))
        self.session.progress(
            f"the target's loss on {len(documents)} held-out documents: {losses[0]:.4f} nats, with anchor-offsets "
            f"{losses[1] - losses[0]:+.4f}"
        )

    def _count_loss_tokens(self, i: int, shift: int) -> int:
        """Returns the number of labels of document i, with a shift, that count in the loss."""
        documents = self._documents
        num_labels = self.trainer.count_labels(documents.lengths[i], documents.starts[i], shift)
        return num_labels - documents.masked_counts[i]

    def _features(self, i: int, epoch: int) -> Features:
        """Returns the features of document i with the anchor-offset of an epoch."""
        return self._reader.read(self._documents[i], self.session.anchor_offset(i, epoch))

    def _step(self) -> StepReport:
        """Takes a step of the optimizer, and measures simulated acceptance if a measurement is due."""
        started, config, steps = time.perf_counter(), self.config, self.sampler.steps
        num_processes, levels = self.accelerator.num_processes, self.levels
        lr = learning_rate(self.step, steps, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = self.sampler.batches(self.step)
        # Every process counts the tokens in all processes' batches, so that the counts need not be communicated.
        pairs = (pair for batch in batches for pair in zip(batch.documents, batch.shifts, strict=True))
        loss_tokens = sum(self._count_loss_tokens(i, shift) for i, shift in pairs)
        local_batches = batches[self.accelerator.process_index :: num_processes]
        # The loss, then the number of correct tokens of each level, then the number of tokens of each level.
        sums = torch.zeros(1 + 2 * levels, dtype=torch.float64)
        self.module.train()
        for batch in local_batches:
            documents = [self._features(i, batch.epoch) for i in batch.documents]
            with nullcontext() if batch is local_batches[-1] else self.accelerator.no_sync(self.module):
                out: StepOutput = self.module(documents, batch.shifts)
                # DDP averages gradients over processes. The factor ``num_processes`` makes the average a sum.
                self.accelerator.backward(out.loss * (num_processes / loss_tokens))
            mask = slice(None) if out.loss_mask is None else out.loss_mask
            depths, is_correct = out.depths[mask], (out.ranks == 0)[mask]
            counts = (d.cpu().bincount(minlength=levels + 1)[1:] for d in (depths[is_correct], depths))
            sums += torch.cat([out.loss.detach().cpu()[None], *counts])
        if num_processes > 1:
            sums = self._all_reduce(sums.float()).double()  # not every device has float64
        loss = float(sums[0]) / loss_tokens
        norm = float(self.accelerator.clip_grad_norm_(self.module.parameters(), config.clip))
        for name, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                problem = f"The {name} is {value} at step {self.step + 1}"
                raise NumericalError(f"{problem}. Lower lr: the last checkpoint is kept.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        speed = loss_tokens / (time.perf_counter() - started)
        self.step += 1
        num_correct, num_tokens = sums[1:].view(2, levels).tolist()
        agreement = {i + 1: num_correct[i] / num_tokens[i] for i in range(levels) if num_tokens[i]}
        due = self.step == steps or _due(self.step, config.measure_every)
        return StepReport(self.step, steps, loss, lr, agreement, speed, self._measure() if due else None)

    def _measure(self) -> SimulatedAcceptance | None:
        """Measures simulated acceptance on held-out documents. Saves the draft if it is the best so far."""
        if not self.held_out:
            return None
        self.module.eval()
        # Every process measures all documents. The results may differ by rounding; the sum over processes does not. So
        # all processes agree on which draft is the best.
        held_out = map(self._reader.read, self.held_out)
        simulated = simulate(self.module, held_out, self.eval_levels, self.trainer.level_mode, self._all_reduce)
        self._simulated = simulated
        if simulated.tree > self.best:
            self.best = simulated.tree
            self._save_draft("best")
        return simulated

    def _all_reduce(self, counts: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over all processes."""
        total: torch.Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return total.cpu()

    def _save_draft(self, *names: str) -> None:
        """Writes the draft to the folders ``names`` in the run's folder."""
        weights = self.accelerator.get_state_dict(self.module)  # in every process, because each may hold a shard
        if self.accelerator.is_main_process:
            tensors = {name.removeprefix("block."): t for name, t in weights.items()}
            target = self.session.runner.shared_parts.description
            config = {**self.draft_config, "training": self._history()}
            draft = draft_folder.from_training(self.kind, config, tensors, self.trainer.draft_to_target, target)
            for name in names:
                draft_folder.save(self.out / name, draft)
        self.accelerator.wait_for_everyone()

    def _history(self) -> dict[str, Any]:
        """Returns the training data, steps and simulated acceptance, for the draft's config.json and card."""
        config, documents, simulated = self.config, self._documents, self._simulated
        return {
            "data": [Path(source).name for source in config.data],
            "documents": len(documents),
            "tokens": sum(documents.lengths) - sum(documents.starts) - sum(documents.masked_counts),
            "steps": self.step,
            "epochs": config.epochs,
            **({"init": Path(config.init).name} if config.init else {}),
            **({} if simulated is None else {"held_out": len(self.held_out), "simulated": asdict(simulated)}),
        }

    # --- the log: a row for each step ---

    def _truncate_log(self) -> None:
        """Removes the rows of steps after the checkpoint: these steps are computed again."""
        if (path := self.out / LOG).exists():
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
            with atomic_write(path) as part:
                part.write_text("".join(rows[: self.step]), encoding="utf-8")

    def _log(self, report: StepReport) -> None:
        """Writes a row to the log and to accelerate's trackers."""
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

    # --- checkpoints: a folder is complete once it holds the state file; all processes must see the same disk ---

    def _checkpoints(self) -> list[Path]:
        """Returns the folders of complete checkpoints, oldest first."""
        return sorted(path.parent for path in (self.out / CHECKPOINTS).glob(f"step-*/{STATE}"))

    def _save(self) -> None:
        """Writes a checkpoint, then deletes old ones. Raises CheckpointError, and keeps earlier ones, if that fails."""
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
        """Settings and data, as JSON values. They must be equal in a checkpoint and in the run that resumes from it."""
        config = {name: value for name, value in self.config.as_dict().items() if name not in RESUME_MAY_CHANGE}
        data = {"documents": self._documents.digest(), "width": self.sampler.batches_per_step}
        return dict(json.loads(json.dumps({"config": config, "steps": self.sampler.steps, **data})))

    def _resume(self) -> None:
        """Loads the newest checkpoint, if there is one. A finished run may continue with more epochs or steps.
        Raises CheckpointError if the checkpoint is damaged, or belongs to a run with other settings or data."""
        for path in self._checkpoints()[-1:]:
            with file_errors(path, f"The checkpoint {path} cannot be read", "Delete it to resume from the one before."):
                state, identity = read_json(path / STATE), self._identity
                # Settings that an old checkpoint lacks did not exist then: the run had the defaults.
                saved = {f.name: f.default for f in dataclasses.fields(self.config)} | state["config"] | state
                current = identity | identity["config"]
                is_extended = state["step"] == state["steps"] < self.sampler.steps
                names = sorted({*current} - {"config"} - ({"epochs", "max_steps", "steps"} if is_extended else set()))
                changed = [name for name in names if saved.get(name) != current[name]]
                differences = [f"{name}: {saved.get(name)} there, {current[name]} here" for name in changed]
                if differences:
                    problem = f"{self.out} holds a run with other settings or data ({'; '.join(differences)})"
                    raise CheckpointError(f"{problem}. Give another `out`, or delete its checkpoints.")
                self.accelerator.load_state(str(path))
                self.step, self.best = int(state["step"]), max(1.0, float(state["best"]))


def _due(step: int, every: int) -> bool:
    """True if ``step`` is a multiple of ``every``; 0: never."""
    return every > 0 and step % every == 0


def learning_rate(step: int, steps: int, config: RunConfig) -> float:
    """Returns the learning rate of a step, from 0: linear warm-up, then cosine decay to ``min_lr`` times the peak."""
    warmup_steps = max(1, round(config.warmup * steps))
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))
