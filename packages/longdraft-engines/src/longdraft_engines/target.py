"""The target as a draft sees it, if another engine computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longdraft.attention import dispatch, prefix
from longdraft.engine.drafter import Drafter
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.gpu.graphs import Graphs
from longdraft.model.rotary import Rotary
from longdraft.model.shared_parts import SharedParts
from longdraft_engines.requests import Tracked


class EngineTarget:
    """A target on one device.

    Args:
        described: its text configuration, as in transformers. model: the engine's loaded model.
        head_dim, kv_heads: sizes of its attention.
        weights: digest of the weights that the draft was trained for. They are not compared, as an engine joins and
            packs its weights.

    Attributes:
        last: index of its last layer. share: always None: the target is on one device. rooms: always None: a draft's
            memory lasts as long as the engine.
        model: its configuration, which names its folder. vocab_size: size of its vocabulary.

    Raises:
        CapabilityError: its embedding or head cannot be shared.
    """

    share = None
    rooms = None

    def __init__(self, described: Any, model: Any, head_dim: int, kv_heads: int, weights: str | None) -> None:
        heads, self.last = int(described.num_attention_heads), int(described.num_hidden_layers) - 1
        embedding = _weight(model, "embed_tokens")
        head = embedding if described.tie_word_embeddings else _weight(model, "lm_head")
        embedding, head = embedding[: described.vocab_size], head[: described.vocab_size]
        self.model, self.vocab_size = described, int(described.vocab_size)
        self.device, dtype = embedding.device, embedding.dtype
        self.kv_shape = KVShape(1, kv_heads, head_dim, dtype)
        self.attention_path, attend = dispatch.resolve(self.device, dtype, head_dim)
        self.prefix_attend = prefix.before(attend)
        self.graphs = Graphs.on(self.device, self.attention_path)
        rope = described.rope_parameters
        rotary = Rotary(head_dim, rope, dtype, self.device)
        self.parts = SharedParts(
            embedding=nn.Embedding.from_pretrained(embedding),
            head=head,
            rms_norm_eps=float(described.rms_norm_eps),
            intermediate_size=int(described.intermediate_size),
            hidden_size=int(described.hidden_size),
            heads=heads,
            description={
                "model_type": described.model_type, "vocab_size": self.vocab_size,
                "hidden_size": int(described.hidden_size), "layers": self.last + 1, "heads": heads,
                "kv_heads": kv_heads, "head_dim": head_dim, "rope_theta": rope.get("rope_theta"), "weights": weights,
            },
            _rotary=rotary.module,
            _like=torch.empty(1, 1, dtype=dtype, device=self.device),
        )  # fmt: skip


class CopiedLayer:
    """One layer's keys and values of the tracked texts, copied from the engine's cache as they come.

    In a model of 32 layers this is a thirty-second of its KV. With the copy, the draft need not know how the engine
    packs its pages, or which prefixes were cached.
    """

    def __init__(self, target: EngineTarget, drafter: Drafter, slots: int, longest: int) -> None:
        transposed = dispatch.prefers_transposed_keys(target.attention_path, target.kv_shape.dtype)
        self._store = KVStore(target.kv_shape, slots, longest, target.device, transposed)
        drafter.bind(target, self._store)  # type: ignore[arg-type]

    def copy(self, request: Tracked, read: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies a text's new rows, up to the newest token, which has no KV yet.

        Args:
            read: (start, stop) -> keys and values (kv_heads, stop - start, head_dim) of these positions.
        """
        slot, stop = request.sequence.slot, request.known
        start = 0 if request.new else self._store.lengths[slot]
        for there, new in zip(self._store.stored(slot, slice(0, 1), start), read(start, stop), strict=True):
            there[0, :, start:stop] = new
        self._store.lengths[slot] = stop


def _weight(model: Any, name: str) -> torch.Tensor:
    """(vocabulary, hidden) of the embedding or head."""
    module = next((m for n, m in model.named_modules() if n.split(".")[-1] == name), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise CapabilityError(
            f"The engine's {type(model).__name__} has no {name}.weight that a draft could share: use a method without "
            "a draft (longdraft_engines.vllm.Lookup)."
        )
    return weight.detach()
