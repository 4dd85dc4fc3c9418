"""One tree level of a one-layer draft in one call of our CPU kernels: block, head and top k.

The target verifies a draft, so rounding errors of the draft cannot change the output. The draft's weights are therefore
quantised to int8: a forward reads a quarter of float32's bytes, and computes integer products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.draft_block import DraftBlock
from longdraft.model.quant.stored import quantize_for_draft
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import HeadWeight
from longdraft.native import Kernels, kernels
from longdraft.native.draft import DraftBlock as KernelBlock
from longdraft.native.draft import DraftLevelInput
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.structures import LinearWeights
from longdraft.views.draft_cache import DraftCache

# Keys and values (slots, KV heads, capacity, head size) of the target's last layer, and each sequence's KV length.
TargetKV = tuple[torch.Tensor, torch.Tensor, Sequence[int]]
# Block inputs of the tokens of all sequences: embeddings, features (EAGLE) or None, cos and sin.
BlockInputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def draft_kernels(runner: TargetRunner, head_dim: int) -> Kernels | None:
    """Returns our CPU kernels; None if they cannot run drafts for this target, or heads of this size."""
    is_supported = runner.tp_rank is None and runner.device.type == "cpu" and runner.kv_shape.dtype == torch.float32
    uses_kernels = is_supported and runner.allows_fusion and runner.attention_path == "cpu"
    return kernels() if uses_kernels and head_dim % HEAD_DIM_MULTIPLE == 0 else None


class FusedLevel:
    """Computes a tree level in one kernel call. ``head``: weight (draft vocabulary, hidden) of the draft's head."""

    def __init__(self, kernels: Kernels, block: DraftBlock, head: HeadWeight) -> None:
        layer, shape = block.first_layer, block.shape
        norms = {
            "norm": layer.input_layernorm,
            "feature_norm": getattr(layer, "hidden_norm", None),
            "cross_norm": getattr(layer, "post_self_attention_layernorm", None),
            "mlp_norm": layer.mlp_norm,
            "final_norm": block.norm,
        }
        norm_weights = {name: norm.weight for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}
        linears = {name: getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
        linears |= {name: getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        if layer.cross_attn is not None:
            linears |= {"cross_q": layer.cross_attn.q_proj, "cross_o": layer.cross_attn.o_proj}
        quantized: dict[str, LinearWeights] = {
            name: (quantize_for_draft(linear.weight), linear.bias) for name, linear in linears.items()
        }
        quantized["head"] = quantize_for_draft(head), None
        sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
        self._kernels, self.block = kernels, KernelBlock(norm_weights, quantized, *sizes, shape.norm_before_residual)

    def __call__(
        self, batch: DraftBatch, inputs: BlockInputs, cache: DraftCache, target_kv: TargetKV | None, top_k: int
    ) -> tuple[torch.Tensor, ...]:
        """Runs the draft on a batch, and writes the batch's keys and values to the cache. For the B * T output tokens
        returns the hidden states before the final norm, then logits (B * T, draft vocabulary) if ``top_k`` is 0, else
        log-probabilities and draft ids (B * T, top_k)."""
        starts, ends = zip(*batch.kv_ranges, strict=True)
        target_lens = None if target_kv is None else target_kv[2]
        query_lens, mask = (batch.query_len,) * len(batch.slots), batch.mask
        level = DraftLevelInput(batch.num_outputs, query_lens, batch.slots, *inputs, starts, ends, mask, target_lens)
        draft_kv, target_layer_kv = cache.store.layer(0), None if target_kv is None else target_kv[:2]
        out, logits, *topk = self._kernels.draft_level(self.block, level, draft_kv, target_layer_kv, top_k)
        return (out, *topk) if top_k else (out, logits)
