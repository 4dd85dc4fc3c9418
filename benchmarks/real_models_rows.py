"""Rows of benchmarks/real_models.py: each yields its cells' names, and for each a function that measures it.

A cell is a dict that JSON holds. One that cannot be measured has only ``skipped``, a sentence.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import longdraft
from longdraft import LoadedModel, PromptCache, Sampling, Speculator
from longdraft.bench.contenders import Contender, Job, Kept, Ours, Run
from longdraft.bench.data import read
from longdraft.bench.hf import Generate
from longdraft.engine.loop import PREFILL_CHUNK
from longdraft.engine.schedule import verify_trees
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.planning.load import OtherProcesses
from longdraft.trees.builders import chain

Cell = dict[str, Any]
Cells = Iterator[tuple[str, Callable[[], Cell]]]

# Rows that a plain decoding step or a verification needs behind the longest text.
ROOM = 64
# Rows of a KV store that are filled at a time.
FILLED = 1024
WARM_UP = 3


@dataclass
class Model:
    """A GGUF file, and how it is measured.

    Attributes:
        args: the command line. say: prints a line of progress.
        build: what llama-bench says of itself; empty before its first run.
    """

    name: str
    path: Path
    args: Any
    say: Callable[[str], None]
    build: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> LoadedModel:
        return longdraft.load(self.path, device="cpu", arithmetic=self.args.arithmetic, progress=self.say)

    @cached_property
    def runner(self) -> TargetRunner:
        return TargetRunner(self.loaded.model)

    def too_long(self, tokens: int) -> Cell | None:
        """The cell of a text that does not fit the model's context; None for one that does."""
        limit = self.runner.context_length
        return {"skipped": f"the model's context is {limit:,}"} if tokens > limit else None

    def llama(self, *, prompt: int = 0, new: int = 0, depth: int = 0) -> float:
        """Tokens a second of one llama-bench run: ``prompt`` tokens read, or ``new`` ones decoded behind ``depth``."""
        command = [self.args.llama_bench, "-m", self.path, "-t", self.args.threads, "-fa", 1]
        command += ["-p", prompt, "-n", new, "-d", depth, "-r", 1, "-o", "json"]
        words = list(map(str, command))
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
        (found,) = json.loads(done.stdout)
        self.build = {name: found.get(name) for name in ("build_commit", "build_number", "model_type")}
        return float(found["avg_ts"])

    def text(self, tokens: int) -> list[int]:
        """Token ids of a made-up text, always the same."""
        made = torch.Generator().manual_seed(tokens)
        return torch.randint(self.runner.vocab_size, (tokens,), generator=made).tolist()


# --- plain: decoding one token after the other ---


def plain(model: Model) -> Cells:
    """Tokens a second of plain decoding at each length."""
    for length in model.args.lengths:
        yield f"{length}", partial(_plain, model, length)


def _plain(model: Model, length: int) -> Cell:
    new = model.args.steps
    if (cell := model.too_long(length + new)) is not None:
        return cell
    theirs, own, busy = [], [], []
    store = _filled(model, length)
    _decode(model, store, WARM_UP)
    for turn in range(model.args.repeats):
        model.say(f"  turn {turn + 1} of {model.args.repeats}: llama-bench, then ours")
        theirs.append(model.llama(new=new, depth=length))
        others = OtherProcesses()
        own.append(new / _decode(model, store, new))
        busy.append(others.cores)
    return _against(own, theirs, busy)


def _decode(model: Model, store: KVStore, steps: int) -> float:
    """Seconds of greedy decoding behind a store's text, which is left as it was."""
    length, token = store.lengths[0], 1
    start = time.perf_counter()
    for _ in range(steps):
        logits = verify_trees(model.runner, store, [0], [chain(token, ())]).logits
        assert logits is not None
        token = int(logits[0, 0].argmax())
        store.commit(0, [0])
    seconds = time.perf_counter() - start
    store.truncate(0, length)
    return seconds


