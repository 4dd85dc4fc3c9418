"""The last stage of benchmarks/gpu.py: the papers' tables, with published drafts for a target."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from gpu_common import device_of, give_back, half_of, load, sizes_of, tiny_folder
from gpu_results import Rows, Skipped, Stage
from gpu_texts import decode

from longdraft.bench import tasks
from longdraft.bench.prompts import prepare
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.methods import method_of

ASK = (
    "give --target FOLDER_OR_ID and --draft FOLDER_OR_ID (a LongSpec or EAGLE-3 draft for it, ours or as its authors "
    "publish it; repeatable), and --data FILE.jsonl for texts of 32K tokens and more"
)
EXTENDED = {"eagle3": "specextend-eagle3", "small-lm": "specextend"}
# SpecPV's table: 4,096 rows of the text.
BUDGET = 4096


def tables(stage: Stage, options: argparse.Namespace) -> None:
    """Every method of the papers that the drafts allow, at each context; a unit a text and a method."""
    target, given = options.target, options.draft
    if options.smallest and target is None:  # what the stages before have made
        trained = stage.out / "training" / "last"
        target, given = tiny_folder(stage.out), [str(trained)] if trained.exists() else None
    if not target or not given:
        raise Skipped(ASK)
    sizes, device = sizes_of(options), device_of()
    loaded = load(target, half_of(device))
    contenders = contenders_of([folder_of(word) for word in given], sizes.budget if options.smallest else BUDGET)
    samples = tasks.read(options.data or [tasks.BUILT_IN], sizes.samples)

    def measured(context: int, number: int, contender: str) -> Rows:
        settings = Settings(
            methods=(contender,), max_tokens=sizes.tokens, contexts=(context,), repeats=sizes.rounds,
            raw=options.smallest, cold=False, own_options={contender: contenders[contender]},
        )  # fmt: skip
        prompts = prepare(samples[number : number + 1], loaded, settings)
        rows = decode(stage, Bench(loaded, settings, progress=stage.say), [tuple(prompts)], "tables", target)
        return [row for row in rows if row["method"] == contender]

    for number, sample in enumerate(samples):
        for context in sizes.tables:
            for contender in contenders:
                unit = f"{sample.dataset}, {sample.origin}, {context:,} tokens, {contender}"
                stage.measure(unit, functools.partial(measured, context, number, contender))
                give_back(device)


def folder_of(word: str) -> Path:
    """A draft's folder, fetched from the hub where it is none."""
    if Path(word).is_dir():
        return Path(word).absolute()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(word))


def contenders_of(folders: list[Path], budget: int) -> dict[str, dict[str, Any]]:
    """Contenders by name, with their options: what needs no draft, then what each draft allows."""
    found: dict[str, dict[str, Any]] = {"ar": {}, "prompt-lookup": {}, "magicdec": {}}
    for folder in folders:
        kind = method_of(folder).name
        draft = {"draft": str(folder)}
        found[kind] = draft
        if kind in EXTENDED:
            found[EXTENDED[kind]] = draft
        for method in ("specpv", "specpv-exact"):
            found[f"{method}:{kind}"] = draft | {"drafter": kind, "budget": budget}
    return found
