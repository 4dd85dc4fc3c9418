"""Several drafters at once: their proposals in one tree.

A suffix lookup knows what the text repeats, a trained draft what the model would say; each is right where the other is
not. What both propose is verified once, and a planner keeps the nodes that are worth their rows, whoever proposed them.
"""

from __future__ import annotations

from dataclasses import replace

from longdraft.engine.drafter import Drafter, of_part
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree, merged


class UnitedDrafter(Drafter):
    """A drafter that costs next to nothing, and one that costs forwards.

    Args:
        unpaid: proposes in every round.
        paid: proposes for every sequence, or with a limit for those that the planner chooses given the other's
            proposals.

    Both see every token; hidden states and queries are those that the paid one reads.
    """

    free = True

    def __init__(self, unpaid: Drafter, paid: Drafter) -> None:
        self.unpaid, self.paid = unpaid, paid
        # For each sequence, what either proposed in this round.
        self._proposed: dict[int, tuple[TokenTree, TokenTree]] = {}
        self._chains = False

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.unpaid.max_nodes + self.paid.max_nodes

    forwards, prior_acceptance, forward_ratio = (
        of_part("paid", name) for name in ("forwards", "prior_acceptance", "forward_ratio")
    )
    views, query_window = of_part("paid", "views"), of_part("paid", "query_window")
    rows_read, feature_layers = of_part("paid", "rows_read"), of_part("paid", "feature_layers")
    query_layers, reads_queries = of_part("paid", "query_layers"), of_part("paid", "reads_queries")

    def use_planner(self) -> None:
        self.unpaid.use_planner()
        self.paid.use_planner()

    def avoid_forks(self) -> bool:
        """Proposes the likelier of two chains."""
        unpaid, paid = self.unpaid.avoid_forks(), self.paid.avoid_forks()
        self._chains = unpaid and paid
        return self._chains

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.unpaid.bind(runner, store)
        self.paid.bind(runner, store)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        free = self.unpaid.propose(sequences, limit)
        chosen = sequences if limit is None else limit.choose(sequences, free)
        paid = dict(zip((s.index for s in chosen), self.paid.propose(chosen, limit) if chosen else [], strict=True))
        trees = []
        for s, tree in zip(sequences, free, strict=True):
            other = paid.get(s.index) or TokenTree(tree.tokens[:1], (-1,))
            tree = self.beside(s, tree, other)
            self._proposed[s.index] = (tree, other)
            both = merged(tree, other)
            trees.append(both.likeliest_path() if self._chains else both)
        return trees

    def beside(self, s: Sequence, tree: TokenTree, paid: TokenTree) -> TokenTree:
        """The free tree that joins a paid one: as it was proposed, if a drafter does not know better."""
        return tree

    def observe(self, event: Event) -> None:
        """Passes the event on to both, each with its own tree."""
        s = event.sequence
        roots = (TokenTree(event.tree.tokens[:1], (-1,)),) * 2
        proposed = self._proposed.pop(s.index, roots)
        if not event.tree.drafted:
            proposed = roots
        came = s.output[len(s.output) - event.accepted - 1 :][: event.accepted]
        for drafter, own in zip((self.unpaid, self.paid), proposed, strict=True):
            drafter.observe(replace(event, tree=own, accepted=own.follows(came)))

    def release(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence.index, None)
        self.unpaid.release(sequence)
        self.paid.release(sequence)
