"""A level of a one-layer draft in one call of our kernels: block, head, and the likeliest tokens.

A draft may be wrong at will, so its weights are held in eight bits: a quarter of the bytes to read, and products of
whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.drafters.shared.block import DraftBlock
from longdraft.drafters.shared.rows import Rows
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import light
from longdraft.native import Kernels, kernels
from longdraft.native.draft import DraftBlock as KernelBlock
from longdraft.native.draft import Nodes
from longdraft.native.library import HEAD_UNIT
from longdraft.native.stored import Stored
from longdraft.native.structures import Weights
from longdraft.views.draft_cache import DraftCache

# Keys and values (slots, kv_heads, capacity, d) of the target's last layer, and how many of each sequence's are seen.
Text = tuple[torch.Tensor, torch.Tensor, Sequence[int]]
# Rows (T, ...) of all sequences: embeddings, what EAGLE's drafts join with them, cos and sin.
Flat = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def serves(runner: TargetRunner, head_dim: int) -> Kernels | None:
    """The kernels, if they can compute drafts for this target; None: torch does."""
    plain = runner.share is None and runner.device.type == "cpu" and runner.kv_shape.dtype == torch.float32
    return kernels() if plain and runner.attention_path == "cpu" and head_dim % HEAD_UNIT == 0 else None


class WholeLevel:
    """Computes a level of a plain block in one kernel call.

    Args:
        found: the kernels.
        head: (draft vocabulary, hidden).
    """

    def __init__(self, found: Kernels, block: DraftBlock, head: torch.Tensor | Stored) -> None:
        layer, shape = block.first, block.shape
        norms = {
            "norm": layer.input_layernorm,
            "joined_norm": getattr(layer, "hidden_norm", None),
            "cross_norm": getattr(layer, "post_self_attention_layernorm", None),
            "mlp_norm": layer.mlp_norm,
            "final_norm": block.norm,
        }
        weights = {name: norm.weight for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}
        products = {name: getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
        products |= {name: getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        if layer.cross_attn is not None:
            products |= {"cross_q": layer.cross_attn.q_proj, "cross_o": layer.cross_attn.o_proj}
        rounded: dict[str, Weights] = {name: (light(x.weight), x.bias) for name, x in products.items()}
        rounded["head"] = light(head), None
        sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
        self._kernels, self.block = found, KernelBlock(weights, rounded, *sizes, shape.norm_before_residual)

    def __call__(
        self, rows: Rows, inputs: Flat, cache: DraftCache, text: Text | None, best: int
    ) -> tuple[torch.Tensor, ...]:
        """The rows that go on: outputs (rows, hidden) before the last norm; logits (rows, draft vocabulary) where
        ``best`` is 0, else log-probabilities and draft ids (rows, k) of the ``best`` likeliest tokens. Keys and values
        enter the cache.
        """
        begins, ends = zip(*rows.places, strict=True)
        lengths = None if text is None else text[2]
        counts = (rows.width,) * len(rows.slots)
        nodes = Nodes(rows.going, counts, rows.slots, *inputs, begins, ends, rows.mask, lengths)
        caches = cache.store.layer(0), None if text is None else text[:2]
        out, logits, *found = self._kernels.draft(self.block, nodes, *caches, best)
        return (out, *found) if best else (out, logits)
