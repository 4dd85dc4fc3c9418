"""A level of a language model's tree in one call of our kernels: all layers, the head, the likeliest tokens.

This avoids the Python code of a hosted forward, which takes as long as the layers take in the kernels.
"""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.store import KVStore
from longdraft.model.layer_parts import NO_ROTATION, CosSin
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module
from longdraft.model.skinny_gemm import MAX_SKINNY_ROWS
from longdraft.native import DecoderStack, kernels
from longdraft.native.boundary import CPU_FLOAT32

# Number of positions that are computed ahead.
AHEAD = 4096


class FusedLM:
    """Draft forwards of a hosted model over few rows, with the kernels' layers in ``stack``.

    Attributes:
        lighter: True if the stack has other weights than verifications use, in fewer bytes.
    """

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        own, kinds = kernels(), runner.execution_model.fused.layer_kinds
        assert own is not None and kinds is not None
        self._kernels, self._stack, self._kinds = own, stack, kinds
        self.is_quantized = stack is not runner.execution_model.fused.stack
        self._embedding = runner.model.get_input_embeddings()
        # cos and sin (2, positions, d) for each rotary embedding, as far as they were needed.
        self._cos_sin: dict[str, torch.Tensor] = {}

    @classmethod
    def of(cls, runner: TargetRunner) -> FusedLM | None:
        """The forwards of a model; None if our kernels do not compute all of it, or if its rotary frequencies depend
        on the text's length."""
        found = getattr(rotary_module(runner.model), "rope_type", None)
        if {"dynamic", "longrope"} & set(found.values() if isinstance(found, dict) else [found]):
            return None
        stack = runner.execution_model.fused.draft_stack
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def supports(store: KVStore, rows: int) -> bool:
        """True if it computes this number of rows on this store."""
        return store.is_resident and rows <= MAX_SKINNY_ROWS

    def topk(
        self, batch: ForwardBatch, store: KVStore, k: int, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a block of new rows: chains of one length, or a level of trees behind its earlier levels.

        Args:
            last: only the last row of each sequence is asked for.

        Returns:
            Log-probabilities and draft ids (B, T or 1, k) of the ``k`` likeliest tokens after each row.
        """
        assert batch.token_ids is not None and batch.positions is not None
        turns = [self._rotations(kind.rope, batch.positions) for kind in self._kinds.kinds]
        rows, *more = self._kinds.kernel_inputs(store, batch, turns)
        x = self._embedding(batch.token_ids).float()
        out = self._kernels.run_stack(
            self._stack, *rows, x, logits="last" if last_only else "all", topk=k, more_kv_groups=more
        )
        assert out.topk_logprobs is not None and out.topk_indices is not None
        return out.topk_logprobs, out.topk_indices

    def _rotations(self, rope: str | None, positions: torch.Tensor) -> CosSin:
        """cos and sin (B, T, d) of a kind of layer."""
        if rope is None:
            return NO_ROTATION
        known, last = self._cos_sin.get(rope), int(positions.max())
        if known is None or last >= known.shape[1]:
            places = torch.arange(last + AHEAD, device="cpu")[None]
            known = torch.cat(self._kinds.rotate(rope, torch.empty(0, **CPU_FLOAT32), places))
            self._cos_sin[rope] = known
        cos, sin = known[:, positions]
        return cos, sin
