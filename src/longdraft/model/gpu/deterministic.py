"""Implements ``deterministic=True``: on a GPU, plain steps and verifications agree to the bit.

A GEMM library chooses the kernel, and with it the order of additions, by the number of rows. So every decoding forward,
with or without a draft, has :data:`FIXED_BATCH_ROWS` rows (batch_size * query_len). Attention adds up keys in a fixed
order (:mod:`longdraft.attention.fixed_order`). :func:`check_linears` tests the remaining condition: a row's bits
depend neither on the row's index nor on the other rows. The runner holds a :class:`FixedRows`, if the model and
the device are of a kind for which :func:`make_fixed_rows` makes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from longdraft.attention import fixed_order
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVShape
from longdraft.model.model_parts import decoder_config
from longdraft.model.probes.linears import check_linears
from longdraft.native import kernels

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

# Rows of every decoding forward. A GEMM with 64 rows takes a GPU about as long as one with a single row.
FIXED_BATCH_ROWS = 64


class FixedRows:
    """Splits batches into batches with a fixed number of rows.

    Attributes:
        batch_rows: the number of rows, batch_size * query_len.

    Raises CapabilityError if attention, or a linear layer of the model, gives a row bits that depend on other rows."""

    def __init__(self, model: PreTrainedModel, kv_shape: KVShape) -> None:
        query_group = decoder_config(model).num_attention_heads // kv_shape.kv_heads
        fixed_order.check_batch_invariance(model.device, kv_shape.dtype, kv_shape.head_dim, query_group)
        self.batch_rows = FIXED_BATCH_ROWS
        check_linears(model, self.batch_rows)

    def split(self, batch: ForwardBatch) -> Iterator[tuple[range, range, ForwardBatch]]:
        """Splits a batch into batches with :attr:`batch_rows` rows.

        Each batch size is the largest power of two that fits. A tree with more tokens than rows is split.

        Yields:
            Indices of sequences and tokens in ``batch``, and a batch of these, padded with tokens that see only
            themselves.
        """
        first = 0
        while first < batch.batch_size:
            max_sequences = max(1, self.batch_rows // batch.query_len)
            batch_size = 1 << (min(max_sequences, batch.batch_size - first).bit_length() - 1)
            sequences = range(first, first + batch_size)
            query_len = self.batch_rows // batch_size
            for start in range(0, batch.query_len, query_len):
                tokens = range(start, min(start + query_len, batch.query_len))
                yield sequences, tokens, _pad(batch, sequences, tokens, query_len)
            first += batch_size


def _pad(batch: ForwardBatch, sequences: range, tokens: range, query_len: int) -> ForwardBatch:
    """Returns a batch of some tokens of some sequences, padded to ``query_len`` tokens for each sequence."""
    b, t = slice(sequences.start, sequences.stop), slice(tokens.start, tokens.stop)
    padding, tree_offset = query_len - len(tokens), batch.tree_offset + tokens.start
    device, tree_len = batch.slots_t.device, tree_offset + len(tokens)
    assert batch.token_ids is not None and batch.positions is not None
    mask = batch.tree_mask(0, device).expand(batch.batch_size, -1, -1) if batch.mask is None else batch.mask
    mask = F.pad(mask[b, t, :tree_len], (0, padding, 0, padding))
    if padding:
        mask = mask | F.pad(torch.eye(padding, dtype=torch.bool, device=device), (tree_len, 0, len(tokens), 0))
    return replace(
        batch,
        slots=batch.slots[b],
        prefix_lens=batch.prefix_lens[b],
        root_positions=batch.root_positions[b],
        query_len=query_len,
        tree_offset=tree_offset,
        mask=mask,
        slots_t=batch.slots_t[b],
        prefix_lens_t=batch.prefix_lens_t[b],
        token_ids=F.pad(batch.token_ids[b, t], (0, padding)),
        positions=F.pad(batch.positions[b, t], (0, padding)),
    )


def make_fixed_rows(runner: TargetRunner) -> FixedRows | None:
    """Makes plain steps and verifications agree to the bit. Returns None on a CPU with our kernels, where they do.
    Raises CapabilityError if they cannot be made to agree here."""
    shape, layout = runner.kv_shape, runner.execution_model.layout
    reason: str | None
    if runner.device.type == "cpu":
        if kernels() is not None and runner.can_round_kv:
            return None
        reason = "on a CPU it needs float32 and longdraft's kernels (`longdraft doctor` says why they are missing)"
    elif runner.device.type != "cuda":
        reason = f"it is for NVIDIA GPUs and CPUs, the model is on {runner.device}"
    elif layout.windows or layout.recurrent:
        reason = "it is for models whose layers all see the whole text"
    elif runner.tp_rank is not None or runner.offload is not None:
        reason = "it is for models in one process whose KV is not offloaded"
    elif runner.kv_is_rounded:
        reason = "its attention reads keys and values in the model's dtype"
    else:
        reason = fixed_order.why_unavailable(shape.dtype, shape.head_dim)
    if reason is not None:
        raise CapabilityError(f"deterministic=True cannot be kept here: {reason}. Leave it out.")
    return FixedRows(runner.execution_model.model, shape)
