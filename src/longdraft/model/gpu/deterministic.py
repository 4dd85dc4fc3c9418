"""``deterministic=True``: plain steps and verifications on a GPU in one bucket of rows, so that they agree to the bit.

A product's kernel is chosen by its number of rows, and adds up in that kernel's order. So every forward of decoding,
with a draft or without, has :data:`ROWS` rows: sequences x rows of each. Attention adds up in the order of a row's rank
(:mod:`longdraft.attention.fixed_order`). What is left is whether a product's kernel treats all rows alike, wherever
they are and whatever is beside them: :func:`check_products` asks that of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.attention import fixed_order
from longdraft.attention.block import Block
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps, TargetOutput
from longdraft.model.quantised import made_up
from longdraft.native import kernels

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

# Rows of every forward of decoding: a product of 64 rows takes a GPU about as long as one of a single row.
ROWS = 64


def rows_for(runner: TargetRunner) -> int | None:
    """The bucket for a target; None on a CPU, where rows have their bits anyway.

    Raises:
        CapabilityError: plain steps and verifications cannot be made equal to the bit here.
    """
    device, layout = runner.device, runner.twin.layout
    reason: str | None = None
    if device.type == "cpu":
        if kernels() is not None and runner.attention_path == "cpu" and runner.kv_shape.dtype == torch.float32:
            return None
        reason = "on a CPU it needs float32 and longdraft's kernels (`longdraft doctor` says why there are none)"
    elif device.type != "cuda":
        reason = f"it is for NVIDIA GPUs and CPUs, the model is on {device}"
    elif layout.windows or layout.recurrent or layout.own:
        reason = "it is for models whose layers all see the whole text"
    elif runner.share is not None or runner.offload is not None:
        reason = "it is for models in one process whose KV is not offloaded"
    elif runner.kv_is_rounded:
        reason = "its attention reads keys and values in the model's dtype"
    else:
        reason = fixed_order.unavailable(runner.kv_shape.dtype, runner.kv_shape.head_dim)
    if reason is not None:
        raise CapabilityError(f"deterministic=True cannot be kept here: {reason}. Leave it out.")
    config = runner.model.config.get_text_config()
    group = config.num_attention_heads // runner.kv_shape.kv_heads
    fixed_order.check(device, runner.kv_shape.dtype, runner.kv_shape.head_dim, group)
    check_products(runner.twin.model, ROWS)
    return ROWS


@torch.no_grad()
def check_products(model: nn.Module, rows: int) -> None:
    """Tries a linear layer of each kind and size with rows that are all the same, and beside others.

    Raises:
        CapabilityError: a row's bits depend on its place, or on the rows beside it.
    """
    tried: set[tuple[object, ...]] = set()
    for name, module in model.named_modules():
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if not all(isinstance(size, int) for size in sizes) or any(True for _ in module.children()):
            continue
        weight = getattr(module, "weight", None)
        kind = type(module), type(weight), getattr(weight, "dtype", None), *sizes
        if kind in tried:
            continue
        tried.add(kind)
        row = made_up(model, module, 1)
        same = module.forward(row.expand(1, rows, -1).contiguous())[0]
        larger = torch.cat([row, 100 * row.expand(rows - 1, -1)])
        beside = module.forward(larger[None])[0, 0]
        if not bool(((same == same[:1]).all() & (beside == same[0]).all()).item()):
            raise CapabilityError(
                f"deterministic=True cannot be kept here: the product of {name} gives a row other bits at another "
                "place of the block. Leave it out."
            )


def verify(runner: TargetRunner, block: Block, store: KVStore, taps: Taps) -> TargetOutput:
    """The forwards of a runner's bucket of rows, one or several, that compute a block."""
    found = TargetOutput(None)
    assert runner.rows is not None
    for sequences, part, padded in pieces(block, runner.rows):
        out = runner.forward(padded, store, taps=taps, check=False, fixed=True)
        found.put(out, block, sequences, part)
    return found


def pieces(block: Block, rows: int) -> Iterator[tuple[range, range, Block]]:
    """Blocks of ``rows`` rows in all, sequences x rows, that compute a block one after another.

    Sequences come in powers of two, as many as fit. A tree with more rows is computed in parts, parents first.

    Yields:
        The sequences and rows of the block, and their block, padded behind with rows that see themselves alone.
    """
    first = 0
    while first < block.batch:
        fit = max(1, rows // block.size)
        count = 1 << (min(fit, block.batch - first).bit_length() - 1)
        sequences = range(first, first + count)
        each = rows // count
        for start in range(0, block.size, each):
            part = range(start, min(start + each, block.size))
            yield sequences, part, _padded(block, sequences, part, each)
        first += count


def _padded(block: Block, sequences: range, part: range, size: int) -> Block:
    """Some rows of some sequences, padded to ``size`` rows."""
    of, more = slice(sequences.start, sequences.stop), size - len(part)
    rows, offset = slice(part.start, part.stop), block.offset + part.start
    device = block.slots_t.device
    assert block.tokens is not None and block.positions is not None
    mask = block.block_mask(0, device).expand(block.batch, -1, -1) if block.mask is None else block.mask
    mask = F.pad(mask[of, rows, : offset + len(part)], (0, more, 0, more))
    if more:
        mask = mask | F.pad(torch.eye(more, dtype=torch.bool, device=device), (offset + len(part), 0, len(part), 0))
    return replace(
        block,
        slots=block.slots[of],
        lengths=block.lengths[of],
        bases=block.bases[of],
        size=size,
        offset=offset,
        mask=mask,
        slots_t=block.slots_t[of],
        lengths_t=block.lengths_t[of],
        tokens=F.pad(block.tokens[of, rows], (0, more)),
        positions=F.pad(block.positions[of, rows], (0, more)),
    )
