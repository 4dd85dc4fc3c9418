"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree
from longdraft.views.view import View


class Drafter(ABC):
    """Proposes continuations. It is called for all active sequences together, so a neural one can batch.

    Four methods, ``bind``, ``propose``, ``observe`` and ``release``; what it wants of the target is declared.

    A drafter may be wrong at will: it decides how fast decoding is, never what comes out.
    """

    max_nodes: int
    """Largest number of drafted nodes of any tree; the cache keeps this much scratch space."""

    free: bool = False
    """Whether it can propose without a forward of a draft."""

    forwards: int = 0
    """Forwards of a draft so far; none where drafting costs next to nothing."""

    prior_acceptance: float = 0.0
    """Chance that a drafted token is right before any was seen; for drafters with :meth:`rows_read`."""

    forward_ratio: float = 1.0
    """Time of a forward of the target's own layers on the weights that it drafts with, of one on the target's."""

    query_window: int = 1
    """Of how many of a prompt's last tokens it wants the queries, where it wants any; the first event brings them."""

    @property
    def views(self) -> tuple[View, ...]:
        """What it sees of texts that are longer, once it is bound; none: all of them, or nothing."""
        return ()

    def use_planner(self) -> None:  # noqa: B027
        """Called first if a planner sizes the trees: each :meth:`propose` then brings a limit."""

    def rows_read(self, length: int) -> float | None:
        """Rows of a text's KV that a forward reads, as many bytes each as the target's; None: of another model."""
        return None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose output hidden states it reads from the store's ``features``."""
        return ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose queries it wants to see; events bring them."""
        return ()

    def bind(self, runner: TargetRunner, store: KVStore) -> None:  # noqa: B027
        """Told once a run, before anything else: the target, and where its KV lies (readable rows may be read)."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        """A tree for each sequence, rooted at its last emitted token.

        A round may pass without: what was emitted since the last call is in the sequences.

        Args:
            limit: how large the trees may be; None: the sizes that the drafter was made with.
        """

    def observe(self, event: Event) -> None:  # noqa: B027
        """Told once a sequence when its prompt has been read, and after each verification; see the event."""

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Told when a sequence has finished."""
