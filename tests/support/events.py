"""Round results for tests of drafters without an engine; and the counts of an engine's run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from longdraft import Step
from longdraft.engine.loop import Engine
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree


def _root(s: Sequence) -> TokenTree:
    return TokenTree((s.tokens[-1],), (-1,))


def prefill_event(s: Sequence) -> RoundResult:
    """The prefill of a sequence."""
    return RoundResult(s, _root(s), mode="prefill")


def verify_event(s: Sequence, tree: TokenTree, accepted: int) -> RoundResult:
    """A round that accepted ``accepted`` nodes of a tree."""
    return RoundResult(s, tree, accepted)


def query_event(s: Sequence, queries: Mapping[int, torch.Tensor]) -> RoundResult:
    """A round without a draft; queries: layer -> (query heads, head size) of its token."""
    return RoundResult(s, _root(s), queries={layer: q[:, None] for layer, q in queries.items()})


def rewrite_event(s: Sequence, start: int) -> RoundResult:
    """A round without a draft that rewrote the KV entries from ``start`` on with exact ones."""
    return RoundResult(s, _root(s), kv_rewritten_from=start)


def run_to_end(engine: Engine, sequences: list[Sequence]) -> list[Step]:
    """Runs to the end. Each sequence then has its counts: ``rounds``, ``drafted``, ``accepted``, ``partial_rounds``."""
    engine.cache_manager.slots = len(sequences)
    for s in sequences:
        engine.add(s)
    steps = list(engine.run())
    for s in sequences:
        stats = s.stats
        s.rounds, s.drafted, s.accepted = stats.rounds, stats.drafted, stats.accepted
        s.partial_rounds = stats.partial_rounds
    return steps
