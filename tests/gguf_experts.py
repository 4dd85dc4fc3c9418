"""GGUF files of tiny mixtures of experts, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.gguf_files import blocks_of
from tests.zoo.tiny_models import tiny_config

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.router": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "mlp.": "",
}


def write_moe_gguf(file: Path, model_type: str, kind: str = "Q8_0", hidden: int = 64, said: int = 0) -> PreTrainedModel:
    """Writes a mixture of experts, with a byte tokenizer. Returns the model of the weights that the file stands for.

    Args:
        said: the experts' inner size as the file says it; 0 for the right one.
        kind: of the experts' matrices. Those of attention are Q8_0, the router and the rest float32.
    """
    import gguf

    config = tiny_config(model_type)
    config.num_hidden_layers, config.hidden_size, config.vocab_size = 2, hidden, 64
    inner = 2 * hidden if model_type == "gpt_oss" else hidden
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, inner)
    config.head_dim, config.max_position_embeddings, config.eos_token_id = 16, 256, 2
    config.layer_types = ["sliding_attention", "full_attention"] if model_type == "gpt_oss" else ["full_attention"] * 2
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config.norm_topk_prob = model_type == "qwen3_moe"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            weight.data.normal_(float(name.endswith("norm.weight")), 0.3 if weight.dim() > 1 else 0.1)
    model.eval().requires_grad_(False)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    writer = gguf.GGUFWriter(file, ARCHITECTURES[model_type])
    for add, value in (
        *((writer.add_name, "Tiny"), (writer.add_block_count, 2), (writer.add_context_length, 256)),
        *((writer.add_embedding_length, hidden), (writer.add_feed_forward_length, inner)),
        *((writer.add_head_count, config.num_attention_heads), (writer.add_head_count_kv, config.num_key_value_heads)),
        *((writer.add_key_length, 16), (writer.add_value_length, 16), (writer.add_rope_freq_base, 1e4)),
        *((writer.add_layer_norm_rms_eps, config.rms_norm_eps), (writer.add_vocab_size, 64)),
        *((writer.add_expert_count, experts), (writer.add_expert_used_count, config.num_experts_per_tok)),
        *((writer.add_expert_feed_forward_length, said or inner), (writer.add_rope_dimension_count, 16)),
    ):
        add(value)
    if model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(inner)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *"abcdefghijklmnopqrstuvwxyz", "he", "the"]
    writer.add_token_list([*words, *(f"<spare{i}>" for i in range(64 - len(words)))])
    writer.add_token_types([3, 3, 3] + [1] * 61)
    writer.add_token_merges(["h e", "t he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, weight in model.named_parameters():
        if ".experts." in name:
            continue
        short = name
        for ours, theirs in _NAMES.items():
            short = short.replace(ours, theirs)
        after = "post_attention_norm" if model_type == "gpt_oss" else "ffn_norm"
        short = short.replace("post_attention_layernorm", after)
        plain = weight.dim() == 1 or "ffn_gate_inp" in short
        _write(writer, short, weight.data, "F32" if plain else "Q8_0")
    for number, layer in enumerate(model.model.layers):
        _write_experts(writer, f"blk.{number}.ffn", layer.mlp.experts, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_experts(writer, name: str, experts, kind: str) -> None:
    turned, interleaved = experts.is_transposed, not experts.is_concatenated
    first, down = experts.gate_up_proj.data, experts.down_proj.data
    if turned:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    gate, up = (first[:, ::2], first[:, 1::2]) if interleaved else first.chunk(2, dim=1)
    for part, weight in (("gate", gate), ("up", up), ("down", down)):
        _write(writer, f"{name}_{part}_exps.weight", weight, kind)
    if hasattr(experts, "gate_up_proj_bias"):
        bias = experts.gate_up_proj_bias.data
        for part, each in (("gate", bias[:, ::2]), ("up", bias[:, 1::2]), ("down", experts.down_proj_bias.data)):
            writer.add_tensor(f"{name}_{part}_exps.bias", np.ascontiguousarray(each.numpy()))


def _write(writer, name: str, weight: torch.Tensor, kind: str) -> None:
    """Writes a tensor, and gives the model the weights that the file stands for."""
    import gguf

    if ".ffn_gate_inp_shexp." in name:
        weight = weight[0]
    if kind == "F32":
        writer.add_tensor(name, weight.numpy())
        return
    chosen = gguf.GGMLQuantizationType[kind]
    flat = np.ascontiguousarray(weight.reshape(-1, weight.shape[-1]).numpy())
    data = blocks_of(flat, chosen)
    weight.copy_(torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32)).view(weight.shape))
    writer.add_tensor(name, data.reshape(*weight.shape[:-1], -1), raw_dtype=chosen)
