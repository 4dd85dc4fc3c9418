"""Two drafters whose proposals are merged into one tree.

A suffix lookup proposes repetitions, and a draft model new text, so each is often right where the other is not. A node
that both propose is verified once. A planner keeps the nodes that are worth verifying, whoever proposed them.
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
    """Merges a drafter that costs next to nothing with one that costs forwards.

    Args:
        lookup: proposes for every sequence.
        draft_model: proposes for every sequence; with a planner, for the sequences that the planner selects, given the
            lookup's trees. Only this drafter may read the target's hidden states and queries.
    """

    free = True

    def __init__(self, lookup: Drafter, draft_model: Drafter) -> None:
        self.lookup, self.draft_model = lookup, draft_model
        # {sequence index: the trees of both drafters in this round}
        self._proposed: dict[int, tuple[TokenTree, TokenTree]] = {}
        self._chains = False

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.lookup.max_nodes + self.draft_model.max_nodes

    forwards, prior_acceptance = delegate_to("draft_model", "forwards"), delegate_to("draft_model", "prior_acceptance")
    forward_cost_ratio, views = delegate_to("draft_model", "forward_cost_ratio"), delegate_to("draft_model", "views")
    kv_tokens_read, feature_layers, query_layers, needs_queries, num_prompt_queries = (
        delegate_to("draft_model", name)
        for name in ("kv_tokens_read", "feature_layers", "query_layers", "needs_queries", "num_prompt_queries")
    )

    def use_planner(self) -> None:
        self.lookup.use_planner()
        self.draft_model.use_planner()

    def use_chains(self) -> bool:
        """Proposes only the better of the two drafters' chains."""
        self._chains = all([self.lookup.use_chains(), self.draft_model.use_chains()])
        return self._chains

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.lookup.bind(runner, store)
        self.draft_model.bind(runner, store)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        lookup_trees = self.lookup.propose(sequences, limit)
        selected = sequences if limit is None else limit.select_sequences(sequences, lookup_trees)
        drafted = self.draft_model.propose(selected, limit) if selected else []
        draft_trees = {s.index: tree for s, tree in zip(selected, drafted, strict=True)}
        trees = []
        for s, lookup_tree in zip(sequences, lookup_trees, strict=True):
            draft_tree = draft_trees.get(s.index) or TokenTree(lookup_tree.tokens[:1], (-1,))  # or the root alone
            lookup_tree = self.adapt_lookup(s, lookup_tree, draft_tree)
            self._proposed[s.index] = (lookup_tree, draft_tree)
            merged = merge_trees(lookup_tree, draft_tree)
            trees.append(merged.best_path() if self._chains else merged)
        return trees

    def adapt_lookup(self, s: Sequence, lookup_tree: TokenTree, draft_tree: TokenTree) -> TokenTree:
        """Returns the lookup's tree to merge. A subclass may let it depend on the draft model's tree."""
        return lookup_tree

    def observe(self, round_result: RoundResult) -> None:
        """Passes the result on to both drafters, each with its own tree."""
        s = round_result.sequence
        only_roots = (TokenTree(round_result.tree.tokens[:1], (-1,)),) * 2
        trees = self._proposed.pop(s.index, only_roots)
        if not round_result.tree.num_draft_tokens:  # the planner pruned all nodes, so nothing was verified
            trees = only_roots
        num_accepted = round_result.num_accepted
        accepted = s.output[len(s.output) - num_accepted - 1 :][:num_accepted]
        for drafter, tree in zip((self.lookup, self.draft_model), trees, strict=True):
            drafter.observe(replace(round_result, tree=tree, num_accepted=tree.match_length(accepted)))

    def release(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence.index, None)
        self.lookup.release(sequence)
        self.draft_model.release(sequence)
