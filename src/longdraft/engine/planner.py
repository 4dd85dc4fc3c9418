"""The contract of a planner, as the loop uses it; :mod:`longdraft.planning` implements it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree


class Plan(Protocol):
    """Plans the rounds of one run: each asks for a node limit, prunes its trees, and reports what happened."""

    def node_limit(self, sequences: SequenceOf[Sequence], lengths: SequenceOf[int]) -> NodeLimit | None:
        """Returns how large this round's trees may be; None for no limit.

        Args:
            lengths: KV rows that a verification reads of each sequence.
        """
        ...

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Keeps the nodes of each tree that are worth verifying."""
        ...

    def observe(self, events: SequenceOf[Event], forwards: int, drafting: float, verifying: float) -> None:
        """Learns from a round.

        Args:
            events: one for each sequence.
            forwards: forwards of the draft.
            drafting, verifying: seconds.
        """
        ...


class Planner(Protocol):
    """Makes a plan for each run."""

    def start(self, drafter: Drafter) -> Plan:
        """Begins a run of this drafter."""
        ...
