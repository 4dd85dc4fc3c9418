"""Lists the GGUF architectures: how their metadata becomes a transformers config, and what the converter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import AutoConfig

from longdraft.errors import CapabilityError
from longdraft.model.gguf.header import GGUFHeader

# Field of the GGUF file, without the prefix ``<architecture>.`` -> field of the transformers config.
_COMMON_MAP = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# GGUF fields that hold a list, with a number for each layer, if layers differ.
PER_LAYER_FIELDS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
_EXPERT_MAP = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TOKEN_MAP = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}
# Fields of a transformers config.
ConfigFields = dict[str, Any]


@dataclass(frozen=True)
class Arch:
    """An architecture of GGUF files.

    Attributes:
        model_type: the architecture's name in transformers.
        field_map: GGUF field -> config field, besides the common ones.
        derived_fields: returns config fields that need more than one GGUF field, or that no field gives.
        permuted_qk: True if the rows of q and k are interleaved for RoPE, which the converter's ``permute`` does.
        norm_plus_one: True if transformers' norms multiply by 1 + weight. The file then stores 1 + weight.
        tiled_value_heads: True if gated DeltaNet's value heads are in order of key heads k0 k1 k0 k1, not k0 k0 k1 k1.
        per_layer_sizes: True if :data:`PER_LAYER_FIELDS` may differ between layers.
        scales_by_rope_freqs: True if the tensor ``rope_freqs`` scales frequencies; False if it only disables some.
    """

    model_type: str
    field_map: Mapping[str, str] = field(default_factory=dict)
    derived_fields: Callable[[GGUFHeader], ConfigFields] = lambda header: {}
    permuted_qk: bool = False
    norm_plus_one: bool = False
    tiled_value_heads: bool = False
    per_layer_sizes: bool = False
    scales_by_rope_freqs: bool = True


def _delta_config(header: GGUFHeader) -> ConfigFields:
    """Returns config fields of models that mix gated DeltaNet layers and full attention layers."""
    num_v_heads = int(header("ssm.time_step_rank"))
    recurrent = header("attention.recurrent_layers")  # a flag for each layer
    if not isinstance(recurrent, list):
        interval = int(header("full_attention_interval", 4))
        recurrent = [(layer + 1) % interval != 0 for layer in range(header.num_layers)]
    layer_types = ["linear_attention" if x else "full_attention" for x in recurrent[: header.num_layers]]
    rope: ConfigFields = {"partial_rotary_factor": int(header("rope.dimension_count")) / header.head_dim}
    if sections := header("rope.dimension_sections"):
        rope |= {"mrope_section": [int(size) for size in sections[:3]], "mrope_interleaved": True}
    return {
        "layer_types": layer_types,
        "linear_num_value_heads": num_v_heads,
        "linear_value_head_dim": int(header("ssm.inner_size")) // num_v_heads,
        "rope_parameters": rope,
    }


_DELTA_MAP = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}
_DELTA_MOE_MAP = _DELTA_MAP | _EXPERT_MAP


def _lfm2_config(header: GGUFHeader) -> ConfigFields:
    kv_heads = [int(num_heads) for num_heads in header("attention.head_count_kv")]  # 0 in layers with a convolution
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if num_heads else "conv" for num_heads in kv_heads],
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.tensors),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in header.tensors),
        "routed_scaling_factor": float(header("expert_weights_scale", 1.0)),
        "norm_topk_prob": True,
    }


_LFM2_MAP = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_LFM2_MOE_MAP = _LFM2_MAP | _EXPERT_MAP | {"leading_dense_block_count": "num_dense_layers"}

# All layers have experts. transformers needs sliding_window to make Qwen2-MoE's mask, although no layer has a window.
_QWEN3_MOE_CONFIG: ConfigFields = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN2_MOE_CONFIG: ConfigFields = _QWEN3_MOE_CONFIG | {"norm_topk_prob": False, "sliding_window": 0}


def _gpt_oss_config(header: GGUFHeader) -> ConfigFields:
    rope: ConfigFields = {"truncate": False} if header("rope.scaling.type") == "yarn" else {}
    return _window_config(2)(header) | {"rope_parameters": rope}


def _partial_rope_config(header: GGUFHeader) -> ConfigFields:
    """Returns the config fields of RoPE that rotates only the first dimensions of each head."""
    rotary_dim = int(header("rope.dimension_count", header.head_dim))
    return {"rope_parameters": {"partial_rotary_factor": rotary_dim / header.head_dim}}


def _glm4_config(header: GGUFHeader) -> ConfigFields:
    return {"attention_bias": "blk.0.attn_q.bias" in header.tensors, **_partial_rope_config(header)}


def _glm4_moe_config(header: GGUFHeader) -> ConfigFields:
    return {
        **_glm4_config(header),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "norm_topk_prob": bool(header("expert_weights_norm", False)),
    }


_GLM4_MOE_MAP = _EXPERT_MAP | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _window_config(period: int) -> Callable[[GGUFHeader], ConfigFields]:
    """Returns a builder of config fields: windows in all layers but each ``period``-th, or in the file's pattern."""

    def window_fields(header: GGUFHeader) -> ConfigFields:
        # The pattern is a period, or a list with True for each layer that has a window.
        window, pattern = header("attention.sliding_window"), header("attention.sliding_window_pattern", period)
        if window is None:
            return {"sliding_window": None, "layer_types": ["full_attention"] * header.num_layers}
        if not isinstance(pattern, list):
            pattern = [(layer + 1) % int(pattern) != 0 for layer in range(header.num_layers)]
        layer_types = ["sliding_attention" if x else "full_attention" for x in pattern[: header.num_layers]]
        return {"sliding_window": int(window), "layer_types": layer_types}

    return window_fields


