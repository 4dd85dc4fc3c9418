"""GGUF files of tiny models of many architectures, laid out as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.gguf_files import decoder_fields, tokenizer_fields, write_file

VOCABULARY = 64
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}


def _delta(c: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in c.layer_types],
        "full_attention_interval": 4,
    }  # fmt: skip


def _qwen35(c: Any) -> dict[str, Any]:
    return _delta(c) | {"rope.dimension_sections": [2, 1, 1, 0]}


def _mixture(c: Any) -> dict[str, Any]:
    return {
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    }  # fmt: skip


def _lfm2(c: Any) -> dict[str, Any]:
    heads = [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": c.conv_L_cache}


def _lfm2_moe(c: Any) -> dict[str, Any]:
    more = {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok, "expert_gating_func": 2}
    return _lfm2(c) | more | {
        "expert_feed_forward_length": c.moe_intermediate_size, "leading_dense_block_count": c.num_dense_layers,
    }  # fmt: skip


def _glm4_moe(c: Any) -> dict[str, Any]:
    return {
        "expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok, "expert_gating_func": 2,
        "expert_shared_count": c.n_shared_experts, "expert_feed_forward_length": c.moe_intermediate_size,
        "leading_dense_block_count": c.first_k_dense_replace, "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": c.norm_topk_prob,
    }  # fmt: skip


def _gemma4(c: Any) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in c.layer_types]
    more = {
        "expert_count": c.num_experts, "expert_used_count": c.top_k_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
    }  # fmt: skip
    return {
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": c.hidden_size // 4,
        "attention.value_length_swa": c.hidden_size // 4, "rope.dimension_count": 32,
        "rope.dimension_count_swa": c.hidden_size // 4, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "attention.sliding_window": c.sliding_window, "attention.sliding_window_pattern": kinds,
        "attention.shared_kv_layers": c.num_kv_shared_layers, "final_logit_softcapping": c.final_logit_softcapping,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
        "attention.head_count_kv": [2 if windowed else 1 for windowed in kinds],
    } | (more if c.enable_moe_block else {})  # fmt: skip


def _windows(c: Any) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in c.layer_types]
    return {"attention.sliding_window": c.sliding_window, "attention.sliding_window_pattern": kinds}


def _granite(c: Any) -> dict[str, Any]:
    return {
        "attention.scale": float(c.attention_multiplier), "embedding_scale": float(c.embedding_multiplier),
        "residual_scale": float(c.residual_multiplier), "logit_scale": float(c.logits_scaling),
    }  # fmt: skip


def _nothing(c: Any) -> dict[str, Any]:
    return {}


_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "conv_bias": False}
_THREE_TO_ONE = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 16}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 16,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
# Case -> architecture, type of the model, its configuration, and the fields of its own.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "qwen35": ("qwen35", "qwen3_5_text", _DELTA, _qwen35),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", _DELTA | _EXPERTS, lambda c: _qwen35(c) | _mixture(c)),
    "qwen3next": ("qwen3next", "qwen3_next", _DELTA | _EXPERTS, lambda c: _delta(c) | _mixture(c)),
    "lfm2": ("lfm2", "lfm2", _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}, _lfm2),
    "lfm2moe": ("lfm2moe", "lfm2_moe", _CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1}, _lfm2_moe),
    "mixtral": (
        "llama", "mixtral", _PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
        lambda c: {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok},
    ),
    "glm4": ("glm4", "glm4", _HALF, _nothing),
    "glm4moe": (
        "glm4moe", "glm4_moe",
        _HALF | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
        _glm4_moe,
    ),
    "gemma4": ("gemma4", "gemma4_text", _GEMMA4, _gemma4),
    "gemma4 with experts": (
        "gemma4", "gemma4_text", _GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "num_kv_shared_layers": 0}
        | {"hidden_size_per_layer_input": 0},
        _gemma4,
    ),
    "qwen2moe": ("qwen2moe", "qwen2_moe", _PLAIN | _EXPERTS, _mixture),
    "qwen3moe": (
        "qwen3moe", "qwen3_moe", _PLAIN | _EXPERTS | {"norm_topk_prob": True},
        lambda c: {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}
        | {"expert_feed_forward_length": c.moe_intermediate_size},
    ),
    "gpt_oss": (
        "gpt-oss", "gpt_oss",
        _PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        lambda c: {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok}
        | {"expert_feed_forward_length": c.intermediate_size, "attention.sliding_window": c.sliding_window},
    ),
    "smollm3": ("smollm3", "smollm3", _PLAIN, _nothing),
    "olmo2": ("olmo2", "olmo2", _PLAIN, _nothing),
    "exaone4": ("exaone4", "exaone4", _PLAIN | _THREE_TO_ONE, _windows),
    "cohere2": (
        "cohere2", "cohere2", _PLAIN | _THREE_TO_ONE | {"logit_scale": 0.25, "tie_word_embeddings": True},
        lambda c: _windows(c) | {"logit_scale": c.logit_scale, "attention.layer_norm_epsilon": c.layer_norm_eps},
    ),
    "seed_oss": ("seed_oss", "seed_oss", _PLAIN, _nothing),
    "granite": (
        "granite", "granite",
        _PLAIN | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
        | {"logits_scaling": 2.0},
        _granite,
    ),
}  # fmt: skip
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def tiny(case: str, hidden: int = 64, seed: int = 0, **over: Any) -> PreTrainedModel:
    """A model whose greedy output does not repeat itself at once."""
    _, model_type, own, _ = ARCHITECTURES[case]
    inner = dict.fromkeys(_INNER, hidden)
    config = AutoConfig.for_model(
        model_type, **{**_BASE, "hidden_size": hidden, "head_dim": hidden // 4, **inner, **own, **over}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 2 * weight.shape[-1] ** -0.5)
            elif "norm" in name or "scale" in name:
                weight.data.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.data.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer), alpha=0.2)
    return model.eval().requires_grad_(False)


def write(
    file: Path, case: str, kind: str = "Q8_0", hidden: int = 64, words: str = "F16",
    kinds: Callable[[str], str] | None = None, fields: Mapping[str, Any] = MappingProxyType({}), split: str = "qwen35",
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}), **over: Any,
) -> PreTrainedModel:  # fmt: skip
    """Writes a tiny model. Returns the model with the dequantised weights.

    Args:
        kind: type of the matrices. words: type of the embedding and the head.
        kinds: name of a tensor -> its type, in place of ``kind``.
        fields: further fields. split: the pre-tokenizer.
        beside: further tensors by their names in the file; matrices are replaced by their dequantised values.
        over: options of the configuration.
    """
    model, (architecture, _, _, own) = tiny(case, hidden, **over), ARCHITECTURES[case]
    every = decoder_fields(model.config) | own(model.config) | dict(fields)
    every = {f"{architecture}.{name}": value for name, value in every.items()}
    every |= {"general.name": "Tiny"} | tokenizer_fields(split, VOCABULARY)
    tensors = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12} if architecture == "gemma4" else {}
    write_file(file, model, architecture, every, kinds or kind, words, tensors, beside)
    return model
