"""vLLM's proposers with a trained draft that reads one layer of the target in vLLM's own KV cache."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.attention import dispatch, prefix
from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.draft import Draft
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.drafter import Drafter
from longdraft.errors import CapabilityError, RequestError
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.rotary import RotaryEmbedding
from longdraft.model.shared_parts import SharedParts
from longdraft_engines.vllm.layer import AttentionLayer, StepQueries
from longdraft_engines.vllm.proposer import Proposer, TrackedRequest

_SIZES = ("chunk", "chunks", "every", "layer", "recent")


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

    tp_rank = None
    buffer_arena = None

    def __init__(self, text_config: Any, model: Any, head_dim: int, kv_heads: int, weights: str | None) -> None:
        heads, self.last = int(text_config.num_attention_heads), int(text_config.num_hidden_layers) - 1
        embedding = _weight(model, "embed_tokens")
        head = embedding if text_config.tie_word_embeddings else _weight(model, "lm_head")
        embedding, head = embedding[: text_config.vocab_size], head[: text_config.vocab_size]
        self.model, self.vocab_size = text_config, int(text_config.vocab_size)
        self.device, dtype = embedding.device, embedding.dtype
        self.kv_shape = KVShape(1, kv_heads, head_dim, dtype)
        self.attention_path, attend = dispatch.resolve(self.device, dtype, head_dim)
        self.prefix_attend = prefix.make_prefix_attention(attend)
        self.graphs = CudaGraphs.for_device(self.device, self.attention_path)
        rope = text_config.rope_parameters
        rotary = RotaryEmbedding(head_dim, rope, dtype, self.device)
        self.shared_parts = SharedParts(
            embedding=nn.Embedding.from_pretrained(embedding),
            head=head,
            rms_norm_eps=float(text_config.rms_norm_eps),
            intermediate_size=int(text_config.intermediate_size),
            hidden_size=int(text_config.hidden_size),
            num_heads=heads,
            description={
                "model_type": text_config.model_type, "vocab_size": self.vocab_size,
                "hidden_size": int(text_config.hidden_size), "layers": self.last + 1, "heads": heads,
                "kv_heads": kv_heads, "head_dim": head_dim, "rope_theta": rope.get("rope_theta"), "weights": weights,
            },
            _rotary=rotary.module,
            _like=torch.empty(1, 1, dtype=dtype, device=self.device),
        )  # fmt: skip


class TrainedProposer(Proposer):
    """Copies one layer's keys and values as they come, for some requests at a time.

    In a model of 32 layers this is a thirty-second of its KV. With the copy, the draft need not know how vLLM packs its
    pages, or which prefixes were cached.

    Options: ``draft``, the draft's folder; ``slots``, how many requests are drafted for at a time (others are decoded
    without drafts).
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"draft": None, "slots": 8}

    @property
    def slots(self) -> int:
        return min(int(self.options["slots"]), super().slots)

    @abstractmethod
    def load(self, folder: Path) -> tuple[Draft[Any], Drafter]:
        """The draft in a folder, and its drafter."""

    def layer_index(self, num_layers: int) -> int:
        """The index of the layer to read."""
        return num_layers - 1

    def load_model(self, model: Any) -> None:
        """Raises CheckpointError if the draft was made for another target, RequestError if there is no draft."""
        folder = self.options["draft"]
        if folder is None:
            raise RequestError(
                f'{type(self).__name__} needs a draft: additional_config={{"longdraft": {{"draft": "FOLDER"}}}}.'
            )
        parallel, described = self.config.parallel_config, self.config.model_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise CapabilityError(
                f"{type(self).__name__} drafts for a model on one device: use longdraft_engines.vllm.Lookup."
            )
        draft, self.drafter = self.load(Path(folder))
        sizes = int(described.get_head_size()), int(described.get_total_num_kv_heads())
        self.target = target = EngineTarget(
            described.hf_text_config, model, *sizes, draft.required_target.get("weights")
        )
        self.layer = AttentionLayer(self.config, self.layer_index(target.last + 1))
        transposed = dispatch.prefers_transposed_keys(target.attention_path, target.kv_shape.dtype)
        self._store = KVStore(target.kv_shape, self.slots, self.max_model_len, target.device, transposed)
        self.drafter.bind(target, self._store)  # type: ignore[arg-type]

    def prepare(self, requests: list[TrackedRequest]) -> None:
        for request in requests:  # up to the newest token, which has no KV yet
            slot, stop = request.sequence.slot, request.num_computed_tokens
            start = 0 if request.is_new else self._store.lengths[slot]
            rows = self.layer.read(self.runner, request.req_index, start, stop)
            for there, new in zip(self._store.slot_kv(slot, slice(0, 1), start), rows, strict=True):
                there[0, :, start:stop] = new
            self._store.lengths[slot] = stop


class LongSpec(TrainedProposer):
    """Drafts chains with a trained LongSpec block, whose cross-attention reads the target's last layer."""

    def load(self, folder: Path) -> tuple[LongSpecDraft, LongSpecDrafter]:
        draft = LongSpecDraft.load(folder)
        return draft, LongSpecDrafter(draft, tree="chain", depth=self.num_speculative_tokens)


class SpecExtend(TrainedProposer):
    """Drafts chains with a small language model, which has its own KV and sees the chunks of a text that a layer of the
    target attends to (SpecExtend, section 2.2).

    Further options: ``chunk``, ``chunks``, ``every``, ``layer``, ``sink``, ``recent``, as of method ``specextend``.
    """

    drafter: SmallLMDrafter

    @staticmethod
    def default_options() -> dict[str, Any]:
        return TrainedProposer.default_options() | dict.fromkeys(_SIZES) | {"sink": 32}

    def load(self, folder: Path) -> tuple[SmallLMDraft, SmallLMDrafter]:
        draft = SmallLMDraft.load(folder)
        sizes = {name: self.options[name] for name in (*_SIZES, "sink")}
        return draft, SmallLMDrafter(draft, tree="chain", depth=self.num_speculative_tokens, view="retrieval", **sizes)

    def layer_index(self, num_layers: int) -> int:
        assert self.drafter.retrieval is not None
        (layer,) = self.drafter.retrieval.scoring_layers(num_layers)
        return layer

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        self._queries = StepQueries(self.layer, self.target.device)

    def prepare(self, requests: list[TrackedRequest]) -> None:
        super().prepare(requests)
        for request in requests:
            queries = self._queries.read(
                self.runner, request.req_index, request.num_computed_tokens, self.drafter.num_prompt_queries
            )
            request.queries = {} if queries is None else {0: queries}  # the copy has one layer


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
