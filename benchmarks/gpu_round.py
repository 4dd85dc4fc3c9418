"""The stage of benchmarks/gpu.py that decodes with drafts at the size of an 8B model.

The target is --large, a model of such a shape; without one SmolLM2 and its drafts, padded to the shape of
Llama-3.1-8B (gpu_widened.py); without SmolLM2 random weights, whose drafts are never right. Of each method, plain steps
and rounds are timed in turn, several times, in a store as large as the text and in one that is much larger.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from gpu_common import Sizes, device_of, give_back, half_of, heads_of, load, model_name, random_llama, sizes_of
from gpu_results import Rows, Skipped, Stage
from gpu_widened import Shape, widened_draft, widened_model
from transformers import PreTrainedModel

from longdraft import PromptCache, Speculator
from longdraft.bench import tasks
from longdraft.drafters.shared.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafts import draft_folder, shipped
from longdraft.drafts.kinds import kind_of
from longdraft.errors import LongdraftError, MemoryBudgetError
from longdraft.model import graphs
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.shared_parts import describe

# Methods that are measured, each with the kinds of drafts that it can take, the best first.
METHODS: dict[str, tuple[str, ...]] = {
    "longspec": ("longspec",),
    "eagle3": ("eagle3",),
    "specextend-eagle3": ("eagle3",),
    "specpv": ("eagle3", "longspec"),
    "prompt-lookup": (),
    "magicdec": (),
}
PADDED = ("longspec", "eagle3")
# Rounds that are not counted: sizes are recorded after a few uses.
WARM_UP = graphs.USES + 2


@dataclass
class Subject:
    """The model whose rounds are timed.

    Attributes:
        origin: what it is, for the table.
        prompt: tokens of a text at least as long as the longest context.
        drafts: by kind, the folder of a draft for it.
    """

    model: PreTrainedModel
    origin: str
    prompt: list[int]
    drafts: dict[str, Path] = field(default_factory=dict)


def rounds(stage: Stage, options: argparse.Namespace) -> None:
    sizes, device = sizes_of(options), device_of()
    with tempfile.TemporaryDirectory() as folder:
        made = functools.cache(lambda: subject(options, sizes, device, Path(folder), stage))
        caches: dict[tuple[int, int | None], PromptCache] = {}
        for context, capacity in itertools.product(sizes.round_contexts, (None, sizes.large_capacity)):
            room = "exact capacity" if capacity is None else f"capacity {capacity:,}"
            for method in METHODS:
                work = functools.partial(timed, made, method, context, capacity, sizes, caches)
                stage.measure(f"{context:,} tokens, {room}, {method}", work)
            caches.clear()
            give_back(device)


# --- the model and its drafts ---


def subject(options: argparse.Namespace, sizes: Sizes, device: torch.device, folder: Path, stage: Stage) -> Subject:
    """Loads, pads or makes the model, and writes its drafts into a folder."""
    context, dtype = sizes.large_capacity + max(sizes.round_contexts), half_of(device)
    longest, drawn = max(sizes.round_contexts), torch.Generator().manual_seed(0)
    if options.large is not None:
        stage.say(f"reading {options.large}")
        loaded = load(options.large, dtype)
        found = Subject(loaded.model, Path(options.large).name, prompt_of(loaded, longest))
    else:
        try:
            small = load(model_name(options), dtype)
        except (LongdraftError, ImportError) as error:
            stage.say(f"random weights: {error}")
            model = random_llama(sizes.model, sizes, device, dtype, context)
            prompt = torch.randint(sizes.model["vocab_size"], (longest,), generator=drawn).tolist()
            found = Subject(model, "random weights", prompt)
        else:
            stage.say("padding SmolLM2")
            shape = sizes.model
            inner, layers = shape["intermediate_size"], shape["num_hidden_layers"]
            large = Shape(shape["hidden_size"], inner, layers, *heads_of(sizes))
            model = widened_model(small.model, large, context, device, dtype)
            found = Subject(model, "SmolLM2, padded", prompt_of(small, longest))
    _add_drafts(found, folder)
    return found


def _add_drafts(to: Subject, folder: Path) -> None:
    """Writes drafts for the model: the shipped ones, padded, if it has SmolLM2's tokens; else a random one."""
    target, large = describe(to.model), Shape.of(to.model)
    for path in shipped.folders():
        kind = draft_folder.kind(path)
        if kind not in PADDED:
            continue
        draft: Any = kind_of(path).load(path)
        known = draft.made_for
        if known["vocab_size"] == target["vocab_size"] and known["hidden_size"] <= target["hidden_size"]:
            draft_folder.save(folder / kind, widened_draft(draft, known["layers"], large, target))
            to.drafts[kind] = folder / kind
    if not to.drafts:
        to.drafts["longspec"] = _random_draft(to.model, large, folder / "longspec")


