"""Stages of benchmarks/gpu.py on SmolLM2 with the shipped drafts: whole texts, batches, training."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from statistics import median

from gpu_common import (
    device_of,
    environment,
    give_back,
    half_of,
    load,
    model_name,
    setups,
    sizes_of,
)
from gpu_results import Rows, Skipped, Stage, failed_units
from transformers import PreTrainedModel

from longdraft.bench import report, tasks
from longdraft.bench.data import fitted
from longdraft.bench.prompts import Group, Prompt, prepare
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.drafts import shipped
from longdraft.errors import CheckpointError, LongdraftError
from longdraft.methods import METHODS
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

# Decoded in batches: plainly, with a lookup, two trained drafts, a method made for batches, an approximate one.
IN_BATCHES = ("ar", "prompt-lookup", "longspec", "eagle3", "magicdec", "specpv")


def usable(model: PreTrainedModel) -> tuple[str, ...]:
    """Methods that need no draft, or whose draft is available for this model."""
    known = TargetRunner(model).parts.description
    return tuple(
        m.name for m in METHODS.values() if not m.needs_draft or shipped.fitting(known, m.draft_kind) is not None
    )


def exact_methods(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(name for name in usable(model) if METHODS[name].exact)


def prompts_of(loaded: LoadedModel, settings: Settings, samples: int, data: Sequence[str] = ()) -> list[Prompt]:
    """Prompts of each context; about modules of Python's standard library where no files are given."""
    return prepare(tasks.read(data or [tasks.BUILT_IN], samples), loaded, settings)


def decode(stage: Stage, bench: Bench, groups: Sequence[Group], what: str, setup: str) -> Rows:
    """The bench's rows for groups of prompts."""
    bench.wake(groups[0][0])
    measured = [bench.measure(group, lambda name: stage.file.touch()) for group in groups]
    return [{"what": what, "setup": setup, **row} for row in report.rows(bench.names, measured)]


def small_model(options: argparse.Namespace) -> LoadedModel:
    """SmolLM2 in the dtype whose speed is measured.

    Raises:
        Skipped: the model is not available.
    """
    try:
        return load(model_name(options), half_of(device_of()))
    except (LongdraftError, ImportError) as error:
        raise Skipped(f"{error} (--model FOLDER)") from error


def sound(stage: Stage, methods: Sequence[str]) -> tuple[str, ...]:
    """The methods without those that failed in the stage `correctness`, which would spoil the other figures."""
    broken = {unit.rpartition(", ")[2] for unit in failed_units(stage.out, "correctness") if unit.startswith("exact, ")}
    if left_out := broken & set(methods):
        stage.say(f"without what broke in correctness: {', '.join(sorted(left_out))}")
    return tuple(m for m in methods if m not in broken)


# --- whole texts ---


def texts(stage: Stage, options: argparse.Namespace) -> None:
    """Every exact method and transformers' generate on single prompts, planned; a unit a prompt, all in turn in it."""
    sizes, loaded = sizes_of(options), small_model(options)
    settings = Settings(
        methods=(*sound(stage, exact_methods(loaded.model)), "hf"), max_tokens=sizes.tokens, contexts=sizes.texts,
        repeats=sizes.rounds, raw=options.smallest, ignore_eos=True, cold=False,
    )  # fmt: skip
    groups = [(prompt,) for prompt in prompts_of(loaded, settings, sizes.samples)]
    _measure(stage, loaded, settings, groups, "texts")


def batches(stage: Stage, options: argparse.Namespace) -> None:
    """A few methods on batches of prompts whose lengths reach from half of the longest to the longest."""
    sizes, loaded = sizes_of(options), small_model(options)
    methods = [m for m in IN_BATCHES if m in usable(loaded.model)]
    settings = Settings(
        methods=sound(stage, methods), max_tokens=sizes.tokens, batches=sizes.batches, repeats=sizes.rounds,
        raw=options.smallest, ignore_eos=True, cold=False,
    )  # fmt: skip
    samples = list(itertools.islice(itertools.cycle(tasks.read([tasks.BUILT_IN])), max(sizes.batches)))
    longest, groups = sizes.batch_text, []
    for size in sizes.batches:
        lengths = [longest - i * longest // (2 * size) for i in range(size)]
        cut = [fitted(s, loaded.tokenizer, n, options.smallest) for s, n in zip(samples, lengths, strict=False)]
        groups.append(tuple(Prompt(s, tuple(tokens), longest) for s, tokens in zip(samples, cut, strict=False)))
    _measure(stage, loaded, settings, groups, "batches")


def _measure(stage: Stage, loaded: LoadedModel, settings: Settings, groups: list[Group], what: str) -> None:
    runner = TargetRunner(loaded.model)
    for setup, values in setups(runner.device, loaded.model.dtype, runner.kv_shape.head_dim).items():
        with environment(**values):
            bench = functools.cache(lambda: Bench(loaded, settings, progress=stage.say))
            for group in groups:
                lengths = ", ".join(f"{len(prompt.tokens):,}" for prompt in group)
                unit = f"{setup}, {group[0].sample.dataset}, {group[0].sample.origin}, {lengths} tokens"
                # One group a unit: what is measured of others stays whatever happens to it.
                stage.measure(
                    unit, lambda bench=bench, group=group, setup=setup: decode(stage, bench(), [group], what, setup)
                )
            del bench
        give_back(runner.device)


# --- training ---


def training(stage: Stage, options: argparse.Namespace) -> None:
    """A LongSpec draft from nothing, for a minute: learned tokens a second, the median of the steps after the third."""
    stage.measure("longspec", lambda: _train(stage, options))


def _train(stage: Stage, options: argparse.Namespace) -> Rows:
    try:
        from longdraft.training.config import TrainConfig
        from longdraft.training.longspec import train_longspec
    except ImportError as error:
        raise Skipped(f'{error}: pip install "longdraft[train]"') from error
    sizes, folder, device = sizes_of(options), stage.out / "training", device_of()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    folder.mkdir(parents=True)
    data = folder / "data.jsonl"
    documents = dict.fromkeys(sample.document for sample in tasks.built_in())
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    seconds = min(sizes.training_seconds, 0.5 * stage.seconds_left)
    config = TrainConfig(
        data=(str(data),), out=str(folder), target=model_name(options), device=str(device), held_out=0.0,
        max_length=sizes.training_rows // 4, rows=sizes.training_rows, save_every=0, measure_every=0,
        target_dtype="bfloat16" if device.type == "cuda" else "auto",
        precision="bf16" if device.type == "cuda" else "no",
        epochs=0.02 if options.smallest else 1000.0, window=64 if options.smallest else 512,
    )  # fmt: skip
    first: list[float] = []
    reports = []
    try:
        for one in train_longspec(config, stop=lambda: time.monotonic() - first[0] > seconds if first else False):
            first.append(time.monotonic())
            reports.append(one)
    except CheckpointError as error:
        raise Skipped(str(error)) from error
    later = reports[3:] or reports
    row = {"what": "training", "draft": "longspec", "steps": len(reports), "rows": config.rows}
    row |= {"tokens_per_second": median(r.tokens_per_second for r in later)}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return [row | {"first_loss": reports[0].loss, "last_loss": reports[-1].loss}]
