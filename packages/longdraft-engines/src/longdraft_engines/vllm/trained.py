"""Proposers for vLLM with a trained draft, which reads one layer of the target's KV in vLLM's cache."""

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
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.rope import RotaryEmbedding
from longdraft.model.shared_parts import SharedParts
from longdraft_engines.vllm.layer import AttentionLayer, StepQueries
from longdraft_engines.vllm.proposer import Proposer, TrackedRequest

# Options of method specextend that are None by default.
_VIEW_OPTIONS = ("chunk", "chunks", "every", "layer", "recent")


class EngineTarget:
    """vLLM's model on one device, with the attributes of :class:`TargetRunner` that drafts read. Raises CapabilityError
    if the draft cannot share the embedding or the head.

    Args:
        text_config: the configuration of the language model, as in transformers.
        model: vLLM's loaded model.
        head_dim: size of a head.
        kv_heads: number of KV heads.
        weights: digest of the weights that the draft was trained for. The target claims to have this digest, because
            vLLM's weights are fused and packed, so that their own digest differs.

    Attributes:
        num_layers: number of decoder layers.
        model: the configuration, because drafts read only the folder's name from a target's model.
    """

    tp_rank = None  # the target is on one device
    allows_fusion = True
    drafts_in_eight_bits = False
    buffer_arena = None  # a draft's memory lasts as long as the engine
    profiler = None  # only the bench profiles

    def __init__(self, text_config: Any, model: Any, head_dim: int, kv_heads: int, weights: str | None) -> None:
        heads, self.num_layers = int(text_config.num_attention_heads), int(text_config.num_hidden_layers)
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
            embedding=nn.Embedding.from_pretrained(embedding), head=head, num_heads=heads,
            rms_norm_eps=float(text_config.rms_norm_eps),
            intermediate_size=int(text_config.intermediate_size), hidden_size=int(text_config.hidden_size),
            description={
                "model_type": text_config.model_type, "vocab_size": self.vocab_size,
                "hidden_size": int(text_config.hidden_size), "layers": self.num_layers, "heads": heads,
                "kv_heads": kv_heads, "head_dim": head_dim, "rope_theta": rope.get("rope_theta"), "weights": weights,
            },
            _rotary=rotary.module, _hidden_like=torch.empty(1, 1, dtype=dtype, device=self.device),
        )  # fmt: skip


class TrainedProposer(Proposer):
    """Copies the new keys and values of one of the target's layers in each step, for a limited number of requests.

    With a copy, the draft need not know how vLLM packs pages, nor which prefixes were cached.

    Options: ``draft``, the draft's folder; ``slots``, the number of requests that get drafts at a time.
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"draft": None, "slots": 8}

    @property
    def slots(self) -> int:
        return min(int(self.options["slots"]), super().slots)

    @abstractmethod
    def load(self, folder: Path) -> tuple[Draft[Any], Drafter]:
        """Loads a draft from its folder, and makes its drafter."""

    def layer_index(self, num_layers: int) -> int:
        """Returns the index of the target's layer to copy."""
        return num_layers - 1

    def load_model(self, model: Any) -> None:
        """Raises CheckpointError if the draft belongs to another target, RequestError without the option ``draft``."""
        folder = self.options["draft"]
        if folder is None:
            raise RequestError(
                f'{type(self).__name__} needs a draft: additional_config={{"longdraft": {{"draft": "FOLDER"}}}}.'
            )
        parallel, model_config = self.config.parallel_config, self.config.model_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise CapabilityError(
                f"{type(self).__name__} drafts for a model on one device: use longdraft_engines.vllm.Lookup."
            )
        draft, self.drafter = self.load(Path(folder))
        head_dim, kv_heads = int(model_config.get_head_size()), int(model_config.get_total_num_kv_heads())
        weights = draft.required_target.get("weights")
        self.target = target = EngineTarget(model_config.hf_text_config, model, head_dim, kv_heads, weights)
        self.layer = AttentionLayer(self.config, self.layer_index(target.num_layers))
        transposed = dispatch.prefers_transposed_keys(target.attention_path, target.kv_shape.dtype)
        self._store = KVStore(target.kv_shape, self.slots, self.max_model_len, target.device, StoreConfig(transposed))
        self.drafter.bind(target, self._store)  # type: ignore[arg-type]

    def prepare(self, requests: list[TrackedRequest]) -> None:
        for request in requests:
            slot, stop = request.sequence.slot, request.num_computed_tokens
            start = 0 if request.is_new else self._store.lengths[slot]
            new_kv = self.layer.read(self.runner, request.req_index, start, stop)
            for store_tensor, new in zip(self._store.slot_kv(slot, slice(0, 1), start), new_kv, strict=True):
                store_tensor[0, :, start:stop] = new
            self._store.lengths[slot] = stop


class LongSpec(TrainedProposer):
    """Drafts chains with a trained LongSpec block, whose cross-attention reads the target's last layer."""

    def load(self, folder: Path) -> tuple[LongSpecDraft, LongSpecDrafter]:
        draft = LongSpecDraft.load(folder)
        return draft, LongSpecDrafter(draft, tree="chain", depth=self.num_speculative_tokens)


class SpecExtend(TrainedProposer):
    """Drafts chains with a small language model (SpecExtend, section 2.2). A layer of the target ranks chunks of the
    context by attention. The small model attends to the best chunks of its own KV alone.

    Further options: ``chunk``, ``chunks``, ``every``, ``layer``, ``sink``, ``recent``, as in method ``specextend``.
    """

    drafter: SmallLMDrafter

    @staticmethod
    def default_options() -> dict[str, Any]:
        return TrainedProposer.default_options() | dict.fromkeys(_VIEW_OPTIONS) | {"sink": 32}

    def load(self, folder: Path) -> tuple[SmallLMDraft, SmallLMDrafter]:
        draft = SmallLMDraft.load(folder)
        view = {name: self.options[name] for name in (*_VIEW_OPTIONS, "sink")}
        return draft, SmallLMDrafter(draft, tree="chain", depth=self.num_speculative_tokens, view="retrieval", **view)

    def layer_index(self, num_layers: int) -> int:
        assert self.drafter.retrieval is not None
        (layer,) = self.drafter.retrieval.scoring_layers(num_layers)
        return layer

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        self._step_queries = StepQueries(self.layer, self.target.device)

    def prepare(self, requests: list[TrackedRequest]) -> None:
        super().prepare(requests)
        assert self.drafter.retrieval is not None
        num_positions = max(1, self.drafter.retrieval.view.num_queries)
        for request in requests:
            stop = request.num_computed_tokens
            queries = self._step_queries.read(self.runner, request.req_index, stop, num_positions)
            request.queries = {} if queries is None else {0: queries}  # the copied layer has index 0


def _weight(model: Any, name: str) -> torch.Tensor:
    """Returns the weight (vocabulary, hidden) of the embedding or head. ``name``: last part of the module's name."""
    module = next((m for n, m in model.named_modules() if n.split(".")[-1] == name), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise CapabilityError(
            f"The engine's {type(model).__name__} has no {name}.weight that a draft could share: use a method without "
            "a draft (longdraft_engines.vllm.Lookup)."
        )
    return weight.detach()
