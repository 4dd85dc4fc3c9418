"""The contracts of a drafter, and of a planner, which :mod:`longdraft.planning` implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.view import View


class Drafter(ABC):
    """Proposes continuations of all active sequences together, so that a neural one can batch.

    Four methods, ``bind``, ``propose``, ``observe`` and ``release``; the rest declares what it needs of the target and
    what it costs. A drafter may be wrong at will: it decides how fast decoding is, never what comes out.
    """

    max_nodes: int
    """Largest number of drafted nodes of any tree; the cache keeps this much scratch space."""

    free: bool = False
    """True if it can propose without a forward of a draft."""

    forwards: int = 0
    """Forwards of a draft so far; stays 0 if drafting costs next to nothing."""

    prior_acceptance: float = 0.0
    """Chance that a drafted token is right before any was seen; for drafters with :meth:`kv_tokens_read`."""

    forward_cost_ratio: float = 1.0
    """Time of a forward of the target's own layers with the draft's weights, divided by one with the target's."""

    num_prompt_queries: int = 1
    """Number of a prompt's last tokens whose queries it wants, if any; the first event brings them."""

    @property
    def views(self) -> tuple[View, ...]:
        """Its views of longer texts, once it is bound; empty if it sees all rows or none."""
        return ()

    def use_planner(self) -> None:  # noqa: B027
        """Called first if a planner sizes the trees: each :meth:`propose` then gets a limit."""

    def use_chains(self) -> bool:
        """Called first if a branch of a tree costs the target more than a row does: trees become chains, unless the
        user chose their shape.

        Returns:
            True if every tree is a chain from now on.
        """
        return False

    def kv_tokens_read(self, context_len: int) -> float | None:
        """Rows that a draft forward reads of a text's KV, in rows of the target's size; None for another model."""
        return None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose output hidden states it reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose queries events shall bring."""
        return ()

    def needs_queries(self, sequences: list[Sequence]) -> bool:
        """True if the next event shall bring the queries of :meth:`query_layers`, of any of these sequences."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Called once a run, before anything else, with the target and its KV (readable rows may be read).

        Raises:
            CheckpointError: a draft was made for another target, or its weights cannot be read.
            UnsupportedModelError: the target has nothing that the draft could share, or is not one to draft for so.
            MemoryBudgetError: what it needs beside the KV does not fit the memory that is free.
        """

    @abstractmethod
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        """Returns a tree for each sequence, rooted at its last emitted token.

        Not every round calls this: tokens that were emitted since the last call are in the sequences.

        Args:
            limit: how large the trees may be; None: the sizes that the drafter was made with.
        """

    def observe(self, round_result: RoundResult) -> None:  # noqa: B027
        """Called once a sequence when its prompt has been read, and after each verification."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when a sequence has finished."""


def delegate_to(part: str, name: str) -> Any:
    """An attribute of a drafter that one of its parts has: what it reads of the target, or what it costs."""
    return property(lambda drafter: getattr(getattr(drafter, part), name))


class Plan(Protocol):
    """Plans the rounds of one run: each asks for a node limit, prunes its trees, and reports what happened."""

    def node_limit(self, sequences: SequenceOf[Sequence], kv_lens: SequenceOf[int]) -> NodeLimit:
        """Returns how large this round's trees may be.

        Args:
            kv_lens: KV rows that a verification reads of each sequence.
        """
        ...

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Keeps the nodes of each tree that are worth verifying."""
        ...

    def observe(
        self,
        round_results: SequenceOf[RoundResult],
        num_draft_forwards: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Learns from a round.

        Args:
            events: one for each sequence.
            num_draft_forwards: forwards of the draft.
            drafting, verifying: seconds.
        """
        ...


class Planner(Protocol):
    """Makes a plan for each run."""

    def start(self, drafter: Drafter) -> Plan:
        """Begins a run of this drafter."""
        ...
