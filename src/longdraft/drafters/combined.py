"""Several drafters at once: their proposals in one tree.

A suffix lookup knows what the text repeats, a trained draft what the model would say; each is right where the other is
not. What both propose is verified once, and a planner keeps the nodes that are worth their rows, whoever proposed them.
"""

from __future__ import annotations

from dataclasses import replace

from longdraft.engine.drafter import Drafter, delegate_to
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree, merge_trees


class CombinedDrafter(Drafter):
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

    forwards, prior_acceptance, forward_cost_ratio = (
        delegate_to("paid", name) for name in ("forwards", "prior_acceptance", "forward_cost_ratio")
    )
    views, num_prompt_queries = delegate_to("paid", "views"), delegate_to("paid", "num_prompt_queries")
    kv_tokens_read, feature_layers = delegate_to("paid", "kv_tokens_read"), delegate_to("paid", "feature_layers")
    query_layers, needs_queries = delegate_to("paid", "query_layers"), delegate_to("paid", "needs_queries")

    def use_planner(self) -> None:
        self.unpaid.use_planner()
        self.paid.use_planner()

    def use_chains(self) -> bool:
        """Proposes the likelier of two chains."""
        unpaid, paid = self.unpaid.use_chains(), self.paid.use_chains()
        self._chains = unpaid and paid
        return self._chains

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.unpaid.bind(runner, store)
        self.paid.bind(runner, store)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        free = self.unpaid.propose(sequences, limit)
        chosen = sequences if limit is None else limit.select_sequences(sequences, free)
        paid = dict(zip((s.index for s in chosen), self.paid.propose(chosen, limit) if chosen else [], strict=True))
        trees = []
        for s, tree in zip(sequences, free, strict=True):
            other = paid.get(s.index) or TokenTree(tree.tokens[:1], (-1,))
            tree = self.adapt_lookup(s, tree, other)
            self._proposed[s.index] = (tree, other)
            both = merge_trees(tree, other)
            trees.append(both.best_path() if self._chains else both)
        return trees

    def adapt_lookup(self, s: Sequence, tree: TokenTree, paid: TokenTree) -> TokenTree:
        """The free tree that joins a paid one: as it was proposed, if a drafter does not know better."""
        return tree

    def observe(self, round_result: RoundResult) -> None:
        """Passes the event on to both, each with its own tree."""
        s = round_result.sequence
        roots = (TokenTree(round_result.tree.tokens[:1], (-1,)),) * 2
        proposed = self._proposed.pop(s.index, roots)
        if not round_result.tree.num_draft_tokens:
            proposed = roots
        came = s.output[len(s.output) - round_result.num_accepted - 1 :][: round_result.num_accepted]
        for drafter, own in zip((self.unpaid, self.paid), proposed, strict=True):
            drafter.observe(replace(round_result, tree=own, num_accepted=own.match_length(came)))

    def release(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence.index, None)
        self.unpaid.release(sequence)
        self.paid.release(sequence)
