"""How far a draft's distribution is from the target's, by the length of the text, beside what that allows.

    python -m benchmarks.distribution_shift --data pg19.jsonl --lengths 512,2048,7900
    python -m benchmarks.distribution_shift --data rows.jsonl --methods specextend,longspec:draft=DIR --new 64

Texts are sampled at T = 1, and one token is drafted a round. With p the target's distribution of a round's first token,
q the draft's (zero outside its vocabulary), and o = sum of min(p, q) = 1 - TV(p, q), means over all rounds:

    overlap    o: samples of p and q cannot be equal more often
    coupled    o / (2 - o): samples with the same random numbers are equal at least so often (Daliri et al. 2024)
    accepted   the drafted tokens that were accepted, of all that were drafted
    apart      sum of p x q: how often samples with random numbers of their own are equal

A draft to which the length makes no difference has the same overlap at all lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import longdraft
from longdraft.bench.data import Sample, fitted, read
from longdraft.bench.prompts import Prompt
from longdraft.cli.method_options import contender_options
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.engine.draws import OwnDraws
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.schedule import Schedule, Verified
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.trees.level import Level
from longdraft.trees.tree import TokenTree

FIGURES = ("overlap", "coupled", "accepted", "apart")


class Listening(Schedule):
    """Keeps the target's distribution of the first token of each round that was drafted for."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        found = super().verify(sequences, trees)
        if trees[0].size > 1:
            self.said.append(found[0].logits[0].float().softmax(-1))
        return found


def listen(drafter: TreeDrafter, vocabulary: int) -> list[torch.Tensor]:
    """Makes a drafter compute whole distributions, and returns the list that each round's comes into."""
    said: list[torch.Tensor] = []
    grow = drafter.grow

    def listening(sequences: Any, expand: Any, ids: Any, device: Any, limit: Any, *unheard: Any) -> list[TokenTree]:
        def heard(level: Level) -> torch.Tensor:
            logits: torch.Tensor = expand(level)
            q = logits[0, 0].float().softmax(-1)
            said.append(q if ids is None else torch.zeros(vocabulary).scatter_(0, ids, q))
            return logits

        return grow(sequences, heard, ids, device, limit)

    drafter.grow = listening  # type: ignore[assignment]
    return said


def decode(runner: TargetRunner, recipe: Recipe, prompt: Prompt, new: int) -> dict[str, list[float]]:
    """The figures of each round."""
    drafter, schedule, sampling = recipe.drafter(), Listening(), Sampling(1.0)
    assert isinstance(drafter, TreeDrafter)
    said = listen(drafter, runner.model.config.vocab_size)
    sampler = Sampler(False, sampling.processors(), OwnDraws(torch.Generator().manual_seed(0)))
    engine = Engine(runner, drafter, schedule)
    engine.add(Sequence(0, list(prompt.tokens), new, runner.device, greedy=False, sampler=sampler))
    list(engine.run())
    pairs = list(zip(schedule.said, said, strict=True))
    overlaps = [float(torch.minimum(p, q).sum()) for p, q in pairs]
    accepted = engine.stats[0].accepted
    return {
        "overlap": overlaps,
        "coupled": [o / (2 - o) for o in overlaps],
        "accepted": [1.0] * accepted + [0.0] * (len(pairs) - accepted),
        "apart": [float((p * q).sum()) for p, q in pairs],
    }


def prompts(samples: list[Sample], tokenizer: Any, length: int) -> Iterator[Prompt]:
    for sample in samples:
        tokens = tuple(fitted(sample, tokenizer, length))
        if len(tokens) > 0.9 * length:  # a shorter text is of another length
            yield Prompt(sample, tokens, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--data", type=Path, action="append", required=True, help="JSONL of prompts; repeatable")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each file (2)")
    parser.add_argument("--lengths", default="512,2048,4096,7900")
    parser.add_argument("--methods", default="longspec,eagle3,small-lm:view=streaming,specextend")
    parser.add_argument("--new", type=int, default=96, help="new tokens of each text (96)")
    parser.add_argument("--rope-factor", type=float, default=None)
    args = parser.parse_args()
    loaded = longdraft.load(args.model, rope_factor=args.rope_factor, progress=print)
    runner = TargetRunner(loaded.model)
    names = args.methods.split(",")
    options = contender_options(names)
    samples = read(args.data, args.limit)
    for name in names:
        chain = {**options.get(name, {}), "tree": "chain", "depth": 1}
        recipe = recipe_for(*resolve(name.partition(":")[0], chain), runner)
        for length in map(int, args.lengths.split(",")):
            found: dict[str, list[float]] = {figure: [] for figure in FIGURES}
            for prompt in prompts(samples, loaded.tokenizer, length):
                each = decode(runner, recipe, prompt, args.new)
                for figure in FIGURES:
                    found[figure] += each[figure]
            if not found["overlap"]:
                print(f"{name}: no text of {length} tokens")
                continue
            means = {figure: round(mean(values), 3) for figure, values in found.items()}
            print(json.dumps({"method": name, "length": length, "rounds": len(found["overlap"]), **means}), flush=True)


if __name__ == "__main__":
    main()