def _gemma_config(period: int, num_layers_27b: int) -> Callable[[GGUFHeader], ConfigFields]:
    """Returns a builder of Gemma 2's or 3's config fields. The 27B model alone has a scalar other than head_dim."""

    def gemma_fields(header: GGUFHeader) -> ConfigFields:
        hidden, heads = int(header("embedding_length")), int(header("attention.head_count"))
        scalar = hidden // heads if header.num_layers == num_layers_27b else header.head_dim
        return _window_config(period)(header) | {"query_pre_attn_scalar": scalar}

    return gemma_fields


def _gemma3_config(header: GGUFHeader) -> ConfigFields:
    thetas = {"sliding_attention": header("rope.freq_base_swa", 1e4), "full_attention": header("rope.freq_base", 1e6)}
    rope = {layer_type: {"rope_type": "default", "rope_theta": float(theta)} for layer_type, theta in thetas.items()}
    return _gemma_config(6, 62)(header) | {"rope_parameters": rope}


def _olmo2_config(header: GGUFHeader) -> ConfigFields:
    if header("attention.sliding_window") is not None:
        raise CapabilityError("OLMo 3 is not read from GGUF files: give the model's Hugging Face folder or id.")
    return {}


def _seed_oss_config(header: GGUFHeader) -> ConfigFields:
    q_bias, out_bias = (f"blk.0.{name}.bias" in header.tensors for name in ("attn_q", "attn_output"))
    return {"attention_bias": q_bias, "attention_out_bias": out_bias}


def _gemma4_config(header: GGUFHeader) -> ConfigFields:
    window_fields = _window_config(6)(header)
    full_layers = [i for i, layer_type in enumerate(window_fields["layer_types"]) if layer_type == "full_attention"]
    kv_heads, mlp_size = header("attention.head_count_kv"), header("feed_forward_length")
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * header.num_layers
    mlp_sizes = mlp_size if isinstance(mlp_size, list) else [mlp_size]
    window_layers = [layer for layer in range(header.num_layers) if layer not in full_layers]
    num_experts = header("expert_count")
    return window_fields | {
        "head_dim": int(header("attention.key_length_swa", header.head_dim)),
        "global_head_dim": header.head_dim,
        "num_key_value_heads": int(kv_heads[window_layers[0]]) if window_layers else int(kv_heads[0]),
        "num_global_key_value_heads": int(kv_heads[full_layers[0]]) if full_layers else None,
        "attention_k_eq_v": bool(full_layers) and f"blk.{full_layers[0]}.attn_v.weight" not in header.tensors,
        "intermediate_size": int(min(mlp_sizes)),
        "use_double_wide_mlp": max(mlp_sizes) > min(mlp_sizes),
        "enable_moe_block": bool(num_experts),
        "num_experts": num_experts,
        "vocab_size_per_layer_input": int(header("vocab_size", header.vocab_size)),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(header("rope.freq_base_swa", 1e4))},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(header("rope.freq_base", 1e6)),
                # A divisor of 1e30 disables a frequency. All others are small, so 1e9 tells them apart.
                "partial_rotary_factor": 1.0 if header.rope_freqs is None else float(np.mean(header.rope_freqs < 1e9)),
            },
        },
    }


