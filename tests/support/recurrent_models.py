"""Tiny models with recurrent layers, from the configurations of the installed transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
_ENDS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip
_BASE: dict[str, Any] = {
    **_ENDS, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    **_BASE, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    **_BASE, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS, "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_multiple_of": 8},
    "mamba2": {**_ENDS, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 2,
               "chunk_size": 16},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
                         "shared_intermediate_size": 64, "position_embedding_type": "rope"},
    "nemotron_h": {**_BASE, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 6,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96},
    "mamba": {**_ENDS, "num_hidden_layers": 3, "state_size": 8},
}  # fmt: skip
# One for each kind of mixer: gated delta rule, short convolution, Mamba-2 with attention, Mamba-2, Mamba.
KINDS = ("qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "mamba")
FAMILIES = tuple(_CONFIGS)


def recurrent_model(family: str = "qwen3_5_text", seed: int = 0, **over: Any) -> PreTrainedModel:
    """A model whose greedy output does not repeat itself at once."""
    config = AutoConfig.for_model(family, **{**_CONFIGS[family], **over})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1 and "norm" in name:
                    weight.add_(torch.randn_like(weight), alpha=0.2)
    return model.eval()


def some_prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
