"""Draft lengths by batch and context, in the form that vLLM takes (``num_speculative_tokens_per_batch_size``).

A cell's draft length K gives the most tokens a second by calculation. A round of K drafted tokens emits one and the
shares of rounds that accepted 1, 2, ... K. It takes a verification of K + 1 rows of each sequence, and K drafts. Each
takes what measured rounds took beyond their verification, for all sequences together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from longdraft.bench.acceptance import Acceptance, Accepted
from longdraft.bench.tables import depth_accepted, table
from longdraft.planning import costs
from longdraft.planning.costs import Costs, CostTable

BATCHES = (1, 4, 16, 64)
# Rows of the forwards that are timed.
ROWS = (1, 4, 8, 16, 64)
ABOUT = (
    "draft length: drafted tokens a round; 0: decode plainly. Calculated from what was accepted and from forwards on "
    "this machine: for another engine a first table, to be measured there."
)


@dataclass(frozen=True)
class Schedule:
    """Draft lengths of a method.

    Attributes:
        batches, contexts: ascending; a size between two of them has the draft length of the larger one.
        lengths: for each batch size, for each context.
    """

    method: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields of vLLM's ``--speculative-config``: the table by batch and context, and those of one context."""
        batches, contexts = _ranges(self.batches), _ranges(self.contexts)
        return {
            "method": self.method,
            "num_speculative_tokens": max(1, *(max(row) for row in self.lengths)),  # vLLM takes no 0 here
            "num_speculative_tokens_per_batch_size": [
                [*batch, *context, k]
                for batch, row in zip(batches, self.lengths, strict=True)
                for context, k in zip(contexts, row, strict=True)
            ],
            "by_context": {
                str(context): [[*batch, row[i]] for batch, row in zip(batches, self.lengths, strict=True)]
                for i, context in enumerate(self.contexts)
            },
        }

    def shown(self) -> tuple[str, Table]:
        """A title and a table."""
        made = table(["batch"], [f"{context:,}" for context in self.contexts])
        for batch, row in zip(self.batches, self.lengths, strict=True):
            made.add_row(f"{batch}", *map(str, row))
        return f"Draft length for vLLM by batch and context: {self.method}", made

    def __str__(self) -> str:
        entries = json.dumps(self.as_dict()["num_speculative_tokens_per_batch_size"])
        return f'{self.method}: "num_speculative_tokens_per_batch_size": {entries}'


def schedules(
    hosted: Acceptance, runs: Sequence[Accepted], lengths: Sequence[int], batches: Sequence[int] = BATCHES
) -> list[Schedule]:
    """The schedules of the methods that had drafted tokens accepted; forwards are timed behind made-up texts."""
    measured = None if hosted.target is None else costs.measure(hosted.target, sorted(lengths), ROWS)
    made = [] if measured is None else [schedule(name, runs, measured, batches) for name in hosted.settings.methods]
    return [each for each in made if each is not None]


def schedule(
    method: str, runs: Sequence[Accepted], measured: CostTable, batches: Sequence[int] = BATCHES
) -> Schedule | None:
    """The schedule of a method from its runs at several lengths; None if none of them drafted anything."""
    own = [run for run in runs if run.asked.method == method and run.accepted and run.seconds]
    contexts = tuple(sorted({run.asked.length for run in own}))
    by_context = [[run for run in own if run.asked.length == length] for length in contexts]
    if not any(accepted for run in own for accepted, _ in run.accepted):
        return None
    batches = sorted(set(batches))
    lengths = tuple(
        tuple(_best(there, measured, batch, length) for there, length in zip(by_context, contexts, strict=True))
        for batch in batches
    )
    return Schedule(method, tuple(batches), contexts, lengths)


def _best(runs: Sequence[Accepted], measured: CostTable, batch: int, length: int) -> int:
    forwards, lengths = Costs(measured), [length] * batch
    shares = depth_accepted([pair for run in runs for pair in run.accepted])
    deepest = len(shares)
    if not deepest:
        return 0
    round_ = median((run.seconds or 0.0) / len(run.accepted) for run in runs)
    draft = max(0.0, round_ - forwards.verification(deepest + 1, [length])) / deepest
    rates = [(1 + sum(shares[:k])) / (forwards.verification(k + 1, lengths) + k * draft) for k in range(deepest + 1)]
    return rates.index(max(rates))


def _ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    """From 1 to the first end, from there to the second, and so on."""
    return [(before + 1, end) for before, end in zip([0, *ends[:-1]], ends, strict=True)]
