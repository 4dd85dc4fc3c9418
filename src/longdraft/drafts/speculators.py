"""Exports an EAGLE-3 draft to the layout of `speculators`, which vLLM serves.

The exported draft has no embedding. vLLM then uses the target's embedding, as in training. A draft of the full
vocabulary has neither ``d2t`` nor ``t2d``, any other draft has both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import D2T, HF_NAMES
from longdraft.drafts.feature_draft import FeatureDraft
from longdraft.drafts.formats import T2D
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.options import whole_number

_SIZES = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "rms_norm_eps", "attention_bias")


def to_speculators(
    draft: FeatureDraft[Any], out: Path | str, verifier: str, architecture: str | None = None,
    max_position: int = 131_072, speculative_tokens: int = 5,
) -> list[str]:  # fmt: skip
    """Writes a draft to the folder ``out``, in the layout of `speculators`.

    Args:
        verifier: name or path of the target, under which vLLM loads it.
        architecture: the target's class in transformers; None: not stated.
        max_position: longest context that is served with the draft.
        speculative_tokens: the folder's default number of drafted tokens in a round.

    Returns:
        Properties of the draft that the layout cannot express, a sentence each.

    Raises:
        CapabilityError: the draft folder does not say how large the target's vocabulary is.
        CheckpointError: ``out`` cannot be written, or is the draft's own folder.
        RequestError: ``max_position`` or ``speculative_tokens`` is below 1.
    """
    whole_number("max_position", max_position, 1)
    whole_number("speculative_tokens", speculative_tokens, 1)
    if Path(out).resolve() == draft.folder.resolve():
        raise CheckpointError(f"{out} is the draft itself: name another folder to write to.")
    ids, vocab_size = draft.draft_to_target_ids, draft.required_target.get("vocab_size")
    vocab_size = draft.shape.vocabulary if ids is None else vocab_size
    if vocab_size is None:
        raise CapabilityError(
            f"config.json of {draft.folder} does not say how large the target's vocabulary is, which the layout needs: "
            "add vocab_size to it."
        )
    shape, rope = draft.shape, dict(draft.rope)
    theta = rope.pop("rope_theta")
    layer_config = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        **{HF_NAMES.get(name, name): getattr(shape, name) for name in _SIZES},
        "num_hidden_layers": shape.decoder_layers,
        "hidden_act": "silu",
        "mlp_bias": False,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
    }
    if draft.window is not None:
        # vLLM applies the window only to layers of the type sliding_attention.
        layer_config |= {"sliding_window": draft.window, "layer_types": ["sliding_attention"] * shape.decoder_layers}
    proposal = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}  # accept the target's first choice alone
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": shape.feature_size // len(draft.configured_layers or range(3)),  # three layers by default
        **{name: getattr(shape, name) for name in ("norm_before_residual", "norm_before_fc", "norm_output")},
        "fc_norm": shape.fc_norm is not None,
        "embed_requires_grad": shape.embedding is not None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [architecture] if architecture else []},
        },
    }
    if draft.configured_layers is not None:
        # An id names a layer's input, which is the output of the layer before.
        config["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in draft.configured_layers]
    draft_folder.write(out, config, _tensors(draft, int(vocab_size)))
    if draft.configured_layers is None:
        return ["The draft does not name the target's layers that it reads: the server takes its default layers."]
    return []


def _tensors(draft: FeatureDraft[Any], vocab_size: int) -> dict[str, torch.Tensor]:
    """Returns the draft's tensors by the layout's names. ``vocab_size``: size of the target's vocabulary."""
    dtype = draft.weights["norm.weight"].dtype  # the dtype that packed matrices had before
    tensors = {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: tensor.to(dtype)
        for name, tensor in draft.weights.items()
    }
    if draft.shape.attention_bias and not draft.shape.output_bias:
        # The layout's flag covers q, k, v and o.
        tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(draft.shape.hidden_size, **CPU_FLOAT32)
    if (ids := draft.draft_to_target_ids) is not None:
        tensors[D2T] = ids - torch.arange(len(ids), device="cpu")
        tensors[T2D] = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        tensors[T2D][ids] = True
    return tensors
