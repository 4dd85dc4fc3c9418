"""What the loop asks of a planner; :mod:`longdraft.planning` has ours."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree


class Plan(Protocol):
    """Plans the rounds of one run."""

    def node_limit(self, sequences: SequenceOf[Sequence], lengths: SequenceOf[int]) -> NodeLimit:
        """How large this round's trees may be.

        Args:
            lengths: KV rows that a verification reads of each sequence.
        """
        ...

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """The nodes of each tree that are worth verifying."""
        ...

    def observe(self, events: SequenceOf[Event], forwards: int, drafting: float, verifying: float) -> None:
        """Learns from a round.

        Args:
            forwards: forwards of the draft.
            drafting, verifying: seconds.
        """
        ...

    def plain(self, sequences: SequenceOf[Sequence]) -> float:
        """Seconds of a plain decoding step of all sequences."""
        ...


class Planner(Protocol):
    """Makes a plan for each run."""

    def expect(self, drafter: Drafter) -> None:
        """Called before a run with the drafter whose trees will be planned."""
        ...

    def start(self) -> Plan:
        """A plan for a run."""
        ...
