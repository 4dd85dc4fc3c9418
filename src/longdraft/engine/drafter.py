"""The interface of drafters, and what they tell an engine and its planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import VerifyOutput
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.view import View


@dataclass(frozen=True)
class DraftNeeds:
    """The layers, queries and views of its target that a drafter reads.

    Attributes:
        feature_layers: layers whose output hidden states the drafter reads from the store's ``features``.
        query_layers: layers whose queries each :class:`RoundResult` contains.
        num_prompt_queries: number of tokens at the prompt's end whose queries the result of the prefill contains.
        views: the views of the drafter's sparse KV caches.
    """

    feature_layers: tuple[int, ...] = ()
    query_layers: tuple[int, ...] = ()
    num_prompt_queries: int = 1
    views: tuple[View, ...] = ()


# A self-draft whose forward takes a smaller part of the target's than this gains much, if it is mostly right.
CHEAP_FORWARD_RATIO = 0.75


@dataclass(frozen=True)
class SelfDraftCost:
    """Cost and acceptance of a draft that is the target on a part of its KV, as assumed before the first draft.

    Attributes:
        kv_tokens_read: (number of tokens of the context) -> number of KV entries that a draft forward reads.
        forward_ratio: seconds of a draft forward / seconds of a target forward; below 1 if the weights are quantized.
        prior_acceptance: (number of tokens of the context) -> acceptance probability of a draft token.
    """

    kv_tokens_read: Callable[[int], float]
    forward_ratio: float
    prior_acceptance: Callable[[int], float]


class Drafter(ABC):
    """Proposes token trees for all active sequences at once, so that a draft model can batch.

    A subclass defines ``propose`` and ``max_nodes``. It may read the target (``needs``), and keep a state (``bind``,
    ``observe``, ``release``). A drafter affects the speed of decoding, never the output.
    """

    max_nodes: int
    """Maximum number of drafted nodes in a tree. The KV cache reserves scratch entries for the nodes."""

    free: bool = False
    """True if the drafter can propose without a forward of a draft model, so drafting is never skipped to save time."""

    replays_rounds: bool = False
    """True if :meth:`replay_round` may serve a round; known after :meth:`bind`."""

    forwards: int = 0
    """Number of draft forwards so far; stays 0 if drafting costs almost no time."""

    @property
    def self_draft_cost(self) -> SelfDraftCost | None:
        """The cost of a draft forward, known after :meth:`bind`; None if the draft is not the target itself."""
        return None

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        """Returns what the drafter reads of the target. Called before :meth:`bind` and after it; views may change."""
        return DraftNeeds()

    def use_planner(self) -> None:  # noqa: B027
        """Called before :meth:`bind` if a planner sizes the trees. Each :meth:`propose` then gets a limit."""

    def use_chains(self) -> bool:
        """Called before :meth:`bind` if the target verifies branches slowly. The drafter then proposes chains, unless
        the user chose another tree shape. Returns True if all trees are chains from now on."""
        return False

    def needs_queries(self, sequences: list[Sequence], has_drafted: bool) -> bool:
        """Returns True if the drafter needs queries in the next result of any of ``sequences``. ``has_drafted``: False
        if a planner let this round go without a draft forward. Queries cost time, also where drafting was given up."""
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

    def replay_round(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[VerifyOutput] | None:
        """Drafts and verifies in one CUDA graph, for sequences and a limit as for :meth:`propose`. Returns None if no
        graph can do all of it: the caller then calls :meth:`propose`, and verifies."""
        return None

    def observe(self, round_result: RoundResult) -> None:  # noqa: B027
        """Reads the result of a sequence's round. Called after the prefill and after each verification."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Drops the state of a sequence that has finished."""


def delegate_to(inner_drafter: str, attribute: str) -> Any:
    """Makes a property that reads ``self.<inner_drafter>.<attribute>``, for a drafter that contains another drafter."""
    return property(lambda drafter: getattr(getattr(drafter, inner_drafter), attribute))
