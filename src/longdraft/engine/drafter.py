"""Interfaces of drafters and planners. :mod:`longdraft.planning` implements the planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf  # ``Sequence`` is the engine's class
from typing import Any, Protocol

from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.view import View


class Drafter(ABC):
    """Proposes token trees for all active sequences at once, so that a draft model can batch.

    A drafter works in ``bind``, ``propose``, ``observe`` and ``release``. The other members say what drafting costs,
    and what the drafter reads of the target. A drafter affects the speed of decoding, never the output.
    """

    max_nodes: int
    """Maximum number of drafted nodes in a tree. The KV cache reserves scratch entries for the nodes."""

    free: bool = False
    """True if the drafter can propose without a forward of a draft model, so drafting is never skipped to save time."""

    forwards: int = 0
    """Number of draft forwards so far; stays 0 if drafting costs almost no time."""

    prior_acceptance: float = 0.0
    """The acceptance probability that a planner assumes before the first draft, if :meth:`kv_tokens_read` is known."""

    forward_cost_ratio: float = 1.0
    """Seconds of a draft forward / seconds of a target forward; below 1 if the draft's weights are quantized."""

    num_prompt_queries: int = 1
    """The result of the prefill contains the queries of this many tokens at the end of the prompt."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views of the drafter's sparse KV caches, known after :meth:`bind`; empty without a sparse KV cache."""
        return ()

    def use_planner(self) -> None:  # noqa: B027
        """Called before :meth:`bind` if a planner sizes the trees. Each :meth:`propose` then gets a limit."""

    def use_chains(self) -> bool:
        """Called before :meth:`bind` if the target verifies branches slowly. The drafter then proposes chains, unless
        the user chose another tree shape. Returns True if all trees are chains from now on."""
        return False

    def kv_tokens_read(self, context_len: int) -> float | None:
        """Returns the number of target KV entries that a draft forward reads in a context of ``context_len`` tokens;
        None if the draft is a second model, which reads its own KV."""
        return None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Returns the target layers whose output hidden states the drafter reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Returns the target layers whose queries the drafter needs in each :class:`RoundResult`."""
        return ()

    def needs_queries(self, sequences: list[Sequence]) -> bool:
        """Returns True if the drafter needs queries in the next result of any of ``sequences``."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Gives the drafter the target and the target's KV store. Called before drafting begins, and again when the
        store is replaced by a larger one.

        Raises:
            CheckpointError: the draft was made for another target, or its weights cannot be read.
            UnsupportedModelError: the drafter does not support this target.
            MemoryBudgetError: the drafter's KV cache does not fit the free memory.
        """

    @abstractmethod
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        """Returns a tree for each sequence. The root is the sequence's last emitted token.

        A round may skip this call, so several tokens may have been emitted since the last call. ``limit`` bounds the
        trees; with None, trees have the drafter's default sizes.
        """

    def observe(self, round_result: RoundResult) -> None:  # noqa: B027
        """Reads the result of a sequence's round. Called after the prefill and after each verification."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Drops the state of a sequence that has finished."""


def delegate_to(inner_drafter: str, attribute: str) -> Any:
    """Makes a property that reads ``self.<inner_drafter>.<attribute>``, for a drafter that contains another drafter."""
    return property(lambda drafter: getattr(getattr(drafter, inner_drafter), attribute))


class Plan(Protocol):
    """Plans the rounds of one run of an engine: limits drafting, prunes the trees, and learns from the results."""

    def node_limit(self, sequences: SequenceOf[Sequence], kv_lens: SequenceOf[int]) -> NodeLimit:
        """Returns the bounds of this round's trees. ``kv_lens``: number of KV entries read to verify each sequence."""

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Returns the trees without the nodes that are not worth verifying."""

    def observe(
        self,
        round_results: SequenceOf[RoundResult],
        num_draft_forwards: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Learns from a round: the result of each sequence, the number of draft forwards, the wall time of drafting,
        and the wall time of the rest of the round."""


class Planner(Protocol):
    """Makes a plan for each run of an engine."""

    def start(self, drafter: Drafter) -> Plan:
        """Returns a plan for a run that drafts with ``drafter``."""
