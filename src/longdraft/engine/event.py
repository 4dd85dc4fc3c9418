"""What a round made of a sequence: told to its drafter, and to whoever counts, prints, plans or learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree

# On what logits were computed: a prompt's forward; the whole cache; a part of it; the whole cache, putting right what
# was computed on a part (SpecPV, section 3).
Mode = Literal["prefill", "full", "partial", "refresh"]


@dataclass(frozen=True)
class Event:
    """One forward of the target, as one sequence went through it. The emitted tokens are in the sequence already.

    Attributes:
        sequence: as its drafter sees it.
        tree: what was drafted, on the last token before; a root alone where nothing was.
        accepted: how many drafted tokens were right.
        path: the accepted nodes of ``tree``, the root first.
        target_tokens: tokens that were accepted behind the tree's root, final or not, the last of them not drafted.
        emitted: tokens that are final now; from_draft: how many of them, from the first on, were drafted.
        mode: what the logits were computed on. "prefill": the prompt has been read and the first token emitted; the
            first event of a sequence, and the only one of this kind.
        queries: of the layers that the drafter wants -> (query heads, n, head size), after RoPE: of the prompt's last
            tokens, as many as its query window says and fewer where a kept cache left fewer to read; later of the
            deepest accepted node alone. The rows up to the last query's own can be read in the store.
        replaced: first position whose row in the store is another, exact one now; None: none were.
        taken_back: tokens of earlier rounds that turned out wrong. The sequence ends earlier, or goes on otherwise,
            than was said before; its last token has no KV yet, and what the store holds of the others is right.
        unconfirmed: tokens that were accepted on a part of the cache.
    """

    sequence: Sequence
    tree: TokenTree
    accepted: int = 0
    path: tuple[int, ...] = (0,)
    emitted: tuple[int, ...] = ()
    from_draft: int = 0
    mode: Mode = "full"
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    replaced: int | None = None
    taken_back: int = 0
    unconfirmed: int = 0
    target_tokens: tuple[int, ...] = ()

    @property
    def begins(self) -> bool:
        """Whether the sequence is a new one to its drafter."""
        return self.mode == "prefill"
