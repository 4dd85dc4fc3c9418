"""Interfaces of drafters and planners. :mod:`longdraft.planning` implements the planner."""

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
    """Proposes token trees for all active sequences at once, so that a draft model can batch.

    Its four methods are ``bind``, ``propose``, ``observe`` and ``release``. The other members declare what it reads of
    the target, and its costs. A drafter affects the speed of decoding, never the output.
    """

    max_nodes: int
    """Most drafted nodes of a tree. The KV cache reserves as much scratch space."""

    free: bool = False
    """True if it can propose without a forward of a draft model."""

    forwards: int = 0
    """Number of draft forwards so far; 0 if drafting costs next to nothing."""

    prior_acceptance: float = 0.0
    """Acceptance probability of a token before any was observed; for drafters with :meth:`kv_tokens_read`."""

    forward_cost_ratio: float = 1.0
    """Time of a draft forward through the target's layers / of a target forward. Below 1 with quantized weights."""

    num_prompt_queries: int = 1
    """Number of the prompt's last tokens whose queries it needs, if any. The first result has them."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views of its sparse KV caches, after :meth:`bind`; empty without."""
        return ()

    def use_planner(self) -> None:  # noqa: B027
        """Called first if a planner sizes the trees. Each :meth:`propose` then gets a limit."""

    def use_chains(self) -> bool:
        """Called first if branching is expensive for the target. Trees become chains, unless the user set their shape.

        Returns:
            True if every tree is a chain from now on.
        """
        return False

    def kv_tokens_read(self, context_len: int) -> float | None:
        """KV entries that a draft forward reads, in units of target entries; None if the draft is another model."""
        return None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Target layers whose output hidden states it reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Target layers whose queries it needs in the results."""
        return ()

    def needs_queries(self, sequences: list[Sequence]) -> bool:
        """True if it needs queries in the next results of any of these sequences."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Called once a run, before anything else, with the target and its KV store.

        Raises:
            CheckpointError: the draft was made for another target, or its weights cannot be read.
            UnsupportedModelError: the drafter does not support this target.
            MemoryBudgetError: the drafter's own memory does not fit the free memory.
        """

    @abstractmethod
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        """Returns a tree for each sequence, rooted at its last emitted token.

        Not every round calls this. The sequences have all tokens emitted since the last call.

        Args:
            limit: bounds of the trees; None: the drafter's own sizes.
        """

    def observe(self, round_result: RoundResult) -> None:  # noqa: B027
        """Called for each sequence after its prefill, and after each verification."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when a sequence has finished."""


def delegate_to(part: str, name: str) -> Any:
    """Makes a property that returns attribute ``name`` of the inner drafter ``part``."""
    return property(lambda drafter: getattr(getattr(drafter, part), name))


class Plan(Protocol):
    """Plans the rounds of one run. A round asks for a node limit, has its trees pruned, and reports its results."""

    def node_limit(self, sequences: SequenceOf[Sequence], kv_lens: SequenceOf[int]) -> NodeLimit:
        """Returns the bounds of this round's trees.

        Args:
            kv_lens: KV entries that a verification reads, for each sequence.
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
            round_results: one for each sequence.
            num_draft_forwards: draft forwards of this round.
            draft_seconds, verify_seconds: time of drafting, and of the rest.
        """
        ...


class Planner(Protocol):
    """Makes a plan for each run."""

    def start(self, drafter: Drafter) -> Plan:
        """Begins a run with this drafter."""
        ...
