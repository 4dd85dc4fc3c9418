"""Plain decoding, one token a forward: the baseline of every method."""

from __future__ import annotations

from longdraft.engine.drafter import Drafter
from longdraft.engine.method import Method, register
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree


class NoDrafter(Drafter):
    """Drafts nothing: each tree is the root alone."""

    max_nodes = 0

    def use_chains(self) -> bool:
        return True

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        return [TokenTree((s.output[-1],), (-1,)) for s in sequences]


register(Method("ar", NoDrafter, "plain decoding, one token a forward"))
