"""LongSpec in vLLM: the block's window is ours, its cross-attention reads the last layer of vLLM's own KV cache.

That layer's rows are copied as they come into a store that the draft reads (of a model of 32 layers, a thirty-second of
its KV): pages of every packing are the same to the draft then, and so are prefixes that vLLM's cache had already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.attention import dispatch, prefix
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.drafters.longspec_draft import LongSpecDraft
from longdraft.engines.vllm.pages import Pages
from longdraft.engines.vllm.proposer import Followed, Proposer
from longdraft.errors import CapabilityError, RequestError
from longdraft.host.graphs import Graphs
from longdraft.host.parts import SharedParts
from longdraft.host.rotary import Rotary
from longdraft.kv.store import KVShape, KVStore


class LongSpec(Proposer):
    """Drafts chains with a trained LongSpec block.

    Options: ``draft``, the folder of the draft; ``slots``, requests that are drafted for at a time (their last layer is
    copied; others are decoded without drafts).
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"draft": None, "slots": 8}

    @property
    def slots(self) -> int:
        return min(int(self.options["slots"]), super().slots)

    def load_model(self, model: Any) -> None:
        """Raises CheckpointError where the draft was made for another target, RequestError without a draft."""
        folder = self.options["draft"]
        if folder is None:
            raise RequestError('LongSpec needs a draft: additional_config={"longdraft": {"draft": "FOLDER"}}.')
        draft = LongSpecDraft.load(Path(folder))
        target = EngineTarget(self.config, model, draft.made_for.get("weights"))
        self.drafter = LongSpecDrafter(draft, tree="chain", depth=self.tokens)
        transposed = dispatch.prefers_transposed_keys(target.attention_path, target.kv_shape.dtype)
        self._store = KVStore(target.kv_shape, self.slots, self.longest, target.device, transposed)
        self.drafter.bind(target, self._store)  # type: ignore[arg-type]
        self._pages: Pages | None = None
        self._last = target.last

    def prepare(self, followed: list[Followed]) -> None:
        """Copies what is new of the last layer: of all tokens but the newest, which has no KV yet."""
        if self._pages is None:
            self._pages = Pages(self.config, self._last)
        for each in followed:
            s = each.sequence
            known, stop = 0 if each.new else self._store.lengths[s.slot], len(s.prompt) + len(s.output) - 1
            rows = self._pages.read(self.runner, each.row, known, stop)
            for there, new in zip(self._store.stored(s.slot, slice(0, 1), known), rows, strict=True):
                there[0, :, known:stop] = new
            self._store.lengths[s.slot] = stop


class EngineTarget:
    """What a LongSpec draft asks of a target, of one that vLLM computes.

    Args:
        config: vLLM's ``VllmConfig``. model: the loaded model.
        weights: digest of the weights that the draft was trained with; vLLM's are joined and packed, and not compared.

    Attributes:
        last: index of its last layer. share: None, for it is on one device.

    Raises:
        CapabilityError: it is sharded, or its embedding or head cannot be shared.
    """

    share = None

    def __init__(self, config: Any, model: Any, weights: str | None) -> None:
        own = config.model_config
        described = own.hf_text_config
        if config.parallel_config.tensor_parallel_size > 1 or config.parallel_config.pipeline_parallel_size > 1:
            raise CapabilityError("LongSpec drafts for a model on one device: use longdraft.engines.vllm.Lookup.")
        heads, size = int(described.num_attention_heads), int(own.get_head_size())
        kv_heads, self.last = int(own.get_total_num_kv_heads()), int(described.num_hidden_layers) - 1
        embedding = _weight(model, "embed_tokens")
        head = embedding if described.tie_word_embeddings else _weight(model, "lm_head")
        embedding, head = embedding[: described.vocab_size], head[: described.vocab_size]
        self.device, dtype = embedding.device, embedding.dtype
        self.kv_shape = KVShape(1, kv_heads, size, dtype)
        self.attention_path, _ = dispatch.resolve(self.device, dtype, size)
        self.prefix_attend = prefix.resolve(self.attention_path)
        self.graphs = Graphs.on(self.device, self.attention_path)
        rope = described.rope_parameters
        rotary = Rotary(size, rope, dtype, self.device)
        self.parts = SharedParts(
            embedding=nn.Embedding.from_pretrained(embedding),
            head=head,
            rms_norm_eps=float(described.rms_norm_eps),
            intermediate_size=int(described.intermediate_size),
            hidden_size=int(described.hidden_size),
            heads=heads,
            description={
                "model_type": described.model_type, "vocab_size": int(described.vocab_size),
                "hidden_size": int(described.hidden_size), "layers": self.last + 1, "heads": heads,
                "kv_heads": kv_heads, "head_dim": size, "rope_theta": rope.get("rope_theta"), "weights": weights,
            },
            _rotary=rotary.module,
            _like=torch.empty(1, 1, dtype=dtype, device=self.device),
        )  # fmt: skip


def _weight(model: Any, name: str) -> torch.Tensor:
    """(vocabulary, hidden) of the embedding or head."""
    module = next((m for n, m in model.named_modules() if n.split(".")[-1] == name), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise CapabilityError(
            f"vLLM's {type(model).__name__} has no {name}.weight that a draft could share: use "
            "longdraft.engines.vllm.Lookup."
        )
    return weight.detach()
