"""Tiny models with sliding-window or chunked attention, and with other parts of such model types."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 24
_SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SOME = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_CAPS = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
_CHUNKS = {
    "layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": WINDOW, "moe_layers": [],
    "intermediate_size_mlp": 96, "num_local_experts": 2, "attn_temperature_tuning": False,
}  # fmt: skip
# Name -> model type and options. Gemma 2 also caps scores and logits; some layers of SmolLM3 have no RoPE.
_MODELS = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, **_CAPS}),
    "gemma3": (
        "gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "rope_parameters": _ROPES, **_SOME},
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"sliding_window": WINDOW, "use_sliding_window": True, **_SOME}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "smollm3 windows": (
        "smollm3", {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW, **_SOME},
    ),
    "llama4": ("llama4_text", _CHUNKS),
}  # fmt: skip
NAMES = tuple(_MODELS)


def window_model(name: str = "gemma3") -> PreTrainedModel:
    model_type, over = _MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES | over), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((0.4 if weight.dim() > 1 else 0.1) * torch.randn(weight.shape, generator=generator))
    return model.eval()
