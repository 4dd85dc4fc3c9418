"""A level of a one-layer draft in one call of our kernels: block, head, and the likeliest tokens.

A draft may be wrong at will, so its weights are held in eight bits: a quarter of the bytes to read, and products of
whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.draft_block import DraftBlock
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import quantize_for_draft
from longdraft.native import Kernels, kernels
from longdraft.native.draft import DraftBlock as KernelBlock
from longdraft.native.draft import DraftLevelInput
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.native.structures import LinearWeights
from longdraft.views.draft_cache import DraftCache

# Keys and values (slots, kv_heads, capacity, d) of the target's last layer, and how many of each sequence's are seen.
TargetKV = tuple[torch.Tensor, torch.Tensor, Sequence[int]]
# Rows (T, ...) of all sequences: embeddings, what EAGLE's drafts join with them, cos and sin.
BlockInputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def draft_kernels(runner: TargetRunner, head_dim: int) -> Kernels | None:
    """The kernels, if they can compute drafts for this target; None: torch does."""
    plain = runner.tp_rank is None and runner.device.type == "cpu" and runner.kv_shape.dtype == torch.float32
    return kernels() if plain and runner.attention_path == "cpu" and head_dim % HEAD_DIM_MULTIPLE == 0 else None


class FusedLevel:
    """Computes a level of a plain block in one kernel call.

    Args:
        found: the kernels.
        head: (draft vocabulary, hidden).
    """

    def __init__(self, kernels: Kernels, block: DraftBlock, head: torch.Tensor | QuantizedMatrix) -> None:
        layer, shape = block.first_layer, block.shape
        norms = {
            "norm": layer.input_layernorm,
            "feature_norm": getattr(layer, "hidden_norm", None),
            "cross_norm": getattr(layer, "post_self_attention_layernorm", None),
            "mlp_norm": layer.mlp_norm,
            "final_norm": block.norm,
        }
        weights = {name: norm.weight for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}
        products = {name: getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
        products |= {name: getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        if layer.cross_attn is not None:
            products |= {"cross_q": layer.cross_attn.q_proj, "cross_o": layer.cross_attn.o_proj}
        rounded: dict[str, LinearWeights] = {
            name: (quantize_for_draft(x.weight), x.bias) for name, x in products.items()
        }
        rounded["head"] = quantize_for_draft(head), None
        sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
        self._kernels, self.block = kernels, KernelBlock(weights, rounded, *sizes, shape.norm_before_residual)

    def __call__(
        self, batch: DraftBatch, inputs: BlockInputs, cache: DraftCache, target_kv: TargetKV | None, top_k: int
    ) -> tuple[torch.Tensor, ...]:
        """The rows that go on: outputs (rows, hidden) before the last norm; logits (rows, draft vocabulary) where
        ``top_k`` is 0, else log-probabilities and draft ids (rows, k) of the ``top_k`` likeliest tokens. Keys and values
        enter the cache.
        """
        begins, ends = zip(*batch.places, strict=True)
        lengths = None if target_kv is None else target_kv[2]
        counts = (batch.width,) * len(batch.slots)
        nodes = DraftLevelInput(batch.going, counts, batch.slots, *inputs, begins, ends, batch.mask, lengths)
        caches = cache.store.layer(0), None if target_kv is None else target_kv[:2]
        out, logits, *found = self._kernels.draft_level(self.block, nodes, *caches, top_k)
        return (out, *found) if top_k else (out, logits)
