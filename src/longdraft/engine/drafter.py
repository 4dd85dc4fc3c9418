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

    A drafter works in ``bind``, ``propose``, ``observe`` and ``release``. The other members declare its costs, and what
    the drafter reads of the target. A drafter affects the speed of decoding, never the output.
    """

    max_nodes: int
    """Most drafted nodes of a tree. The KV cache reserves scratch entries for them."""

    free: bool = False
    """True if the drafter can propose without a forward of a draft model, so drafting is never skipped to save time."""

    forwards: int = 0
    """Number of draft forwards so far; 0 if drafting costs next to nothing."""

    prior_acceptance: float = 0.0
    """Acceptance probability that a planner assumes before any round; used with :meth:`kv_tokens_read`."""

    forward_cost_ratio: float = 1.0
    """Time of a draft forward divided by that of a target forward; below 1 if the draft's weights are quantized."""

    num_prompt_queries: int = 1
    """Number of the prompt's last tokens whose queries are in the first :class:`RoundResult`."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views of the drafter's sparse KV caches, known after :meth:`bind`; empty if it has none."""
        return ()

    def use_planner(self) -> None:  # noqa: B027
        """Called before :meth:`bind` if a planner sizes the trees. Each :meth:`propose` then gets a limit."""

    def use_chains(self) -> bool:
        """Called before :meth:`bind` if the target verifies branches slowly: trees without a set shape become chains.
        Returns True if all trees are chains from now on."""
        return False

    def kv_tokens_read(self, context_len: int) -> float | None:
        """KV that a draft forward reads, as a number of entries of the target; None if the draft is a second model."""
        return None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Target layers whose output hidden states the drafter reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Target layers whose queries the drafter needs in the results."""
        return ()

    def needs_queries(self, sequences: list[Sequence]) -> bool:
        """True if the drafter needs queries in the next results of any of these sequences."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Called before anything is drafted, and again when the KV store is replaced by a larger one.

        Raises:
            CheckpointError: the draft was made for another target, or its weights cannot be read.
            UnsupportedModelError: the drafter does not support this target.
            MemoryBudgetError: the drafter's KV cache does not fit the free memory.
        """

    @abstractmethod
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        """Returns a tree for each sequence, rooted at its last emitted token.

        A round may skip this call, so several tokens may have been emitted since the last one.

        Args:
            limit: bounds of the trees; None: the drafter's default sizes.
        """

    def observe(self, round_result: RoundResult) -> None:  # noqa: B027
        """Called for each sequence after its prefill, and after each verification."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when a sequence has finished."""


def delegate_to(part: str, name: str) -> Any:
    """Makes a property that returns attribute ``name`` of the drafter in attribute ``part``."""
    return property(lambda drafter: getattr(getattr(drafter, part), name))


class Plan(Protocol):
    """Plans the rounds of one run: limits drafting, prunes the trees, and learns from the results."""

    def node_limit(self, sequences: SequenceOf[Sequence], kv_lens: SequenceOf[int]) -> NodeLimit:
        """Returns the bounds of this round's trees.

        Args:
            kv_lens: for each sequence, the KV entries that its verification reads.
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
            round_results: the result of each sequence.
            num_draft_forwards: forwards of the draft model in this round.
            draft_seconds: time of drafting.
            verify_seconds: time of the rest of the round.
        """
        ...


class Planner(Protocol):
    """Makes a plan for each run."""

    def start(self, drafter: Drafter) -> Plan:
        """Begins a run with this drafter."""
        ...
