"""A small Llama and its drafts, padded with zeros to a larger shape: the same tokens, at the larger one's cost.

Every padded weight is read and multiplied, so a round takes what it takes at that shape, while the text, what is
drafted and what is accepted are the small model's. Norms are rescaled for the longer row, longer heads keep the rotary
frequencies of the short ones, and layers that are added in the middle write zeros. Products of zeros take less power
than others, so where a GPU is bound by power, figures are too good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import OFFSETS, DraftFolder


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        c = model.config
        sizes = (c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
        return cls(*sizes, c.head_dim)


class Widening:
    """Pads weights of one shape to a larger one.

    Raises:
        ValueError: the larger shape has too few of something.
    """

    def __init__(self, small: Shape, large: Shape) -> None:
        self.small, self.large = small, large
        a, b = small, large
        enough = b.hidden >= a.hidden and b.inner >= a.inner and b.layers >= a.layers and b.kv_heads >= a.kv_heads
        if not enough or b.heads // b.kv_heads < a.heads // a.kv_heads or b.head_dim % a.head_dim:
            raise ValueError(f"{a} does not fit into {b}")

    def layer(self, index: int) -> int:
        """The place of a layer of the small model."""
        return index if index < self.small.layers // 2 else index + self.large.layers - self.small.layers

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight, by its name in a Llama or in a draft; what has none of these sizes stays as it is."""
        kind = name.split(".")[-2] if "." in name else ""
        if "norm" in kind:
            return self._rows(
                weight * sqrt(self.small.hidden / self.large.hidden), self.small.hidden, self.large.hidden
            )
        if kind == "o_proj":
            heads = self._heads(weight.T, queries=True, rotary=False).T
            return self._rows(heads, *self._hidden)
        if kind == "down_proj":
            return self._rows(self._columns(weight, self.small.inner, self.large.inner), *self._hidden)
        if weight.dim() == 2:
            weight = self._columns(weight, *self._hidden)
        if kind in ("q_proj", "k_proj", "v_proj"):
            queries = kind == "q_proj"
            scale = sqrt(self.large.head_dim / self.small.head_dim) if queries else 1.0
            return self._heads(weight * scale, queries, rotary=kind != "v_proj")
        if kind in ("gate_proj", "up_proj"):
            return self._rows(weight, self.small.inner, self.large.inner)
        return self._rows(weight, *self._hidden) if kind == "fc" else weight

    @property
    def _hidden(self) -> tuple[int, int]:
        return self.small.hidden, self.large.hidden

    @staticmethod
    def _rows(weight: torch.Tensor, old: int, new: int) -> torch.Tensor:
        return pad(weight, (0,) * (2 * weight.dim() - 1) + (new - old,))

    @staticmethod
    def _columns(weight: torch.Tensor, old: int, new: int) -> torch.Tensor:
        """Pads each of the vectors that the columns hold side by side."""
        return pad(weight.unflatten(1, (-1, old)), (0, new - old)).flatten(1)

    def _heads(self, rows: torch.Tensor, queries: bool, rotary: bool) -> torch.Tensor:
        """Rows of query or KV heads at the places of the larger model's."""
        a, b = self.small, self.large
        count, total = (a.heads, b.heads) if queries else (a.kv_heads, b.kv_heads)
        group, wide = (a.heads // a.kv_heads, b.heads // b.kv_heads) if queries else (1, 1)
        each = torch.arange(a.head_dim)
        if rotary:  # pair i of a short head turns like pair i * times of a long one
            half, times = a.head_dim // 2, b.head_dim // a.head_dim
            each = each % half * times + each // half * (b.head_dim // 2)
        out = rows.new_zeros(total, b.head_dim, *rows.shape[1:])
        for head, own in enumerate(rows.unflatten(0, (count, a.head_dim))):
            out[head // group * wide + head % group, each] = own
        return out.flatten(0, 1)


def widened_model(
    small: PreTrainedModel, large: Shape, context: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The model at a larger shape, made on the device.

    Args:
        context: positions that its configuration allows; beyond the small model's, its text means little.
    """
    widening, config = Widening(Shape.of(small), large), small.config.to_dict()
    config |= {
        "hidden_size": large.hidden, "intermediate_size": large.inner, "num_hidden_layers": large.layers,
        "num_attention_heads": large.heads, "num_key_value_heads": large.kv_heads, "head_dim": large.head_dim,
        "rms_norm_eps": small.config.rms_norm_eps * small.config.hidden_size / large.hidden,
        "max_position_embeddings": context,
    }  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=dtype).eval().requires_grad_(False)
    own = small.state_dict()
    origin = {widening.layer(i): i for i in range(small.config.num_hidden_layers)}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            parts = name.split(".")
            idle = False
            if parts[1] == "layers":
                idle = int(parts[2]) not in origin
                parts[2] = str(origin.get(int(parts[2]), 0))
            source = own[".".join(parts)].to(device, torch.float32)
            weight.copy_(widening(name, source))
            if idle and parts[-2] in ("o_proj", "down_proj"):
                weight.zero_()
    return model


def widened_draft(draft: TrainedDraft[Any], layers: int, large: Shape, target: Mapping[str, Any]) -> DraftFolder:
    """A draft of a one-layer kind (LongSpec, EAGLE-3) at a larger shape, as a folder's contents.

    Args:
        layers: of the target that it was made for.
        target: the description of the widened target.
    """
    config = dict(draft.config)
    small = Shape(
        config["hidden_size"], config["intermediate_size"], layers, config["heads"], config["kv_heads"],
        config["head_dim"],
    )  # fmt: skip
    widening = Widening(small, large)
    tensors = {name: widening(name, weight.float()).bfloat16() for name, weight in draft.weights.items()}
    if draft.ids is not None:
        tensors[OFFSETS] = draft.ids - torch.arange(len(draft.ids))
    if read := config.get("feature_layers"):
        config |= {"feature_layers": [widening.layer(i) for i in read], "feature_size": len(read) * large.hidden}
    config |= {
        "hidden_size": large.hidden, "intermediate_size": large.inner, "heads": large.heads, "kv_heads": large.kv_heads,
        "head_dim": large.head_dim, "rms_norm_eps": config["rms_norm_eps"] * small.hidden / large.hidden,
    }  # fmt: skip
    return DraftFolder(draft.kind, config, tensors, dict(target))
