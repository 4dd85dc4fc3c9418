"""Attention of drafts with several layers: every row goes through all of them, and each layer keeps its own keys.

The layers' heads lie side by side in one window's cache, so that rows are counted once.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from longdraft.attention.sdpa import one_text
from longdraft.drafters.shared.layers import SelfAttend
from longdraft.drafters.shared.levels import Fed
from longdraft.views.window import Window


def layered(fed: Fed, cache: Window, layers: int, window: int) -> list[SelfAttend]:
    """The attention of each layer over fed rows. Unlike :meth:`Fed.attend`, all rows get an output.

    Args:
        cache: of keys (slots, layers * KV heads, rows, d); it holds ``window`` rows before any rows fed together.
        window: keys that a row sees, its own included.
    """
    heads = cache.keys.shape[1] // layers
    if fed.ancestors is None:
        firsts = [
            cache.make_room(slot, start, count - fed.behind)
            for slot, start, count in zip(fed.slots, fed.starts, fed.counts, strict=True)
        ]
        seen = [_text(first, count, fed.behind, window) for first, count in zip(firsts, fed.counts, strict=True)]
    else:
        seen = [_nodes(cache, slot, fed.depth, fed.ancestors[i], window) for i, slot in enumerate(fed.slots)]

    def layer(index: int) -> SelfAttend:
        own = slice(index * heads, (index + 1) * heads)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            parts = (t.split(fed.counts, 1) for t in (q, k, v))
            for slot, (begin, kept, mask), q_, k_, v_ in zip(fed.slots, seen, *parts, strict=True):
                memory, new = (cache.keys[slot, own], cache.values[slot, own]), q_.shape[1] - fed.behind
                for rows, x in zip(memory, (k_, v_), strict=True):
                    rows[:, kept - new : kept] = x[:, :new]
                keys, values = (
                    torch.cat([rows[:, begin:kept], x[:, new:]], 1) for rows, x in zip(memory, (k_, v_), strict=True)
                )
                outputs.append(one_text(q_, keys, values, mask.to(q.device)))
            return torch.cat(outputs, 1)

        return attend

    return [layer(i) for i in range(layers)]


# The rows [begin, kept) of the cache that a sequence's fed rows see, the last of them their own, and which of these and
# of the rows behind them each fed row sees (rows fed, rows seen).
_Seen = tuple[int, int, torch.Tensor]


def _text(first: int, count: int, behind: int, window: int) -> _Seen:
    """New tokens from row ``first`` on, and the rows behind them."""
    begin = max(0, first + 1 - window)
    at = torch.arange(first, first + count, device="cpu")[:, None]
    keys = torch.arange(begin, first + count, device="cpu")
    # Rows behind the text see each other however small the window is.
    near = (at - keys < window) | (keys >= first + count - behind)
    return begin, first + count - behind, (keys <= at) & near


def _nodes(cache: Window, slot: int, depth: int, ancestors: torch.Tensor, window: int) -> _Seen:
    """Nodes of a depth, whose rows follow those of the levels before."""
    count = ancestors.shape[1]
    begin, end = cache.seen(slot, depth, count)
    begin = max(begin, end - count - (window - depth))
    return begin, end, F.pad(ancestors, (end - begin - count, 0), value=True)
