"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.support.tiny import Family, tiny_model

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}

# Byte offsets of the float16 scales and minima in quant blocks of types that gguf cannot quantise.
HALVES = {
    **{
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "IQ4_NL": (0,),
        "IQ4_XS": (0,),
    },
    **{"IQ2_XXS": (0,), "TQ1_0": (52,)},
}


def write_gguf(
    file: Path, family: Family = "llama", kind: str = "Q8_0", *, words: str = "F16", tie: bool = True,
    rope_freqs: Sequence[float] = (), rope: Mapping[str, Any] = MappingProxyType({}), tokens: Sequence[str] = (),
    by_length: bool = False, pre: str = "smollm", numbers: Mapping[str, Any] = MappingProxyType({}), split: int = 0,
    **over: Any,
) -> PreTrainedModel:  # fmt: skip
    """Writes a full model of some 100 kB, with a byte tokenizer that has two merges.

    Args:
        kind: type of the layers' matrices; types that gguf cannot quantise get random blocks.
        words: type of the embedding and the head.
        rope_freqs: divisors of RoPE's frequencies. rope: further ``rope.`` fields.
        by_length: with LongRoPE's factors for short and long contexts.
        tokens: the first tokens of the tokenizer, in place of the usual ones.
        pre: the pre-tokenizer. numbers: further fields, or other values, by their full names.
        split: tensors of each split file; 0: one file.
        over: arguments of :func:`tests.support.tiny.tiny_model`.

    Returns:
        The model with the dequantised weights.
    """
    import gguf

    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab": 64, "tie": tie} | over
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    model = tiny_model(family, rms_norm_eps=1e-5, **sizes)
    config, gemma = model.config, family.startswith("gemma")
    usual = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *"abcdefghijklmnopqrstuvwxyz", "he", "the"]
    vocabulary = [*tokens, *usual[len(tokens) :]]
    vocabulary += [f"<spare{i}>" for i in range(config.vocab_size - len(vocabulary))]
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    writer.add_name("mistral" if family == "mistral" else "Some Training Run")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(1e4)
    if gemma:
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["h e", "t he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in numbers.items():
        for fields in writer.kv_data:
            fields.pop(name, None)
        adds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        adds[type(value)](name, value)
    writer.add_pad_token_id(2)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for text in ("long", "short") if by_length else ():
        writer.add_tensor(f"rope_factors_{text}.weight", np.ones(config.head_dim // 2, dtype=np.float32))
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for name, value in ({"dimension_count": config.head_dim} | dict(rope)).items():
        writer.add_key_value(f"{architecture}.rope.{name}", value, kinds[type(value)])
    for name, weight in model.named_parameters():
        for ours, theirs in (NAMES | ({"post_attention_layernorm": "post_attention_norm"} if gemma else {})).items():
            name = name.replace(ours, theirs)
        if weight.dim() == 1:
            writer.add_tensor(name, weight.detach().numpy() + int(gemma))
            continue
        chosen = gguf.GGMLQuantizationType[kind if "blk" in name else words]
        data = blocks_of(weight.detach().numpy(), chosen)
        weight.data = torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32))
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            data = np.ascontiguousarray(data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2)).reshape(data.shape)
        writer.add_tensor(name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks_of(weights: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantised weights; for types that gguf cannot quantise, random blocks of the same size with small scales."""
    import gguf

    with suppress(NotImplementedError):
        return gguf.quantize(weights, kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(weights.size)
    data = rng.integers(0, 256, (len(weights), weights.shape[1] // count, size), dtype=np.uint8)
    if kind.name == "MXFP4":
        data[..., 0] = 122
    for at in HALVES.get(kind.name, ()):
        data[..., at : at + 2] = np.array([2e-4], dtype=np.float16).view(np.uint8)
    return data.reshape(len(weights), -1)


def ids(rows: int = 20) -> torch.Tensor:
    return torch.arange(1, rows + 1)[None]
