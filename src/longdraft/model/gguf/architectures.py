"""The table of GGUF architectures: how fields become a transformers config, and what the converter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import AutoConfig

from longdraft.errors import CapabilityError
from longdraft.model.gguf.header import GGUFHeader

# <architecture>.FIELD -> field of the config.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Fields that may be a list, with a number for each layer.
PER_LAYER_FIELDS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TOKENS = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}
# Fields of a config.
Settings = dict[str, Any]


@dataclass(frozen=True)
class Arch:
    """An architecture.

    Attributes:
        model_type: in transformers.
        field_map: further fields of the file -> of the config.
        derived_fields: fields of the config that follow from several of the file, or are not in it.
        permuted_qk: rows of q and k are interleaved for RoPE, as in the first Llama (the converter's ``permute``).
        norm_plus_one: norms multiply by 1 + weight, and the file has the sum.
        tiled_value_heads: value heads of gated DeltaNet are tiled over the key heads (k0 k1 k0 k1), not grouped.
        per_layer_sizes: :data:`PER_LAYER_FIELDS` may differ between layers.
        rope_freqs_scale: the tensor ``rope_freqs`` scales frequencies; False: it marks unused ones.
    """

    model_type: str
    field_map: Mapping[str, str] = field(default_factory=dict)
    derived_fields: Callable[[GGUFHeader], Settings] = lambda header: {}
    permuted_qk: bool = False
    norm_plus_one: bool = False
    tiled_value_heads: bool = False
    per_layer_sizes: bool = False
    rope_freqs_scale: bool = True


def _delta(header: GGUFHeader) -> Settings:
    """Layers with gated DeltaNet and layers with gated full attention."""
    heads = int(header("ssm.time_step_rank"))
    recurrent = header("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        every = int(header("full_attention_interval", 4))
        recurrent = [(layer + 1) % every != 0 for layer in range(header.num_layers)]
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent[: header.num_layers]]
    rope: Settings = {"partial_rotary_factor": int(header("rope.dimension_count")) / header.head_dim}
    if sections := header("rope.dimension_sections"):
        rope |= {"mrope_section": [int(each) for each in sections[:3]], "mrope_interleaved": True}
    return {
        "layer_types": kinds,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": int(header("ssm.inner_size")) // heads,
        "rope_parameters": rope,
    }


_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}


def _lfm2(header: GGUFHeader) -> Settings:
    heads = [int(each) for each in header("attention.head_count_kv")]
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.tensors),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in header.tensors),
        "routed_scaling_factor": float(header("expert_weights_scale", 1.0)),
        "norm_topk_prob": True,
    }


_LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}


# Experts in every layer. Qwen2-MoE's code makes a window mask even if no layer uses one.
_QWEN3_MOE: Settings = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN2_MOE: Settings = _QWEN3_MOE | {"norm_topk_prob": False, "sliding_window": 0}


def _gpt_oss(header: GGUFHeader) -> Settings:
    rope: Settings = {"truncate": False} if header("rope.scaling.type") == "yarn" else {}
    return _windows(2)(header) | {"rope_parameters": rope}


def _partial(header: GGUFHeader) -> Settings:
    """RoPE that rotates a part of each head."""
    size = int(header("rope.dimension_count", header.head_dim))
    return {"rope_parameters": {"partial_rotary_factor": size / header.head_dim}}


def _glm4(header: GGUFHeader) -> Settings:
    return {"attention_bias": "blk.0.attn_q.bias" in header.tensors, **_partial(header)}


def _glm4_moe(header: GGUFHeader) -> Settings:
    return {
        **_glm4(header),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "norm_topk_prob": bool(header("expert_weights_norm", False)),
    }


_GLM4_MOE = _EXPERTS | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _windows(every: int) -> Callable[[GGUFHeader], Settings]:
    """Layers with sliding windows; each ``every``-th has full attention if the file does not say more."""

    def settings(header: GGUFHeader) -> Settings:
        window, pattern = header("attention.sliding_window"), header("attention.sliding_window_pattern", every)
        if window is None:
            return {"sliding_window": None, "layer_types": ["full_attention"] * header.num_layers}
        if not isinstance(pattern, list):
            pattern = [(layer + 1) % int(pattern) != 0 for layer in range(header.num_layers)]
        kinds = ["sliding_attention" if each else "full_attention" for each in pattern[: header.num_layers]]
        return {"sliding_window": int(window), "layer_types": kinds}

    return settings


def _gemma(every: int, largest: int) -> Callable[[GGUFHeader], Settings]:
    """Gemma 2 and 3. The largest model, with ``largest`` layers, scales scores by hidden_size // heads."""

    def settings(header: GGUFHeader) -> Settings:
        hidden, heads = int(header("embedding_length")), int(header("attention.head_count"))
        scale = hidden // heads if header.num_layers == largest else header.head_dim
        return _windows(every)(header) | {"query_pre_attn_scalar": scale}

    return settings


def _gemma3(header: GGUFHeader) -> Settings:
    bases = {"sliding_attention": header("rope.freq_base_swa", 1e4), "full_attention": header("rope.freq_base", 1e6)}
    rope = {kind: {"rope_type": "default", "rope_theta": float(base)} for kind, base in bases.items()}
    return _gemma(6, 62)(header) | {"rope_parameters": rope}


def _olmo2(header: GGUFHeader) -> Settings:
    if header("attention.sliding_window") is not None:
        raise CapabilityError("OLMo 3 is not read from GGUF files: give the model's Hugging Face folder or id.")
    return {}


def _seed_oss(header: GGUFHeader) -> Settings:
    biased = {name: f"blk.0.{name}.bias" in header.tensors for name in ("attn_q", "attn_output")}
    return {"attention_bias": biased["attn_q"], "attention_out_bias": biased["attn_output"]}


def _gemma4(header: GGUFHeader) -> Settings:
    windows = _windows(6)(header)
    full = [layer for layer, kind in enumerate(windows["layer_types"]) if kind == "full_attention"]
    heads, inner = header("attention.head_count_kv"), header("feed_forward_length")
    by_layer = heads if isinstance(heads, list) else [heads] * header.num_layers
    inners = inner if isinstance(inner, list) else [inner]
    windowed = [layer for layer in range(header.num_layers) if layer not in full]
    experts = header("expert_count")
    return windows | {
        "head_dim": int(header("attention.key_length_swa", header.head_dim)),
        "global_head_dim": header.head_dim,
        "num_key_value_heads": int(by_layer[windowed[0]]) if windowed else int(by_layer[0]),
        "num_global_key_value_heads": int(by_layer[full[0]]) if full else None,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in header.tensors,
        "intermediate_size": int(min(inners)),
        "use_double_wide_mlp": max(inners) > min(inners),
        "enable_moe_block": bool(experts),
        "num_experts": experts,
        "vocab_size_per_layer_input": int(header("vocab_size", header.vocab_size)),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(header("rope.freq_base_swa", 1e4))},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(header("rope.freq_base", 1e6)),
                "partial_rotary_factor": 1.0 if header.rope_freqs is None else float(np.mean(header.rope_freqs < 1e9)),
            },
        },
    }


