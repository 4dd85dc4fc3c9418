"""FusedLM: runs a draft language model in one kernel call for all layers, the head and the top k tokens.

A hosted forward of a small model would take as much time in Python as in the kernels.
Shapes: B sequences of T tokens; RoPE rotates d dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.store import KVStore
from longdraft.model.layers.fused import stack_bytes
from longdraft.model.layers.skinny_gemm import MAX_SKINNY_ROWS
from longdraft.model.rope import NO_ROTATION, CosSin, depends_on_length, rotary_module
from longdraft.model.runner import TargetRunner
from longdraft.native import DecoderStack, kernels
from longdraft.native.boundary import CPU_FLOAT32

# Time of a forward in float32 arithmetic with weights quantised for drafting, as a fraction of the target's time.
QUANTIZED_FORWARD_RATIO = 0.8
_TABLE_MARGIN = 4096  # a new table has this many positions beyond those needed, so that it seldom grows


class FusedLM:
    """Runs the hosted model of a runner over a few tokens, by the kernels. ``stack``: the model's layers and head.

    Attributes:
        forward_ratio: seconds of a forward / seconds of the model's own, as assumed before they are measured. It is
            below 1 if ``stack`` is a quantised copy of the weights with which the model itself decodes."""

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        cpu_kernels, layer_kinds = kernels(), runner.execution_model.fused.layer_kinds
        assert cpu_kernels is not None and layer_kinds is not None
        self._kernels, self._stack, self._kinds = cpu_kernels, stack, layer_kinds
        own_stack = runner.execution_model.fused.stack
        self.forward_ratio = 1.0
        if own_stack is not None and stack is not own_stack:
            # In int8 arithmetic a forward takes the time to read the weights.
            ratio = stack_bytes(stack) / stack_bytes(own_stack)
            self.forward_ratio = ratio if runner.arithmetic == "int8" else QUANTIZED_FORWARD_RATIO
        self._embedding = runner.model.get_input_embeddings()
        # LayerKind.rope (a name, as models can have several RoPEs) -> cos and sin (2, positions, d).
        self._cos_sin_tables: dict[str, torch.Tensor] = {}

    @classmethod
    def from_runner(cls, runner: TargetRunner, weights: str | None = None) -> FusedLM | None:
        """Makes a FusedLM, or returns None if our kernels cannot run the model or its RoPE depends on the length.
        ``weights``: as for :meth:`longdraft.model.layers.fused.FusedLayers.draft_stack`."""
        if not runner.allows_fusion or depends_on_length(rotary_module(runner.model)):
            return None
        stack = runner.execution_model.fused.draft_stack(weights)
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def supports(store: KVStore, num_tokens: int) -> bool:
        """True if :meth:`topk` can run ``num_tokens`` tokens, all sequences together, on this store."""
        return store.is_resident and num_tokens <= MAX_SKINNY_ROWS

    def topk(
        self, batch: ForwardBatch, store: KVStore, k: int, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a batch: chains of equal length, or one level of the sequences' trees.
        Returns log-probabilities and draft token ids of the top k, the most likely first, both (B, T, k). ``last_only``
        makes them (B, 1, k), for each sequence's last token."""
        assert batch.token_ids is not None and batch.positions is not None
        cos_sin = [self._cos_sin_at(kind.rope, batch.positions) for kind in self._kinds.kinds]
        kv_group, *more_kv_groups = self._kinds.kernel_inputs(store, batch, cos_sin)
        x = self._embedding(batch.token_ids).float()
        logits: Literal["all", "last"] = "last" if last_only else "all"
        out = self._kernels.run_stack(self._stack, *kv_group, x, logits=logits, topk=k, more_kv_groups=more_kv_groups)
        assert out.topk_logprobs is not None and out.topk_indices is not None
        return out.topk_logprobs, out.topk_indices

    def _cos_sin_at(self, rope: str | None, positions: torch.Tensor) -> CosSin:
        """Returns cos and sin (B, T, d) at ``positions``, from a table that grows as needed."""
        if rope is None:
            return NO_ROTATION
        table, max_position = self._cos_sin_tables.get(rope), int(positions.max())
        if table is None or max_position >= table.shape[1]:
            table_positions = torch.arange(max_position + _TABLE_MARGIN, device="cpu")[None]
            table = torch.cat(self._kinds.cos_sin(rope, torch.empty(0, **CPU_FLOAT32), table_positions))
            self._cos_sin_tables[rope] = table
        cos, sin = table[:, positions]
        return cos, sin
