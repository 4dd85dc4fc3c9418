"""The break-even of drafts that cost nothing, calculated, and of a draft on this machine, for ``longdraft doctor``.

What a verification costs behind texts of several lengths is measured behind made-up texts
(:mod:`longdraft.planning.costs`); what drafting costs, in a few rounds behind a short one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.bench.contenders import Job
from longdraft.bench.profile import profile
from longdraft.engine.sampler import Sampling
from longdraft.methods import method_of
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner
from longdraft.planning import costs
from longdraft.planning.costs import table_for
from longdraft.speculator import Speculator

# Rows of the verifications behind made-up texts.
VERIFIED = (1, 4, 8, 16)
# Rows of a round, root included; tokens of the short text; rounds that are looked at.
ROWS, PROMPT, ROUNDS = 8, 128, 6


@dataclass(frozen=True)
class Free:
    """A verification of so many rows behind so many tokens, in plain steps there."""

    tokens: int
    rows: int
    steps: float


def verifications(runner: TargetRunner, lengths: Sequence[int], more: Sequence[int] = ()) -> costs.CostTable | None:
    """Times verifications behind made-up texts; lengths that do not fit context, memory or time are left out.

    Args:
        more: numbers of rows besides :data:`VERIFIED`, all of them larger.
    """
    rows = (*VERIFIED, *more)
    fitting = [n for n in sorted(lengths) if n + rows[-1] <= runner.context_length]
    return costs.measure(runner, fitting, rows) if fitting else None


def free(measured: costs.CostTable | None) -> list[Free]:
    """What verifications cost in plain steps; nothing where none were timed."""
    if measured is None:
        return []
    return [Free(n, r, measured.at(r, n) / measured.at(1, n)) for n in measured.lengths for r in measured.rows[1:]]


@dataclass(frozen=True)
class BreakEven:
    """The accepted length at which a round is as fast as plain decoding, behind so many tokens.

    Attributes:
        tokens: of text. rows: of a round's verification, root included.
        verification, drafting: in plain steps behind that text.
    """

    tokens: int
    rows: int
    verification: float
    drafting: float

    @property
    def accepted(self) -> float:
        """The accepted length that is needed, bonus token included."""
        return self.verification + self.drafting

    def __str__(self) -> str:
        return (
            f"behind {self.tokens:,} tokens, a round of {self.rows} rows must have {self.accepted:.1f} tokens accepted "
            f"to pay (verifying {self.verification:.1f} plain steps, drafting {self.drafting:.1f})"
        )


def break_even(loaded: LoadedModel, draft: Path, progress: Progress | None = None) -> list[BreakEven]:
    """The break-even of a draft behind a short, a middling and a long text; empty where memory allows none.

    Raises:
        LongdraftError: the draft cannot be used.
    """
    method = method_of(draft)
    shape: dict[str, Any] = {"nodes": ROWS - 1} if "nodes" in method.options else {}
    spec = Speculator(method.name, loaded.model, loaded.tokenizer, draft=draft, plan="fixed", **shape)
    runner = spec.runner()
    table = table_for(runner, progress=progress)
    if table is None:
        return []
    tokens = random.Random(0).choices(range(runner.vocab_size), k=PROMPT)
    job = Job((tuple(tokens),), 2 * ROUNDS * ROWS, Sampling(), 0, frozenset())
    seen = profile(spec, job, rounds=ROUNDS)
    drafting = 0.0 if seen is None else seen.seconds["draft"]
    return [
        BreakEven(n, ROWS, table.at(ROWS, n) / table.at(1, n), drafting / table.at(1, n)) for n in table.lengths[:3]
    ]
