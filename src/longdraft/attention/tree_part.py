"""The tree's part of hybrid attention and its merge with the prefix's as one operator, ``longdraft::with_tree``.

In torch's own operators it takes fourteen launches a layer. :func:`with_tree` is the definition, which serves on a CPU;
on a GPU :mod:`.tree_kernel` computes the same, where it works.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from longdraft.attention import fusing
from longdraft.errors import reason_of

if TYPE_CHECKING:
    from longdraft.attention.hybrid import Places

log = logging.getLogger("longdraft")

# Called with q, keys, values, the prefix's o and lse, places and scale.
WithTree = Callable[..., torch.Tensor]
# Largest difference, relative to the largest output, between the kernel and torch's operators.
_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}


def with_tree(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tree: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention to a prefix, which is known, and to the tree behind it.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d); numbers of a row lie side by side.
        o, lse: (B, Hq, T, d) and (B, Hq, T) float32 of the prefix; 0 and -inf for an empty one.
        tree: (B*W,) int32, the tree's rows in the list of rows that begins with the cache.
        hidden: (B, 1, 1, T, W) float32, -inf where row i may not see row j of the tree, else 0.

    Returns:
        (B, Hq, T, d) in q's dtype, in memory (B, T, Hq, d).
    """
    (batch, heads, size, d), kv_heads, width = q.shape, keys.shape[1], hidden.shape[-1]
    rows = int(tree.max()) + 1
    k, v = (
        x.as_strided((rows, kv_heads, d), (x.stride(2), x.stride(1), 1))[tree.long()].float() for x in (keys, values)
    )
    k, v = (x.view(batch, width, kv_heads, d).permute(0, 2, 1, 3) for x in (k, v))
    rows_of = (batch, kv_heads, heads // kv_heads * size)
    scores = (q.float().reshape(*rows_of, d) @ k.transpose(2, 3)).view(
        batch, kv_heads, -1, size, width
    ) * scale + hidden
    scores = torch.cat([scores.reshape(*rows_of, width), lse.reshape(*rows_of, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    out = weights[..., :width] @ v + weights[..., width:] * o.float().reshape(*rows_of, d)
    return out.to(q.dtype).view(q.shape).transpose(1, 2).contiguous().transpose(1, 2)


def _launch(*arguments: Any) -> torch.Tensor:
    out: torch.Tensor = importlib.import_module("longdraft.attention.tree_kernel").with_tree(*arguments)
    return out


_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")
_LIBRARY.define(
    "with_tree(Tensor q, Tensor keys, Tensor values, Tensor o, Tensor lse, Tensor tree, Tensor hidden, float scale) "
    "-> Tensor"
)
_LIBRARY.impl("with_tree", with_tree, "CPU")
_LIBRARY.impl("with_tree", _launch, "CUDA")


def chosen(q: torch.Tensor, keys: torch.Tensor, plain: WithTree) -> WithTree:
    """The operator in 16 bits on a GPU where it works, else ``plain``, which computes the same by torch's operators."""
    # float32 is for checks, and its exact products take minutes to compile.
    if q.device.type != "cuda" or q.element_size() != 2 or not fusing.available():
        return plain
    group = q.shape[1] // keys.shape[1]
    return _operator if _works(q.device, q.dtype, q.shape[3], group, plain) else plain


def _operator(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    places: Places,
    scale: float,
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.longdraft.with_tree(q, keys, values, o, lse, places.tree, places.hidden, scale)
    return out


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, d: int, group: int, plain: WithTree) -> bool:
    """True if the operator gives what ``plain`` gives, on made-up rows. Waits for the device, the first time."""
    from longdraft.attention.hybrid import Places

    batch, kv_heads, size = 2, 2, 5
    try:
        keys, values = torch.randn(2, batch, kv_heads, 24, d, dtype=dtype, device=device)
        q, o = torch.randn(2, batch, kv_heads * group, size, d, dtype=dtype, device=device)
        lse = torch.randn(batch, kv_heads * group, size, device=device)
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        mask = torch.ones(batch, size, size, dtype=torch.bool, device=device).tril()
        places = Places.of(keys, slots, slots + 9, 10, mask, filled=True)
        found, expected = (f(q, keys, values, o, lse, places, d**-0.5).float() for f in (_operator, plain))
        if bool((found - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max()):
            return True
        reason = "its results differ"
    except Exception as error:  # a compiler or a driver can raise any type
        reason = reason_of(error)
    log.warning("Attention to trees runs on torch's operators, not on one kernel: %s.", reason)
    return False
