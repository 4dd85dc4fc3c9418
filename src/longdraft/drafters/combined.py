"""Two drafters whose proposals are merged into one tree.

A suffix lookup proposes repetitions, and a draft model proposes new text, so one is often right where the other fails.
A node that both propose is verified once. A planner keeps the nodes that are worth verifying, whoever proposed them.
"""

from __future__ import annotations

from dataclasses import replace

from longdraft.engine.drafter import Drafter, delegate_to
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree, merge_trees, root_tree


class CombinedDrafter(Drafter):
    """Merges a drafter that costs next to nothing with one that costs forwards.

    Args:
        lookup: drafter that proposes for every sequence, and must not read the target's hidden states or queries.
        draft_model: drafter that costs forwards. It proposes for every sequence; or, if there is a planner, for the
            sequences that the planner selects after it has seen the lookup's trees.
    """

    free = True

    def __init__(self, lookup: Drafter, draft_model: Drafter) -> None:
        self.lookup, self.draft_model = lookup, draft_model
        # {sequence index: this round's trees of the lookup and of the draft model}
        self._proposed_trees: dict[int, tuple[TokenTree, TokenTree]] = {}
        self._drafts_chains = False

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.lookup.max_nodes + self.draft_model.max_nodes

    forwards, self_draft_cost, needs, needs_queries = (
        delegate_to("draft_model", name) for name in ("forwards", "self_draft_cost", "needs", "needs_queries")
    )

    def use_planner(self) -> None:
        self.lookup.use_planner()
        self.draft_model.use_planner()

    def use_chains(self) -> bool:
        """Makes :meth:`propose` return only the better of the two drafters' chains."""
        self._drafts_chains = all([self.lookup.use_chains(), self.draft_model.use_chains()])  # calls both
        return self._drafts_chains

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
            draft_tree = draft_trees.get(s.index, root_tree(lookup_tree.tokens[0]))  # the root if not selected
            lookup_tree = self.adapt_lookup(s, lookup_tree, draft_tree)
            self._proposed_trees[s.index] = (lookup_tree, draft_tree)
            merged = merge_trees(lookup_tree, draft_tree)
            trees.append(merged.best_path() if self._drafts_chains else merged)
        return trees

    def adapt_lookup(self, s: Sequence, lookup_tree: TokenTree, draft_tree: TokenTree) -> TokenTree:
        """Returns the lookup's tree to merge. A subclass may change this tree by the draft model's tree."""
        return lookup_tree

    def observe(self, round_result: RoundResult) -> None:
        """Passes the result on to both drafters. Each drafter gets the tree that it proposed."""
        s = round_result.sequence
        two_roots = (root_tree(round_result.tree.tokens[0]),) * 2  # both drafters' trees if nothing was verified
        trees = self._proposed_trees.pop(s.index, two_roots)
        if not round_result.tree.num_draft_tokens:  # the planner pruned all nodes
            trees = two_roots
        num_accepted = round_result.num_accepted  # without the last emitted token, which the target chose itself
        accepted = s.output[len(s.output) - num_accepted - 1 :][:num_accepted]
        for drafter, tree in zip((self.lookup, self.draft_model), trees, strict=True):
            drafter.observe(replace(round_result, tree=tree, num_accepted=tree.match_length(accepted)))

    def release(self, sequence: Sequence) -> None:
        self._proposed_trees.pop(sequence.index, None)
        self.lookup.release(sequence)
        self.draft_model.release(sequence)