def _random_draft(model: PreTrainedModel, shape: Shape, folder: Path) -> Path:
    """A LongSpec draft with random weights: its rounds take as long as any, and hardly anything is accepted."""
    block = LongSpecBlock(LongSpecShape(shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim))
    block.initialise()
    config = block.shape.as_dict() | {"trained_length": model.config.max_position_embeddings}
    draft_folder.save(folder, draft_folder.trained("longspec", config, block.state_dict(), None, describe(model)))
    return folder


def prompt_of(loaded: LoadedModel, length: int) -> list[int]:
    """Tokens of modules of Python's standard library, repeated where they are fewer."""
    documents = dict.fromkeys(sample.document for sample in tasks.built_in())
    tokens: list[int] = []
    for document in itertools.cycle(documents):
        tokens += loaded.tokenizer.encode(document)
        if len(tokens) >= length:
            return tokens[:length]
    raise Skipped("there are no texts")


# --- rounds ---


def timed(
    made: Any,
    method: str,
    context: int,
    capacity: int | None,
    sizes: Sizes,
    caches: dict[tuple[int, int | None], PromptCache],
) -> Rows:
    """Milliseconds of a round and of a plain step, tokens a round, and what both make together."""
    found: Subject = made()
    options: dict[str, Any] = {}
    if kinds := METHODS[method]:
        kind = next((k for k in kinds if k in found.drafts), None)
        if kind is None:
            raise Skipped(f"there is no {kinds[0]} draft for {found.origin}")
        options = {"draft": found.drafts[kind]}
        if method == "specpv":
            options |= {"drafter": kind, "budget": 2 * sizes.budget}
    spec = Speculator(method, target=found.model, plan="fixed", **options)
    plain = Speculator("ar", target=found.model)
    cache = caches.setdefault((context, capacity), PromptCache(_features(found)))
    prompt, most = found.prompt[:context], sizes.round_tokens
    room = most if capacity is None else capacity - context
    try:
        runs = [
            (_run(plain, prompt, most, room, cache), _run(spec, prompt, most, room, cache)) for _ in range(sizes.rounds)
        ]
    except (MemoryBudgetError, torch.OutOfMemoryError) as error:
        raise Skipped(str(error)) from error
    step, spent = (median(run[i][0] for run in runs) for i in (0, 1))
    tokens = runs[0][1][1]
    return [{
        "what": "rounds", "model": found.origin, "method": method, "context": context, "room": context + room,
        "step_ms": 1e3 * step, "round_ms": 1e3 * spent, "steps_a_round": spent / step, "tokens_a_round": tokens,
        "tokens_per_second": tokens / spent, "speedup_vs_ar": tokens * step / spent, "repeats": sizes.rounds,
    }]  # fmt: skip


def _features(found: Subject) -> tuple[int, ...]:
    """Layers whose hidden states a cache keeps, so that every method goes on from it."""
    folder = found.drafts.get("eagle3")
    return () if folder is None else Speculator("eagle3", target=found.model, draft=folder).feature_layers()


def _run(spec: Speculator, prompt: list[int], most: int, room: int, cache: PromptCache) -> tuple[float, float]:
    """Seconds and tokens of a round, means over the rounds after the first ones.

    Args:
        most: new tokens after which it is ended.
        room: new tokens that memory is taken for.
    """
    run = spec.stream([prompt], max_new_tokens=room, eos_token_ids=[], cache=cache)
    seconds: list[float] = []
    emitted: list[int] = []
    for step in run:
        if step.mode != "prefill":
            seconds.append(step.seconds)
            emitted.append(len(step.token_ids))
        if sum(emitted) >= most - 1:
            break
    run.close()
    kept = slice(WARM_UP if len(seconds) > 2 * WARM_UP else len(seconds) // 2, None)
    if not seconds[kept]:
        raise RuntimeError("no round was made")
    return fmean(seconds[kept]), fmean(emitted[kept])
