"""Plain decoding, one token a forward: the baseline that every method is compared with."""

from __future__ import annotations

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree, root_tree


class NoDrafter(Drafter):
    """Drafts nothing: each tree is the root alone, which counts as a chain."""

    max_nodes = 0

    def use_chains(self) -> bool:
        return True

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        return [root_tree(s.output[-1]) for s in sequences]
