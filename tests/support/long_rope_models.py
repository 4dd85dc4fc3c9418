"""Tiny models with LongRoPE: contexts of more than SWITCH tokens have other frequency factors."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SWITCH = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "original_max_position_embeddings": SWITCH,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.4,
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi4-mini": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi3 with a window": ("phi3", {"sliding_window": 10}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "short_mscale": 1.1, "long_mscale": 1.4}),
    "llama": ("llama", {"factor": 4.0}),
}
KINDS = tuple(_KINDS)
_OF_ROPE = ("partial_rotary_factor", "short_mscale", "long_mscale", "factor")


def long_rope_model(kind: str = "phi3", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    name, more = _KINDS[kind]
    numbers = int(16 * more.get("partial_rotary_factor", 1.0)) // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0 + 0.1 * i for i in range(numbers)], "long_factor": [1.0 + 3 * i for i in range(numbers)],
    }  # fmt: skip
    rope |= {key: more[key] for key in _OF_ROPE if key in more}
    own = {key: value for key, value in more.items() if key not in _OF_ROPE}
    config = AutoConfig.for_model(name, **_SIZES, **own, rope_parameters=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def greedy_without_cache(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation by the model's own forward of the full context for each token, without a cache."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
