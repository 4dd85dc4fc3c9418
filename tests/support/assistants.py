"""Tiny models of Gemma 4 and their assistants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.drafts import fill_random

VOCABULARY = 16  # so small that some of what a random assistant drafts is right
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "vocab_size": VOCABULARY,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": 512,
}  # fmt: skip


def _made(config: Any, seed: int = 0) -> PreTrainedModel:
    return fill_random(AutoModelForCausalLM.from_config(config).float(), seed).eval()


def gemma4(shared: int = 2, **over: Any) -> PreTrainedModel:
    """A target. ``shared``: number of layers without keys and values of their own."""
    if shared:  # as in E2B and E4B
        over = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY} | over
    return _made(
        AutoConfig.for_model(
            "gemma4_text", **SIZES | {"num_kv_shared_layers": shared, "tie_word_embeddings": False} | over
        )
    )


def assistant(
    folder: Path, ordered: bool = False, model_type: str = "gemma4_assistant", **over: Any
) -> tuple[Path, PreTrainedModel]:
    """An assistant's folder, and its model. ``ordered``: with a head of clusters. ``over``: of its text model."""
    text = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_kv_shared_layers": 4} | over
    more = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 4} if ordered else {}
    text["model_type"] = model_type.replace("assistant", "text")
    model = _made(AutoConfig.for_model(model_type, text_config=text, backbone_hidden_size=64, **more), 1)
    if ordered:
        model.masked_embedding.token_ordering.copy_(
            torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
        )
    model.save_pretrained(folder)
    return folder, model
