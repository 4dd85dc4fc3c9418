"""Events as an engine would tell them, for tests of drafters alone; and what an engine counted."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from longdraft import Step
from longdraft.engine.event import Event
from longdraft.engine.loop import Engine
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree


def _root(s: Sequence) -> TokenTree:
    return TokenTree((s.tokens[-1],), (-1,))


def begun(s: Sequence) -> Event:
    """Its prompt has been read."""
    return Event(s, _root(s), mode="prefill")


def verified(s: Sequence, tree: TokenTree, accepted: int) -> Event:
    """A round that accepted so many of a tree's nodes."""
    return Event(s, tree, accepted)


def attended(s: Sequence, queries: Mapping[int, torch.Tensor]) -> Event:
    """A round without a draft; queries: layer -> (query heads, head size) of its row."""
    return Event(s, _root(s), queries={layer: q[:, None] for layer, q in queries.items()})


def replaced(s: Sequence, start: int) -> Event:
    """A round without a draft that made the rows from ``start`` on exact."""
    return Event(s, _root(s), replaced=start)


def decoded(engine: Engine, sequences: list[Sequence]) -> list[Step]:
    """Runs to the end; each sequence then knows its rounds, and what was drafted and accepted of them."""
    engine.slots = len(sequences)
    for s in sequences:
        engine.add(s)
    steps = list(engine.run())
    for s in sequences:
        stats = s.stats
        s.rounds, s.drafted, s.accepted = stats.rounds, stats.drafted, stats.accepted
        s.partial_rounds = stats.partial_rounds
    return steps