def _filled(model: Model, length: int) -> KVStore:
    """A store that holds a text: random keys and values, or with --real-kv those of a made-up text."""
    store = model.runner.new_store(1, length + max(model.args.steps, ROOM))
    tokens, shape = model.text(length), store.shape
    piece = PREFILL_CHUNK if model.args.real_kv else FILLED
    for start in range(0, length, piece):
        rows = tokens[start : start + piece]
        if model.args.real_kv:
            if start:
                model.say(f"  {start:,} of {length:,} tokens read")
            model.runner.forward(store.block([0], [rows], prompt=True), store, logits="none")
        else:
            kv = torch.randn(2, shape.layers, shape.kv_heads, len(rows), shape.head_dim).to(shape.dtype)
            store.put_rows(0, start, *kv)
        store.commit(0, range(len(rows)))
    return store


# --- prompt: reading a text ---


def prompt(model: Model) -> Cells:
    """Tokens a second of reading a prompt, as a user's run does."""
    for length in model.args.prompt_lengths:
        yield f"{length}", partial(_prompt, model, length)


def _prompt(model: Model, length: int) -> Cell:
    if (cell := model.too_long(length + 1)) is not None:
        return cell
    spec = Speculator("ar", model.loaded.model, model.loaded.tokenizer)
    theirs, own, busy = [], [], []
    spec.generate([model.text(64)], max_new_tokens=2, eos_token_ids=[])
    for turn in range(model.args.repeats):
        model.say(f"  turn {turn + 1} of {model.args.repeats}: llama-bench, then ours")
        theirs.append(model.llama(prompt=length))
        others = OtherProcesses()
        (result,) = spec.generate([model.text(length)], max_new_tokens=1, eos_token_ids=[])
        own.append(length / result.prefill_seconds)
        busy.append(others.cores)
    return _against(own, theirs, busy)


# --- verify: a forward over several drafted tokens ---


def verify(model: Model) -> Cells:
    """Seconds of verifying a chain of some rows, over those of a plain step."""
    for length in model.args.verify_lengths:
        yield f"{length}", partial(_verify, model, length)


def _verify(model: Model, length: int) -> Cell:
    sizes = [1, *model.args.verify_rows]
    if (cell := model.too_long(length + max(sizes))) is not None:
        return cell
    store, others = _filled(model, length), OtherProcesses()
    seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
    for turn in range(-1, model.args.verify_turns):
        for rows, own in seconds.items():
            start = time.perf_counter()
            verify_trees(model.runner, store, [0], [chain(1, range(1, rows))])
            if turn >= 0:  # the first turn warms up
                own.append(time.perf_counter() - start)
    step = median(seconds[1])
    return {
        "step_seconds": step,
        "over_step": {str(rows): median(own) / step for rows, own in seconds.items() if rows > 1},
        "other_cores": others.cores,
    }


# --- default: prompts decoded by the default method ---


def default(model: Model) -> Cells:
    """The default method on held-out prompts, a cell for each file."""
    for file in model.args.prompt_files:
        yield file.stem, partial(_default, model, file)


def _default(model: Model, file: Path) -> Cell:
    jobs = _jobs(model, file)
    if not jobs:
        return {"skipped": "no prompt of these lengths"}
    kept = Kept(PromptCache())
    spec = Speculator(None, model.loaded.model, model.loaded.tokenizer)
    spec.planner(model.say)
    ar = Ours("ar", Speculator("ar", model.loaded.model, model.loaded.tokenizer), kept)
    own = Ours("default", spec, kept)
    ours: list[Contender] = [ar, own]
    for contender in ours:  # what only a first run does
        contender.cold(Job((tuple(model.text(64)),), 8, Sampling(), 0, frozenset()))
    depth = int(median(len(job.prompts[0]) for job in jobs))
    model.say(f"  llama-bench at {depth:,} tokens")
    theirs = [model.llama(new=model.args.new_tokens, depth=depth)]
    others, found = OtherProcesses(), []
    for i, job in enumerate(jobs, 1):
        model.say(f"  prompt {i} of {len(jobs)}: {len(job.prompts[0]):,} tokens")
        found.append(_raced(ours, job, model.args.repeats))
    busy = others.cores
    kept.clear()
    model.say(f"  llama-bench at {depth:,} tokens")
    theirs.append(model.llama(new=model.args.new_tokens, depth=depth))
    rates = {name: geometric([each[name]["tokens_per_second"] for each in found]) for name in ("ar", "default")}
    rounds = sum(each["default"]["rounds"] for each in found)
    return {
        "method": spec.method.name,
        "prompt_tokens": depth,
        "prompts": found,
        "ar": rates["ar"],
        "default": rates["default"],
        "llama": median(theirs),
        "over_ar": rates["default"] / rates["ar"],
        "over_llama": rates["default"] / median(theirs),
        "mean_accepted_length": sum(each["default"]["new_tokens"] - 1 for each in found) / rounds,
        "different": sum(not each["same_tokens"] for each in found),
        "other_cores": busy,
    }


