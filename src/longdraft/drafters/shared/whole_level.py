"""A level of a one-layer draft in one call of our kernels: block, head, and the likeliest tokens.

A draft may be wrong at will, so its weights are held in eight bits: a quarter of the bytes to read, and products of
whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from longdraft.drafters.shared.levels import Fed, Inputs
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import light
from longdraft.native import Kernels, kernels
from longdraft.native.draft import DraftBlock, Nodes
from longdraft.native.library import HEAD_UNIT
from longdraft.native.stored import Stored
from longdraft.native.structures import Weights
from longdraft.views.window import Window

# Keys and values (slots, kv_heads, capacity, d) of the target's last layer, and how many of each sequence's are seen.
Text = tuple[torch.Tensor, torch.Tensor, Sequence[int]]


def serves(runner: TargetRunner, head_dim: int) -> Kernels | None:
    """The kernels, if they can compute drafts for this target; None: torch does."""
    plain = runner.share is None and runner.device.type == "cpu" and runner.kv_shape.dtype == torch.float32
    return kernels() if plain and runner.attention_path == "cpu" and head_dim % HEAD_UNIT == 0 else None


def products_of(layers: Mapping[str, nn.Linear], **others: torch.Tensor | Stored) -> dict[str, Weights]:
    """A :class:`~longdraft.native.draft.DraftBlock`'s products, rounded: those of linear layers, and others."""
    found: dict[str, Weights] = {name: (light(x.weight), x.bias) for name, x in layers.items()}
    return found | {name: (light(w), None) for name, w in others.items()}


class WholeLevel:
    """Computes a level of a draft in one kernel call.

    Args:
        found: the kernels.
        block: of products that :func:`products_of` made.
    """

    def __init__(self, found: Kernels, block: DraftBlock) -> None:
        self._kernels, self._block = found, block

    def __call__(
        self, fed: Fed, rows: Inputs, window: Window, text: Text | None, best: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that go on: outputs (rows, hidden) before the last norm; logits (rows, draft vocabulary) where
        ``best`` is 0; else log-probabilities and draft ids (rows, k) of the ``best`` likeliest tokens. Keys and values
        enter the window.
        """
        begins, ends = zip(*fed.places(window), strict=True)
        lengths = None if text is None else text[2]
        nodes = Nodes(fed.width, fed.counts, fed.slots, *rows, begins, ends, fed.mask, lengths)
        caches = (window.keys, window.values), None if text is None else text[:2]
        return self._kernels.draft(self._block, nodes, *caches, best)
