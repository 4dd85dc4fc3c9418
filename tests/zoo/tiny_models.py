"""Tiny models of every causal language model in the installed transformers, made from their configurations.

A size is recognised by its name in the configuration; the few configurations whose parts must fit together in another
way have a row in OVERRIDES.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

VOCABULARY = 97
WINDOW = 8
LAYERS = 4

_SIZES: dict[int | float | bool | None, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size "
    "word_embed_proj_dim attention_hidden_size lru_width",
    96: "intermediate_size moe_dense_intermediate_size dense_intermediate_size intermediate_size_mlp ffn_dim n_inner "
    "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff d_inner feed_forward_size",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers decoder_layers num_blocks num_decoder_layers num_heads "
    "num_attention_heads n_head n_heads decoder_attention_heads attention_heads num_decoder_attention_heads "
    "swa_num_attention_heads n_routed_experts num_experts num_local_experts moe_num_experts encoder_layers "
    "encoder_attention_heads num_encoder_layers num_encoder_attention_heads linear_num_value_heads linear_num_heads",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk num_experts_per_token "
    "moe_k n_group num_expert_group index_n_heads altup_num_inputs linear_num_key_heads num_kv_shared_layers",
    16: "head_dim swa_head_dim kv_channels attention_head_size dim_head d_head v_head_dim qk_nope_head_dim "
    "kv_lora_rank index_head_dim hidden_size_per_layer_input laurel_rank time_step_rank mamba_dt_rank mamba_d_state "
    "state_size ssm_state_size linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_head mamba_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "router_hidden_size",
    24: "qk_head_dim",
    8: "qk_rope_head_dim rotary_dim sliding_window sliding_window_size attention_chunk_size window_size "
    "attention_window_size local_attention chunk_size mamba_chunk_size max_inference_chunksize",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace num_dense_layers "
    "mamba_n_groups n_groups mamba_ngroups moe_layer_start_index moe_layer_end_index",
    256: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
    "max_target_positions max_source_positions",
    0: "num_nextn_predict_layers",
}  # fmt: skip
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
_EMBEDDING = re.compile(r"embed|wte|wpe|positions")
_NO_TOKENS = ("bos_token_id", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "sep_token_id")

# More by model type, where the names alone do not give a model that works.
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 32, "image_size": 28, "patch_size": 14, "depth": 1, "embed_dim": 32, "num_heads": 2,
    "out_hidden_size": 64, "num_position_embeddings": 16, "position_embedding_size": 16,
}  # fmt: skip
_KINDS = {name: ["sliding_attention", "full_attention"] * 2 for name in ("layer_types",)}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
_SHARED = _KINDS | {"num_kv_shared_layers": 2}
_GEMMA4 = _SHARED | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_ASSISTANT = _KINDS | {"num_kv_shared_layers": 4}
_QWEN4 = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "hc_lowrank": 16, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "ple_layer_ids": [3], "eos_token_id": 96, "ple_embed_dim": 32, "ngram_vocab_size_base": 50, "split_ngram_parts": 1,
    "heads_per_ngram": 2,
}  # fmt: skip
_DOTS3 = {
    "num_key_value_heads": 4, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": _KINDS | {"rope_parameters": {kind: dict(_ROPE) for kind in set(_KINDS["layer_types"])}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": _VISION | {"adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]},
        "audio_config": {
            "adapter_input_size": 64, "adapter_out_dim": 64, "feature_size": 16, "downsample_hidden_size": 8,
        },
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3": {"vision_config": _VISION},
    "gemma3n_text": _SHARED,
    "gemma3n": {"text_config": _SHARED},
    "gemma4": {"text_config": _GEMMA4, "vision_config": _VISION},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "laguna": _KINDS | {"mlp_layer_types": ["dense", "sparse"] * 2, "num_attention_heads_per_layer": [4, 2] * 2},
    "mellum": _KINDS,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2,
    },
    "gemma4_assistant": {
        "text_config": _ASSISTANT
        | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        "backbone_hidden_size": 64,
    },
    "gemma4_unified_assistant": {
        "text_config": _ASSISTANT | {"model_type": "gemma4_unified_text"},
        "backbone_hidden_size": 64,
    },
    "got_ocr2": {
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16,
        "image_size": 64, "mlp_dim": 32, "window_size": 2, "global_attn_indexes": [0]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1, "L_bp_cycles": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
        "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16},
        "vision_config": _VISION | {"num_hidden_layers": 2},
    },
    "qwen4_exp": {"text_config": _QWEN4, "vision_config": _VISION},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "max_position_embeddings": 256,
    },
    "roc_bert": {
        "shape_vocab_size": 97, "pronunciation_vocab_size": 97, "shape_embed_dim": 16, "pronunciation_embed_dim": 16,
    },
    "xlstm": {"chunk_size": 8, "qk_dim_factor": 1.0, "ffn_round_up_to_multiple_of": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"num_key_value_heads": 4, "attention_hidden_size": 128, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# Configurations of models whose own is that of a part.
_PARTS = {"musicgen": "MusicgenDecoderConfig", "musicgen_melody": "MusicgenMelodyDecoderConfig"}

# Where the first seed's text repeats one token, or a router of experts is undecided.
SEEDS = {
    "bert": 7, "cpmant": 3, "data2vec-text": 2, "ernie": 7, "exaone4": 1, "openai-gpt": 6, "qwen2_moe": 1, "roberta": 2,
    "bloom": 1, "mpt": 1, "rembert": 1, "roc_bert": 1, "xmod": 5, "zamba2": 1, "zaya": 1,
}  # fmt: skip


def tiny_config(model_type: str, **over: Any) -> PreTrainedConfig:
    """The configuration of a model type, made tiny. ``over``: further settings."""
    part = _PARTS.get(model_type)
    kind = CONFIG_MAPPING[model_type] if part is None else getattr(transformers, part)
    return _tiny(kind, OVERRIDES.get(model_type, {}) | over)


def _tiny(kind: type[PreTrainedConfig], more: dict[str, Any]) -> PreTrainedConfig:
    given: dict[str, Any] = {}
    try:
        defaults = kind()
    except Exception:  # a configuration that is nothing without its parts
        defaults = None
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    known = set(fields) if defaults is None else set(defaults.to_dict())
    for name in known:
        if name in SIZES:
            given[name] = SIZES[name]
        elif name == "tie_word_embeddings":  # a tied model repeats its last token
            given[name] = False
        elif name in _NO_TOKENS:
            given[name] = None if "None" in str(fields.get(name, "None")) else 0
        elif name.endswith("_token_id") or name.endswith("_token_index"):
            value = getattr(defaults, name, None)
            given[name] = None if value is None else min(abs(int(value)), VOCABULARY - 1)
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
            kinds = getattr(defaults, name, None)
            if kinds is not None:
                given[name] = _all_kinds(kinds)
    parts = {name: type(part) for name, part in vars(defaults or kind).items() if isinstance(part, PreTrainedConfig)}
    parts |= {name: CONFIG_MAPPING[each["model_type"]] for name, each in more.items() if _names_a_model(each)}
    for name, part in parts.items():
        given[name] = _tiny(part, {k: v for k, v in more.get(name, {}).items() if k != "model_type"})
    if "is_decoder" in known and not getattr(defaults, "is_encoder_decoder", False):
        given["is_decoder"] = True
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "qk_rope_head_dim" in known and "head_dim" in known:
        given["head_dim"] = given["qk_rope_head_dim"]
    given |= {name: value for name, value in more.items() if name not in parts}
    return kind(**given)


def _names_a_model(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _all_kinds(kinds: Iterable[str]) -> list[str]:
    """A list of LAYERS kinds in which each of these occurs, in their order."""
    found = list(dict.fromkeys(kinds))
    return [found[i % len(found)] for i in range(max(LAYERS, len(found)))]


def tiny_model(model_type: str, seed: int | None = None, **over: Any) -> PreTrainedModel:
    """A random model in which every part matters. ``over``: further settings of its configuration."""
    config, make = tiny_config(model_type, **over), AutoModelForCausalLM.from_config
    if model_type in _PARTS:
        make = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])._from_config
    return _random(make, config, SEEDS.get(model_type, 0) if seed is None else seed)


def tiny_image_model(model_type: str) -> PreTrainedModel:
    """A random model that reads images and text, its decoder of LAYERS layers."""
    more = {"vision_config": _VISION, "text_config": {}} | OVERRIDES.get(model_type, {})
    if model_type.startswith(("qwen2", "qwen3_vl")):  # a part of each head counts time, rows and columns
        rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        more["text_config"] = {"rope_parameters": rotary, "sliding_window": None}
    return _random(AutoModelForImageTextToText.from_config, _tiny(CONFIG_MAPPING[model_type], more), seed=0)


def _random(make: Callable[..., Any], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = make(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _draw(name, weight)
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def _draw(name: str, weight: torch.Tensor) -> None:
    last = name.rsplit(".", 1)[-1]
    if weight.dim() >= 2:
        weight.normal_(0.0, 1.0 if _EMBEDDING.search(name) else 0.3)
        weight -= weight.mean(-1, keepdim=True)
    elif "A_log" in last or "decay" in last:
        weight.uniform_(0.0, math.log(8.0))
    elif last == "weight" or last == "D":
        weight.normal_(1.0, 0.2)
    else:
        weight.normal_(0.0, 1.0 if "sink" in last else 0.1)