_GEMMA4 = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_COHERE2 = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

ARCHITECTURES = {
    "llama": Arch("llama", permuted_qk=True),
    "qwen2": Arch("qwen2"),
    "qwen3": Arch("qwen3"),
    "qwen2moe": Arch("qwen2_moe", _EXPERTS, lambda _: _QWEN2_MOE),
    "qwen3moe": Arch("qwen3_moe", _EXPERTS, lambda _: _QWEN3_MOE),
    "gpt-oss": Arch("gpt_oss", _MIXTRAL | {"expert_feed_forward_length": "intermediate_size"}, _gpt_oss),
    "gemma2": Arch("gemma2", {}, _gemma(2, 46), norm_plus_one=True),
    "gemma3": Arch("gemma3_text", {}, _gemma3, norm_plus_one=True),
    "gemma4": Arch("gemma4_text", _GEMMA4, _gemma4, per_layer_sizes=True, rope_freqs_scale=False),
    "qwen35": Arch("qwen3_5_text", _DELTA, _delta, norm_plus_one=True, tiled_value_heads=True),
    "qwen35moe": Arch("qwen3_5_moe_text", _DELTA | _EXPERTS, _delta, norm_plus_one=True, tiled_value_heads=True),
    "qwen3next": Arch("qwen3_next", _DELTA | _EXPERTS, _delta, norm_plus_one=True),
    "lfm2": Arch("lfm2", _LFM2, _lfm2, per_layer_sizes=True),
    "lfm2moe": Arch(
        "lfm2_moe", _LFM2 | _EXPERTS | {"leading_dense_block_count": "num_dense_layers"}, _lfm2, per_layer_sizes=True
    ),
    "glm4": Arch("glm4", {}, _glm4),
    "glm4moe": Arch("glm4_moe", _GLM4_MOE, _glm4_moe),
    "smollm3": Arch("smollm3", permuted_qk=True),
    "olmo2": Arch("olmo2", {}, _olmo2),
    "exaone4": Arch("exaone4", {}, _windows(4)),
    "cohere2": Arch("cohere2", _COHERE2, lambda header: _windows(4)(header) | _partial(header)),
    "seed_oss": Arch("seed_oss", {}, _seed_oss),
    "granite": Arch("granite", _GRANITE, permuted_qk=True),
}
# Models whose files say the architecture "llama".
_MISTRAL = Arch("mistral", {}, lambda header: {"sliding_window": header("attention.sliding_window")}, permuted_qk=True)
_WITH_EXPERTS = Arch("mixtral", _MIXTRAL, permuted_qk=True)


def find_arch(header: GGUFHeader) -> Arch | None:
    """The table's row for a file; None if there is none."""
    if header.architecture == "llama" and header("expert_count"):
        return _WITH_EXPERTS
    if header.architecture == "llama" and "mistral" in str(header.field("general.name")).lower():
        return _MISTRAL
    return ARCHITECTURES.get(header.architecture)


def build_config(header: GGUFHeader, arch: Arch) -> Any:
    """The transformers config of a file, without scaling of the rotary frequencies."""
    fields: Settings = {"num_hidden_layers": header.num_layers, "head_dim": header.head_dim}
    for names, value in (
        (_FIELDS | dict(arch.field_map), header),
        (_TOKENS, lambda n: header.field(f"tokenizer.ggml.{n}")),
    ):
        fields |= {ours: x for theirs, ours in names.items() if (x := value(theirs)) is not None}
    fields |= arch.derived_fields(header)
    rope = fields.get("rope_parameters", {})
    if not any(isinstance(each, dict) for each in rope.values()):
        plain = {"rope_type": "default", "rope_theta": float(header("rope.freq_base", 1e4))}
        fields["rope_parameters"] = plain | rope
    fields["vocab_size"] = int(header("vocab_size", header.vocab_size))
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    return AutoConfig.for_model(arch.model_type, **fields)
