"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from longdraft.kv.store import KVStore
from longdraft.sequence import Sequence
from longdraft.target.runner import TargetRunner
from longdraft.trees.budget import Budget
from longdraft.trees.tree import TokenTree

if TYPE_CHECKING:
    from longdraft.verify.sampling import Picker


class Drafter(ABC):
    """Proposes continuations. It is called for all active sequences together, so a neural one can batch.

    A drafter may be wrong at will: it decides how fast decoding is, never what comes out.
    """

    max_nodes: int
    """Largest number of drafted nodes of any tree; the cache keeps this much scratch space."""

    free: bool = False
    """Whether it can propose without a forward of a draft."""

    samples: bool = False
    """Whether it draws what it proposes where the target's tokens are drawn, for residual acceptance."""

    forwards: int = 0
    """Forwards of a draft so far; none where drafting costs next to nothing."""

    query_window: int = 1
    """Of how many of a prompt's last tokens it wants the queries, where it wants any; :meth:`looked` is told them."""

    def follow_budget(self) -> None:  # noqa: B027
        """Told before all else, if at all: a planner decides how large trees are; each propose brings a budget."""

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose output hidden states it reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose queries it wants to see; :meth:`attended` is told them."""
        return ()

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Told once a run, before anything else: the target, and where its KV lies (readable rows may be read)."""

    def picked_by(self, pickers: Mapping[int, Picker]) -> None:  # noqa: B027
        """Told once a run, after :meth:`bind`: how the target's tokens are picked, by the sequence's index.

        It may rehearse coming picks, but not pick.
        """

    def prefill(self, sequence: Sequence) -> None:  # noqa: B027
        """Told once a sequence, when its prompt has been read and its first token emitted."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], budget: Budget | None = None) -> list[TokenTree]:
        """A tree for each sequence, rooted at its last emitted token.

        A round may pass without: what was emitted since the last call is in the sequences.

        Args:
            budget: what the trees may be; None: as the drafter was made.
        """

    def looked(self, sequence: Sequence, queries: Mapping[int, torch.Tensor]) -> None:  # noqa: B027
        """Told what the prompt's last tokens looked for: after the prefill, before :meth:`attended` is told the last's.

        Args:
            queries: of the layers of :meth:`query_layers` -> (query heads, n, head size), after RoPE; n is
                :attr:`query_window` at most, and fewer where a kept cache left fewer tokens to read.
        """

    def attended(self, sequence: Sequence, queries: Mapping[int, torch.Tensor]) -> None:  # noqa: B027
        """Told what the target looked for: after the prefill, and after each verification before all else.

        Not called where :meth:`query_layers` names none. The rows up to the query's own can be read in the store.

        Args:
            queries: layer -> (query heads, head size), after RoPE, of the prompt's last token or of the deepest
                accepted node (SpecExtend, section 2.2).
        """

    def observe(self, sequence: Sequence, tree: TokenTree, accepted: int) -> None:  # noqa: B027
        """Told after each verification; the emitted tokens are already in the sequence.

        Args:
            accepted: how many drafted tokens were right.
        """

    def refreshed(self, sequence: Sequence, start: int) -> None:  # noqa: B027
        """Told when the store's rows from position ``start`` on, inexact until now, were replaced by exact ones."""

    def rewind(self, sequence: Sequence) -> None:  # noqa: B027
        """Told when tokens were taken back: the sequence ends earlier, or goes on otherwise, than it did before.

        Its last token has no KV yet; what the store holds of the others is right again.
        """

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Told when a sequence has finished."""


class NoDrafter(Drafter):
    """Drafts nothing: a tree of the root alone, which is autoregressive decoding."""

    max_nodes = 0

    def propose(self, sequences: list[Sequence], budget: Budget | None = None) -> list[TokenTree]:
        return [TokenTree((s.output[-1],), (-1,)) for s in sequences]