_GEMMA4_MAP = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_COHERE2_MAP = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_MIXTRAL_MAP = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE_MAP = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

ARCHITECTURES = {
    "llama": Arch("llama", permuted_qk=True),
    "qwen2": Arch("qwen2"),
    "qwen3": Arch("qwen3"),
    "qwen2moe": Arch("qwen2_moe", _EXPERT_MAP, lambda _: _QWEN2_MOE_CONFIG),
    "qwen3moe": Arch("qwen3_moe", _EXPERT_MAP, lambda _: _QWEN3_MOE_CONFIG),
    "gpt-oss": Arch("gpt_oss", _MIXTRAL_MAP | {"expert_feed_forward_length": "intermediate_size"}, _gpt_oss_config),
    "gemma2": Arch("gemma2", {}, _gemma_config(2, 46), norm_plus_one=True),
    "gemma3": Arch("gemma3_text", {}, _gemma3_config, norm_plus_one=True),
    "gemma4": Arch("gemma4_text", _GEMMA4_MAP, _gemma4_config, per_layer_sizes=True, scales_by_rope_freqs=False),
    "qwen35": Arch("qwen3_5_text", _DELTA_MAP, _delta_config, norm_plus_one=True, tiled_value_heads=True),
    "qwen35moe": Arch("qwen3_5_moe_text", _DELTA_MOE_MAP, _delta_config, norm_plus_one=True, tiled_value_heads=True),
    "qwen3next": Arch("qwen3_next", _DELTA_MOE_MAP, _delta_config, norm_plus_one=True),
    "lfm2": Arch("lfm2", _LFM2_MAP, _lfm2_config, per_layer_sizes=True),
    "lfm2moe": Arch("lfm2_moe", _LFM2_MOE_MAP, _lfm2_config, per_layer_sizes=True),
    "glm4": Arch("glm4", {}, _glm4_config),
    "glm4moe": Arch("glm4_moe", _GLM4_MOE_MAP, _glm4_moe_config),
    "smollm3": Arch("smollm3", permuted_qk=True),
    "olmo2": Arch("olmo2", {}, _olmo2_config),
    "exaone4": Arch("exaone4", {}, _window_config(4)),
    "cohere2": Arch("cohere2", _COHERE2_MAP, lambda header: _window_config(4)(header) | _partial_rope_config(header)),
    "seed_oss": Arch("seed_oss", {}, _seed_oss_config),
    "granite": Arch("granite", _GRANITE_MAP, permuted_qk=True),
}
# Architectures of drafts, which are no models; ``drafts/gguf_drafts.py`` reads the first five.
DRAFT_ARCHITECTURES = (
    "eagle3", "dflash", "dspark", "gemma4-assistant", "gemma4_assistant", "dflash-draft", "gemma4_mtp",
)  # fmt: skip
# Models whose files name the architecture "llama" too; :func:`find_arch` tells them apart.
_MISTRAL = Arch("mistral", {}, lambda header: {"sliding_window": header("attention.sliding_window")}, permuted_qk=True)
_MIXTRAL = Arch("mixtral", _MIXTRAL_MAP, permuted_qk=True)


def find_arch(header: GGUFHeader) -> Arch | None:
    """Returns the architecture of a file; None if it is not in the table."""
    if header.architecture == "llama" and header("expert_count"):
        return _MIXTRAL
    if header.architecture == "llama" and "mistral" in str(header.field("general.name")).lower():
        return _MISTRAL
    return ARCHITECTURES.get(header.architecture)


def build_config(header: GGUFHeader, arch: Arch) -> Any:
    """Builds the transformers config of a file, without RoPE scaling."""
    fields: ConfigFields = {"num_hidden_layers": header.num_layers, "head_dim": header.head_dim}
    for field_map, get_field in (
        (_COMMON_MAP | dict(arch.field_map), header),
        (_TOKEN_MAP, lambda name: header.field(f"tokenizer.ggml.{name}")),
    ):
        fields |= {key: value for name, key in field_map.items() if (value := get_field(name)) is not None}
    fields |= arch.derived_fields(header)
    rope = fields.get("rope_parameters", {})
    if not any(isinstance(value, dict) for value in rope.values()):  # else they are parameters of layer types
        default_rope = {"rope_type": "default", "rope_theta": float(header("rope.freq_base", 1e4))}
        fields["rope_parameters"] = default_rope | rope
    fields["vocab_size"] = int(header("vocab_size", header.vocab_size))
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    return AutoConfig.for_model(arch.model_type, **fields)