def _jobs(model: Model, file: Path) -> list[Job]:
    """Prompts of a file that have a length that was asked for and fit the context."""
    shortest, longest = model.args.prompt_tokens
    new, samples = model.args.new_tokens, read([file])
    found = []
    for row in model.args.data_rows:
        if row < len(samples):
            tokens = samples[row].encode(model.loaded.tokenizer)
            if shortest <= len(tokens) <= min(longest, model.runner.context_length - new):
                found.append(Job((tuple(tokens),), new, Sampling(), 0, frozenset()))
    return found


def _raced(contenders: Sequence[Contender], job: Job, repeats: int) -> dict[str, Any]:
    """Figures of a prompt by each contender, who take turns."""
    runs: dict[str, list[Run]] = {each.name: [] for each in contenders}
    for turn in range(repeats):
        for i, each in enumerate(contenders):
            # The first reads the prompt, and the others start from what it kept.
            runs[each.name].append(each.cold(job) if turn == i == 0 else each.warm(job))
    first = next(iter(runs.values()))[0]
    found: dict[str, Any] = {name: _figures(own) for name, own in runs.items()}
    return found | {
        "prompt_tokens": len(job.prompts[0]),
        "prefill_seconds": first.first_token_seconds,
        "same_tokens": all(run.tokens == first.tokens for own in runs.values() for run in own),
    }


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    rates = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return {
        "tokens_per_second": median(rates),
        "new_tokens": runs[0].new_tokens,
        "rounds": sum(runs[0].rounds),
        "mean_accepted_length": runs[0].mean_accepted_length,
    }


# --- transformers: a peer that needs the weights in float32 ---


def transformers(model: Model) -> Cells:
    """Plain decoding by transformers' ``generate``, on the prompts of ``default``, a cell for each file."""
    for file in model.args.prompt_files if model.args.transformers else ():
        yield file.stem, partial(_transformers, model, file)


def _transformers(model: Model, file: Path) -> Cell:
    jobs = _jobs(model, file)
    if not jobs:
        return {"skipped": "no prompt of these lengths"}
    unpacked = longdraft.load(
        model.path, device="cpu", arithmetic="float32", weights="float32", progress=model.say
    ).model
    peer, found = Generate(unpacked), []
    for i, job in enumerate(jobs, 1):
        model.say(f"  prompt {i} of {len(jobs)}: {len(job.prompts[0]):,} tokens")
        found.append(_raced([peer], job, model.args.repeats))
    return {
        "prompt_tokens": int(median(each["prompt_tokens"] for each in found)),
        "prompts": found,
        "tokens_per_second": geometric([each["hf"]["tokens_per_second"] for each in found]),
    }


ROWS: dict[str, Callable[[Model], Cells]] = {
    "plain": plain,
    "prompt": prompt,
    "verify": verify,
    "default": default,
    "transformers": transformers,
}


def geometric(numbers: Sequence[float]) -> float:
    """Geometric mean."""
    return exp(mean(map(log, numbers)))


def _against(own: Sequence[float], theirs: Sequence[float], busy: Sequence[float]) -> Cell:
    """The cell of two rates that took turns: medians and their ratio."""
    return {
        "ours": median(own),
        "llama": median(theirs),
        "ratio": median(own) / median(theirs),
        "turns": {"ours": list(own), "llama": list(theirs)},
        "other_cores": max(busy),
    }
