"""Replays recorded runs and computes from measured costs how long a planner's choices would have taken.

    python benchmarks/replay_record.py ... --out FOLDER
    python benchmarks/replay.py FOLDER [--rows 4-7] [--temperature 0] [--batch 1] [--tokens N] [--noise 0.05]
        [--seeds 3] [--carry]

Output does not depend on what is drafted, so what each choice brings at each position is known from one recording. A
round takes what the table of costs says for its verification, a share of a plain step for each draft forward (as
recorded), and a constant for everything else, times noise. The drafters and the planner are those of the package, and
see only what they would see in a run; each prompt, or batch, starts with a planner that knows nothing, or with --carry
with the one of the prompt before. Tokens/s of each contender over those of plain decoding, geometric means over
prompts:

    prompt-lookup   the lookup alone: as it grows by itself, and planned
    draft           the draft alone, planned
    both            the draft in every round, beside the lookup; how much is verified is planned
    default         lookup and draft, used as the planner decides
    hindsight       the least time that any choices could have taken: exactly the nodes that turned out right; of the
                    lookup alone, and with the draft
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.united import UnitedDrafter
from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.planning.costs import Costs, CostTable
from longdraft.planning.planner import Planner
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree

# Seconds of a round beside the draft's forwards and the target's: lookup, tree, acceptance, commit.
REST = 0.0005


@dataclass(frozen=True)
class Recording:
    """One output, and what the draft proposed at each of its positions; see replay_record.py."""

    name: str
    data: str
    row: int
    temperature: float
    prompt: list[int]
    output: list[int]
    trees: list[TokenTree]
    forward: float  # of the draft, in plain steps

    @staticmethod
    def read(file: Path, tokens: int | None = None) -> Recording:
        """Reads a recording; with ``tokens``, only so many tokens of its output."""
        found = json.loads(file.read_text())
        trees = [TokenTree(tuple(t["tokens"]), tuple(t["parents"]), tuple(t["log_probs"])) for t in found["trees"]]
        draft, whole = found["draft_forward_seconds"] or 0.0, found["round_seconds"] or 1.0
        depth = max((max(t.depths) for t in trees), default=0)
        return Recording(
            f"{found['data'].split('_')[0]} {len(found['prompt'])} row {found['row']}",
            found["data"].split("_")[0],
            found["row"],
            found["temperature"],
            found["prompt"],
            found["output"][:tokens],
            trees[: tokens and tokens - 1],
            draft / (whole - depth * draft),
        )


class Replayed(Drafter):
    """A recorded draft: the tree that it would have grown within a budget."""

    max_nodes = 50

    def __init__(self, recordings: list[Recording]) -> None:
        self._recordings = recordings

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        found = [self._within(s, limit) for s in sequences]
        # A batch goes level by level; a tree of d levels takes d forwards, one that stops there is not asked again.
        self.forwards += max((levels for _, levels in found), default=0)
        return [tree for tree, _ in found]

    def _within(self, s: Sequence, limit: NodeLimit | None) -> tuple[TokenTree, int]:
        whole = self._recordings[s.index].trees[len(s.output) - 1]
        if limit is None or not whole.drafted:
            return whole, max(whole.depths)
        expected, levels = 0.0, 0
        scores, depths = whole.path_log_probs, whole.depths
        for levels in range(1, max(depths) + 1):
            chances = sorted((exp(x) for x, d in zip(scores[1:], depths[1:], strict=True) if d <= levels), reverse=True)
            length = sum(chances[: limit.nodes])
            if length - expected <= limit.price:
                break
            expected = length
        return whole.limited(levels).best(max(1, limit.nodes)), levels


@dataclass
class Machine:
    """The seconds that rounds take.

    Attributes:
        costs: of verifications. noise: standard deviation of the logarithm of a round's seconds.
    """

    costs: Costs
    noise: float
    seed: int

    @cached_property
    def _random(self) -> random.Random:
        return random.Random(self.seed)

    def verifying(self, rows: int, lengths: list[int]) -> float:
        return self._noisy(self.costs.verification(rows, lengths))

    def drafting(self, forwards: int, share: float, lengths: list[int]) -> float:
        return self._noisy(REST + forwards * share * self.costs.verification(1, lengths[:1]))

    def _noisy(self, seconds: float) -> float:
        return seconds * exp(self._random.gauss(0.0, self.noise)) if self.noise else seconds


def replay(texts: list[Recording], drafter: Drafter, planner: Planner | None, machine: Machine) -> float:
    """Seconds that a batch takes to decode."""
    going = [Sequence(i, t.prompt, len(t.output), greedy=not t.temperature) for i, t in enumerate(texts)]
    plan = planner.start() if planner else None
    for s in going:
        s.append(texts[s.index].output[0])
        drafter.observe(Event(s, TokenTree((s.prompt[-1],), (-1,)), emitted=(s.output[0],), mode="prefill"))
    total, share = 0.0, fmean(t.forward for t in texts)
    while going := [s for s in going if s.remaining]:
        before = drafter.forwards
        trees = proposed(drafter, plan, going)
        lengths = [len(s.prompt) + len(s.output) for s in going]
        verifying = machine.verifying(max(t.size for t in trees), lengths)
        drafting = machine.drafting(drafter.forwards - before, share, lengths)
        events = [advanced(s, tree, texts[s.index].output) for s, tree in zip(going, trees, strict=True)]
        for event in events:
            drafter.observe(event)
        if plan is not None:
            plan.observe(events, drafter.forwards - before, drafting, verifying)
        total += drafting + verifying
    return total


def proposed(drafter: Drafter, plan: Any, sequences: list[Sequence]) -> list[TokenTree]:
    """The trees that a round verifies, chosen as the engine chooses them."""
    budget = None if plan is None else plan.node_limit(sequences)
    roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in sequences}
    asked = sequences if budget is None or drafter.free else budget.choose(sequences, list(roots.values()))
    grown = dict(zip((s.index for s in asked), drafter.propose(asked, budget) if asked else [], strict=True))
    trees = [grown.get(s.index, roots[s.index]).limited(s.remaining - 1) for s in sequences]
    return trees if plan is None else plan.prune(trees)


def advanced(s: Sequence, tree: TokenTree, output: list[int]) -> Event:
    """Verifies a tree: the recorded tokens are emitted."""
    path, start = [0], len(s.output)
    for token in output[start:]:
        s.append(token)
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    emitted = tuple(s.output[start:])
    return Event(s, tree, len(path) - 1, tuple(path), emitted, len(path) - 1)


def hindsight(text: Recording, machine: Machine, draft: bool = True) -> float:
    """Seconds of the best choices, computed from the last position back to the first.

    Args:
        draft: False if only the lookup may be chosen.
    """
    s, lookup = Sequence(0, text.prompt, len(text.output)), SuffixDrafter()
    s.append(text.output[0])
    lookup.observe(Event(s, TokenTree((0,), (-1,)), emitted=(text.output[0],), mode="prefill"))
    right: list[tuple[int, int]] = []  # at each position, tokens that the lookup has right, and the draft
    for at, tree in enumerate(text.trees, 1):
        (found,) = lookup.propose([s], NodeLimit(1, 0.0))
        right.append((found.follows(text.output[at:]), tree.follows(text.output[at:]) if draft else 0))
        lookup.observe(advanced(s, TokenTree((0,), (-1,)), text.output[: at + 1]))
    last = len(text.output)
    left = [0.0] * (last + 1)  # seconds from so many tokens on
    for at in range(last - 1, 0, -1):
        length, (looked, drafted) = len(text.prompt) + at, right[at - 1]
        choices = [
            REST + levels * text.forward * machine.costs.verification(1, [length])
            + machine.costs.verification(1 + n, [length]) + left[min(at + n + 1, last)]
            for n, levels in [*((n, 0) for n in range(looked + 1)), *((n, n) for n in range(1, drafted + 1))]
        ]  # fmt: skip
        left[at] = min(choices)
    return left[1]


class Always(Planner):
    """A planner that uses the draft in every round."""

    def start(self) -> Any:
        plan = super().start()
        choose = plan._choose

        def everyone(sequences: list[Sequence], trees: list[TokenTree]) -> list[Sequence]:
            choose(sequences, trees)
            return sequences

        plan._choose = everyone  # type: ignore[method-assign]
        return plan


Make = Callable[[list[Recording]], Drafter]
CONTENDERS: dict[str, tuple[Make, type[Planner]]] = {
    "prompt-lookup": (lambda texts: SuffixDrafter(), Planner),
    "draft": (Replayed, Planner),
    "both": (lambda texts: UnitedDrafter(SuffixDrafter(), Replayed(texts)), Always),
    "default": (lambda texts: UnitedDrafter(SuffixDrafter(), Replayed(texts)), Planner),
}


class Comparison:
    """Tokens/s of each contender over plain decoding's, batch by batch.

    Args:
        table: of costs. noise, seeds: of a round's seconds; how often.
        carry: whether a planner goes on to the next batch.
    """

    def __init__(self, table: CostTable, noise: float, seeds: int, carry: bool) -> None:
        self._table, self._noise, self._seeds, self._carry = table, noise, seeds, carry
        self._planners: dict[tuple[str, int], Planner] = {}

    def of(self, texts: list[Recording]) -> dict[str, float]:
        """The ratios, geometric means over seeds."""
        plain = replay(texts, NoDrafter(), None, self._machine(0, 0.0))
        fixed = replay(texts, SuffixDrafter(), None, self._machine(0, 0.0))
        found = {"prompt-lookup fixed": plain / fixed}
        for name in CONTENDERS:
            found[name] = mean(plain / self._seconds(texts, name, seed) for seed in range(self._seeds))
        if len(texts) == 1:
            found["hindsight, lookup"] = plain / hindsight(texts[0], self._machine(0, 0.0), draft=False)
            found["hindsight"] = plain / hindsight(texts[0], self._machine(0, 0.0))
        return found

    def _seconds(self, texts: list[Recording], name: str, seed: int) -> float:
        make, kind = CONTENDERS[name]
        planner = (self._planners.get((name, seed)) if self._carry else None) or kind(self._table)
        self._planners[name, seed] = planner
        return replay(texts, make(texts), planner, self._machine(seed, self._noise))

    def _machine(self, seed: int, noise: float) -> Machine:
        return Machine(Costs(self._table), noise, seed)


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    return exp(fmean(map(log, ratios)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="4-7", help="first and last row of each data file")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--noise", type=float, default=0.05, help="of a round's seconds")
    parser.add_argument("--seeds", type=int, default=3, help="of the noise")
    parser.add_argument("--carry", action="store_true", help="what was learned serves the next prompt")
    parser.add_argument("--tokens", type=int, help="of each output at most")
    options = parser.parse_args()
    first, last = map(int, options.rows.split("-"))
    kept = json.loads((options.folder / "costs.json").read_text())
    table = CostTable(tuple(kept["lengths"]), tuple(kept["rows"]), tuple(map(tuple, kept["seconds"])))
    texts = [Recording.read(f, options.tokens) for f in sorted(options.folder.glob(f"*-T{options.temperature:g}.json"))]
    texts = [t for t in texts if first <= t.row <= last and len(t.output) > 1]
    comparison = Comparison(table, options.noise, options.seeds, options.carry)
    batches = [texts[i : i + options.batch] for i in range(0, len(texts), options.batch)]
    rows = {" + ".join(t.name for t in b): comparison.of(b) for b in batches}
    names = list(next(iter(rows.values())))
    print(f"{'':24}" + "".join(f"{name:>22}" for name in names))
    for data in [*dict.fromkeys(t.data for t in texts), ""]:
        own = [row for name, row in rows.items() if name.startswith(data)]
        line = "".join(f"{mean(row[name] for row in own):22.2f}" for name in names)
        print(f"{data or 'all':14}{len(own):10}" + line)
    print(f"{'lowest':24}" + "".join(f"{min(row[name] for row in rows.values()):22.2f}" for name in names))
    worst = min(rows, key=lambda name: rows[name]["default"] / max(1.0, rows[name]["prompt-lookup"]))
    print("default over the better of ar and prompt-lookup, at worst:", worst, json.dumps(rows[worst]))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
