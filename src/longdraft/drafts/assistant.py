"""Gemma 4's assistant, a draft of a few layers that attend to the target's keys and values and have none of their own.

    x_t    = pre_projection([embed(token_t), f_{t-1}])    f: the target's last hidden states, after its final norm
    h_t    = layers(x_t)                                  to the keys and values of the target's last layer of each type
    f_t    = post_projection(h_t)                         in place of the target's f_t, in the nodes of a tree
    logits of token_{t+1} = head(h_t)

All nodes of a tree have the root's position, and attend to the committed tokens before it (transformers:
SinglePositionMultiTokenCandidateGenerator). So no prefill and no cache is needed. transformers' class computes h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.attention.sdpa import attend_sequence
from longdraft.drafts import draft_folder
from longdraft.drafts.draft import Draft
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.folders import is_gguf
from longdraft.memory.store import KVStore
from longdraft.memory.windows import WindowKVCache
from longdraft.model import hosting
from longdraft.model.layout import KVLocation
from longdraft.model.load.checkpoints import check_folder, checkpoint_errors, quiet, read_checkpoint
from longdraft.model.model_parts import decoder_config
from longdraft.model.runner import TargetRunner

_TIED_HEAD = "lm_head.weight"  # the embedding
# Keys and values (1, KV heads, n, head size) by layer type.
SharedKV = dict[str, tuple[torch.Tensor, torch.Tensor]]


class BoundAssistant:
    """An assistant in its target's dtype and on its device.

    Args:
        model: of transformers' class.
        locations: layer type -> where the KV of the target's last layer of this type lies.
    """

    def __init__(self, runner: TargetRunner, model: Any, locations: dict[str, KVLocation]) -> None:
        self._runner, self._model, self._locations = runner, model, locations

    def shared_kv(self, store: KVStore, slot: int) -> SharedKV:
        """Returns the keys and values that a token behind a slot's committed tokens attends to."""
        shared, dtype, num_tokens = {}, self._runner.kv_shape.dtype, store.readable_len(slot)
        for layer_type, location in self._locations.items():
            layers: KVStore | WindowKVCache = store
            first, last = 0, num_tokens
            if location.window_index is not None:
                layers = cache = hosting.window_cache(store, location.window_index)
                start = cache.start_positions[slot]
                first, last = cache.shape.span.first_visible(num_tokens) - start, num_tokens - start
            keys, values = (x[slot, :, first:last].to(dtype)[None] for x in layers.layer(location.layer))
            shared[layer_type] = keys, values
        return shared

    def step(
        self, tokens: torch.Tensor, features: torch.Tensor, position: int, shared: SharedKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits (W, vocabulary) and the features (W, hidden) for the children of W nodes of a sequence.
        ``features``: (W, hidden) of the nodes' parents. ``position``: the root's."""
        model, inputs = self._model, torch.cat([self._runner.shared_parts.embedding(tokens), features], -1)
        hidden = model.model(
            inputs_embeds=model.pre_projection(inputs)[:, None],  # a batch of W texts of a token
            position_ids=torch.full((1, 1), position, dtype=torch.long, device=tokens.device),
            attention_mask=dict.fromkeys(shared),
            shared_kv_states=shared,
            use_cache=False,
            longdraft_attend=_attend,
        ).last_hidden_state
        head, masked = model.lm_head, model.masked_embedding
        # One by one, because the logit of tokens of other clusters depends on all texts of a batch.
        logits = head(hidden) if masked is None else torch.cat([masked(x, head.weight) for x in hidden.split(1)])
        return logits[:, 0], model.post_projection(hidden)[:, 0]


def _attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Is an attention function of transformers: W queries (W, heads, 1, d) attend to all of the same keys."""
    out = attend_sequence(query[:, :, 0].transpose(0, 1), key[0], value[0], scale=scaling)
    return out.transpose(0, 1)[:, None], None


class AssistantDraft(Draft[BoundAssistant]):
    """Gemma 4's assistant in a folder that transformers reads, or in a GGUF file.
    Raises CheckpointError if it cannot be read."""

    kind = "mtp"

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        tensors: dict[str, torch.Tensor] | None = None  # of a GGUF file
        with checkpoint_errors(folder, f"The assistant in {folder} cannot be read"), quiet():
            if is_gguf(folder):
                contents = draft_folder.load(folder, self.kind)
                config, tensors = AutoConfig.for_model(**contents.config), contents.tensors
            else:
                check_folder(Path(folder))
                config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            clusters, best = config.num_centroids, config.centroid_intermediate_top_k
            vocab_size = config.get_text_config().vocab_size
            if config.use_ordered_embeddings and not (0 < best <= clusters and vocab_size % clusters == 0):
                raise CheckpointError(
                    f"{folder} has centroid_intermediate_top_k {best} of num_centroids {clusters}, for {vocab_size} "
                    "tokens: copy the assistant again."
                )
            with torch.device("meta"):
                self._empty_model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if tensors is not None:
            shapes = {name: t.shape for name, t in self._empty_model.state_dict().items() if name != _TIED_HEAD}
            draft_folder.check_tensors(tensors, shapes, folder, "Gemma 4 assistant")
        self._tensors = tensors
        self.required_target = {
            "hidden_size": config.backbone_hidden_size, "vocab_size": vocab_size,
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._empty_model.parameters())

    def check(self, runner: TargetRunner) -> None:
        draft_folder.check_target(self.required_target, runner.shared_parts.description, self.folder)
        if runner.tp_rank is not None:
            raise CapabilityError("Gemma 4's assistants do not run in tensor parallel: use eagle3 or prompt-lookup.")
        locations, layout = self._locations(runner), runner.execution_model.layout
        for layer in self._empty_model.model.layers:
            attention = layer.self_attn
            size, location = attention.head_dim, locations.get(attention.layer_type)
            kv_heads = attention.q_proj.out_features // size // attention.num_key_value_groups
            index = None if location is None else location.window_index
            shape = layout.shape if index is None else layout.windows[index]
            if location is None or (kv_heads, size) != (shape.kv_heads, shape.head_dim):
                raise CheckpointError(
                    f"The assistant in {self.folder} reads {kv_heads} KV heads of size {size} from a layer of the type "
                    f"{attention.layer_type}, which this target does not have: load the Gemma 4 model that it is for."
                )

    def make(self, runner: TargetRunner) -> BoundAssistant:
        dtype = runner.kv_shape.dtype
        if self._tensors is None:
            model: Any = read_checkpoint(str(self.folder), dtype, with_tokenizer=False).model
        else:
            empty = self._empty_model
            with quiet():
                model = type(empty).from_pretrained(None, config=empty.config, state_dict=self._tensors, dtype=dtype)
        hosting.set_attention(model)
        model = model.to(runner.device).eval().requires_grad_(False)
        return BoundAssistant(runner, model, self._locations(runner))

    def _locations(self, runner: TargetRunner) -> dict[str, KVLocation]:
        """Returns the KV locations of the target's last layer of each of the assistant's layer types, if there is one.
        A layer that shares keys and values has the location of the layer that computes them."""
        types = getattr(decoder_config(runner.model), "layer_types", None) or ()
        last = dict(zip(types, runner.execution_model.layout.locations, strict=False))  # a later layer replaces one
        return {
            layer_type: last[layer_type]
            for layer_type in self._empty_model.config.text_config.layer_types
            if layer_type in last
        }
