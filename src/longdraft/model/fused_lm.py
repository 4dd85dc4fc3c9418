"""FusedLM: a draft model's forward in one kernel call: all layers, the head, and the top k tokens.

This avoids the Python code of a hosted forward, which takes as long as the kernels' layers.
"""

from __future__ import annotations

from typing import Literal

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.store import KVStore
from longdraft.model.layer_parts import NO_ROTATION, CosSin
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module
from longdraft.model.skinny_gemm import MAX_SKINNY_ROWS
from longdraft.native import DecoderStack, kernels
from longdraft.native.boundary import CPU_FLOAT32

# Positions whose cos and sin are computed in advance.
_POSITIONS_AHEAD = 4096


class FusedLM:
    """Forwards of a hosted model over a few tokens, by the kernels' layers in ``stack``.

    Attributes:
        is_quantized: True if drafts read smaller weights than verifications do.
    """

    def __init__(self, runner: TargetRunner, stack: DecoderStack) -> None:
        cpu_kernels, kinds = kernels(), runner.execution_model.fused.layer_kinds
        assert cpu_kernels is not None and kinds is not None
        self._kernels, self._stack, self._kinds = cpu_kernels, stack, kinds
        self.is_quantized = stack is not runner.execution_model.fused.stack
        self._embedding = runner.model.get_input_embeddings()
        # Rotary embedding -> cos and sin (2, positions, d).
        self._cos_sin: dict[str, torch.Tensor] = {}

    @classmethod
    def from_runner(cls, runner: TargetRunner) -> FusedLM | None:
        """None if our kernels do not compute the whole model, or if its RoPE depends on the text's length."""
        rope_types = getattr(rotary_module(runner.model), "rope_type", None)
        if {"dynamic", "longrope"} & set(rope_types.values() if isinstance(rope_types, dict) else [rope_types]):
            return None
        stack = runner.execution_model.fused.draft_stack
        return None if stack is None else cls(runner, stack)

    @staticmethod
    def supports(store: KVStore, num_tokens: int) -> bool:
        """True if it can run this number of tokens on this store."""
        return store.is_resident and num_tokens <= MAX_SKINNY_ROWS

    def topk(
        self, batch: ForwardBatch, store: KVStore, k: int, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward over a batch: chains of one length, or one level of trees.

        Returns log-probabilities and draft ids (B, T, k), sorted; (B, 1, k) of the last tokens with ``last_only``.
        """
        assert batch.token_ids is not None and batch.positions is not None
        cos_sin = [self._rotation(kind.rope, batch.positions) for kind in self._kinds.kinds]
        kv_group, *others = self._kinds.kernel_inputs(store, batch, cos_sin)
        x = self._embedding(batch.token_ids).float()
        logits: Literal["all", "last"] = "last" if last_only else "all"
        out = self._kernels.run_stack(self._stack, *kv_group, x, logits=logits, topk=k, more_kv_groups=others)
        assert out.topk_logprobs is not None and out.topk_indices is not None
        return out.topk_logprobs, out.topk_indices

    def _rotation(self, rope: str | None, positions: torch.Tensor) -> CosSin:
        """cos and sin (B, T, d) of one kind of layer."""
        if rope is None:
            return NO_ROTATION
        cached, last = self._cos_sin.get(rope), int(positions.max())
        if cached is None or last >= cached.shape[1]:
            all_positions = torch.arange(last + _POSITIONS_AHEAD, device="cpu")[None]
            cached = torch.cat(self._kinds.rotate(rope, torch.empty(0, **CPU_FLOAT32), all_positions))
            self._cos_sin[rope] = cached
        cos, sin = cached[:, positions]
        return cos, sin
