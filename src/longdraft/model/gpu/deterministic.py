"""``deterministic=True``: plain steps and verifications on a GPU in one bucket of rows, so that they agree to the bit.

A product's kernel is chosen by its number of rows, and adds up in that kernel's order. So every forward of decoding,
with a draft or without, has :data:`ROWS` rows: sequences x rows of each. Attention adds up in the order of a row's rank
(:mod:`longdraft.attention.fixed_order`). What is left is whether a product's kernel treats all rows alike, wherever
they are and whatever is beside them: :func:`check_linears` asks that of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.attention import fixed_order
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps, TargetOutput
from longdraft.model.quantised import random_rows
from longdraft.native import kernels

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

# Rows of every forward of decoding: a product of 64 rows takes a GPU about as long as one of a single row.
ROWS = 64


def fixed_batch_rows_for(runner: TargetRunner) -> int | None:
    """The bucket for a target; None on a CPU, where rows have their bits anyway.

    Raises:
        CapabilityError: plain steps and verifications cannot be made equal to the bit here.
    """
    device, layout = runner.device, runner.execution_model.layout
    reason: str | None = None
    if device.type == "cpu":
        if kernels() is not None and runner.attention_path == "cpu" and runner.kv_shape.dtype == torch.float32:
            return None
        reason = "on a CPU it needs float32 and longdraft's kernels (`longdraft doctor` says why there are none)"
    elif device.type != "cuda":
        reason = f"it is for NVIDIA GPUs and CPUs, the model is on {device}"
    elif layout.windows or layout.recurrent or layout.custom_cache_layers:
        reason = "it is for models whose layers all see the whole text"
    elif runner.tp_rank is not None or runner.offload is not None:
        reason = "it is for models in one process whose KV is not offloaded"
    elif runner.kv_is_rounded:
        reason = "its attention reads keys and values in the model's dtype"
    else:
        reason = fixed_order.why_unavailable(runner.kv_shape.dtype, runner.kv_shape.head_dim)
    if reason is not None:
        raise CapabilityError(f"deterministic=True cannot be kept here: {reason}. Leave it out.")
    config = runner.model.config.get_text_config()
    group = config.num_attention_heads // runner.kv_shape.kv_heads
    fixed_order.check_batch_invariance(device, runner.kv_shape.dtype, runner.kv_shape.head_dim, group)
    check_linears(runner.execution_model.model, ROWS)
    return ROWS


@torch.no_grad()
def check_linears(model: nn.Module, batch_rows: int) -> None:
    """Tries a linear layer of each kind and size with rows that are all the same, and beside others.

    Raises:
        CapabilityError: a row's bits depend on its place, or on the rows beside it.
    """
    tried: set[tuple[object, ...]] = set()
    for name, module in model.named_modules():
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if not all(isinstance(query_len, int) for query_len in sizes) or any(True for _ in module.children()):
            continue
        weight = getattr(module, "weight", None)
        kind = type(module), type(weight), getattr(weight, "dtype", None), *sizes
        if kind in tried:
            continue
        tried.add(kind)
        row = random_rows(model, module, 1)
        same = module.forward(row.expand(1, batch_rows, -1).contiguous())[0]
        larger = torch.cat([row, 100 * row.expand(batch_rows - 1, -1)])
        beside = module.forward(larger[None])[0, 0]
        if not bool(((same == same[:1]).all() & (beside == same[0]).all()).item()):
            raise CapabilityError(
                f"deterministic=True cannot be kept here: the product of {name} gives a row other bits at another "
                "place of the block. Leave it out."
            )


def forward_fixed_batches(runner: TargetRunner, block: ForwardBatch, store: KVStore, taps: Taps) -> TargetOutput:
    """The forwards of a runner's bucket of rows, one or several, that compute a block."""
    found = TargetOutput(None)
    assert runner.fixed_batch_rows is not None
    for sequences, part, padded in split_into_fixed_batches(block, runner.fixed_batch_rows):
        out = runner.forward(padded, store, taps=taps, check_nan=False, fixed_order=True)
        found.scatter_from(out, block, sequences, part)
    return found


def split_into_fixed_batches(block: ForwardBatch, batch_rows: int) -> Iterator[tuple[range, range, ForwardBatch]]:
    """Blocks of ``batch_rows`` rows in all, sequences x rows, that compute a block one after another.

    Sequences come in powers of two, as many as fit. A tree with more rows is computed in parts, parents first.

    Yields:
        The sequences and rows of the block, and their block, padded behind with rows that see themselves alone.
    """
    first = 0
    while first < block.batch_size:
        fit = max(1, batch_rows // block.query_len)
        count = 1 << (min(fit, block.batch_size - first).bit_length() - 1)
        sequences = range(first, first + count)
        each = batch_rows // count
        for start in range(0, block.query_len, each):
            part = range(start, min(start + each, block.query_len))
            yield sequences, part, _padded(block, sequences, part, each)
        first += count


def _padded(block: ForwardBatch, sequences: range, part: range, query_len: int) -> ForwardBatch:
    """Some rows of some sequences, padded to ``query_len`` rows."""
    of, more = slice(sequences.start, sequences.stop), query_len - len(part)
    rows, tree_offset = slice(part.start, part.stop), block.tree_offset + part.start
    device = block.slots_t.device
    assert block.token_ids is not None and block.positions is not None
    mask = block.tree_mask(0, device).expand(block.batch_size, -1, -1) if block.mask is None else block.mask
    mask = F.pad(mask[of, rows, : tree_offset + len(part)], (0, more, 0, more))
    if more:
        mask = mask | F.pad(
            torch.eye(more, dtype=torch.bool, device=device), (tree_offset + len(part), 0, len(part), 0)
        )
    return replace(
        block,
        slots=block.slots[of],
        prefix_lens=block.prefix_lens[of],
        root_positions=block.root_positions[of],
        query_len=query_len,
        tree_offset=tree_offset,
        mask=mask,
        slots_t=block.slots_t[of],
        prefix_lens_t=block.prefix_lens_t[of],
        token_ids=F.pad(block.token_ids[of, rows], (0, more)),
        positions=F.pad(block.positions[of, rows], (0, more)),
    )
