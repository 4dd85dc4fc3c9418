"""GGUF files of tiny models of many architectures, laid out as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.gguf_files import blocks_of

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


def _sizes(c: Any) -> dict[str, Any]:
    """Fields of every decoder."""
    given = c.to_dict()
    heads, size, rope = given["num_key_value_heads"], given["head_dim"], given["rope_parameters"]
    return {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": heads, "attention.key_length": size,
        "attention.value_length": size, "rope.freq_base": float(rope.get("rope_theta", 1e4)),
        "vocab_size": c.vocab_size, "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1)),
        "attention.layer_norm_rms_epsilon": getattr(c, "rms_norm_eps", None) or getattr(c, "norm_eps", 1e-5),
        "feed_forward_length": getattr(c, "intermediate_size", None) or c.hidden_size,
    }  # fmt: skip


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
_ONE_MORE = ("qwen35", "qwen35moe", "qwen3next")
_PAIRED = ("llama", "smollm3", "granite")
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
    import gguf

    model, architecture = tiny(case, hidden, **over), ARCHITECTURES[case][0]
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Tiny")
    for name, value in (_sizes(config) | ARCHITECTURES[case][3](config) | dict(fields)).items():
        _add(writer, f"{architecture}.{name}", value)
    _add_tokenizer(writer, split)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        places = torch.arange(weight.numel()).view(weight.shape)
        for theirs, at in _arranged(architecture, name, places, config, known.get_name):
            flat = weight.data.view(-1)
            values = flat[at]
            if at.dim() == 1 or "conv" in theirs or "ffn_gate_inp" in theirs or theirs.endswith("bias"):
                values = values + 1 if architecture in _ONE_MORE and _is_norm(theirs) else values
                writer.add_tensor(
                    theirs, np.ascontiguousarray((-values.exp() if "ssm_a" in theirs else values).numpy())
                )
                continue
            usual = words if theirs.startswith(("token_embd.", "output.")) else kind
            chosen = gguf.GGMLQuantizationType[kinds(theirs) if kinds else usual]
            if at.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
                chosen = gguf.GGMLQuantizationType.Q8_0  # as llama.cpp does it
            data = blocks_of(np.ascontiguousarray(values.flatten(0, -2).numpy()), chosen)
            flat[at.flatten()] = torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32)).flatten()
            writer.add_tensor(theirs, data.reshape(*at.shape[:-1], -1), raw_dtype=chosen)
    for name, buffer in model.named_buffers():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(("correction_bias", "expert_bias")):
            writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", buffer.numpy())
        if name.endswith("layer_scalar"):
            writer.add_tensor(f"blk.{layer}.layer_output_scale.weight", buffer.numpy())
    for theirs, tensor in beside.items():
        if tensor.dim() == 1:
            writer.add_tensor(theirs, tensor.numpy())
            continue
        chosen = gguf.GGMLQuantizationType[kind]
        data = blocks_of(np.ascontiguousarray(tensor.numpy()), chosen)
        tensor.copy_(torch.from_numpy(gguf.dequantize(data, chosen).astype(np.float32)).view(tensor.shape))
        writer.add_tensor(theirs, data.reshape(len(tensor), -1), raw_dtype=chosen)
    if architecture == "gemma4":
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") and "ssm_norm" not in name


def _arranged(
    architecture: str, name: str, x: torch.Tensor, c: Any, known: Callable[[str], str | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of a parameter's tensors in the file, with the indices of their numbers in the flat parameter."""
    path, _, leaf = name.rpartition(".")
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if leaf == "sinks":
        yield f"{layer}.attn_sinks.weight", x
        return
    if ".router." in name and leaf.endswith("scale"):
        yield f"{layer}.{'ffn_gate_inp' if leaf == 'scale' else 'ffn_down_exps'}.scale", x
        return
    if architecture in _PAIRED and path.endswith(("q_proj", "k_proj")):
        heads = c.num_attention_heads if path.endswith("q_proj") else c.num_key_value_heads
        x = x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
    if path.endswith(".experts"):
        own, _, bias = leaf.partition("_proj")
        gpt_oss = architecture == "gpt-oss"  # whose matrices lie by input, gates and others in turns
        x = x.transpose(1, 2) if gpt_oss and not bias else x
        halves = (x[:, ::2], x[:, 1::2]) if gpt_oss else x.chunk(2, dim=1)
        for part, each in {"down": x}.items() if own == "down" else zip(("gate", "up"), halves, strict=True):
            yield f"{layer}.ffn_{part}_exps.{'bias' if bias else 'weight'}", each
        return
    if "linear_attn." in name:
        keys, values = c.linear_num_key_heads, c.linear_num_value_heads
        size, each = c.linear_key_head_dim, c.linear_value_head_dim
        if "in_proj_qkvz" in name:
            group = values // keys * each
            parts = x.view(keys, -1, x.shape[-1]).split([size, size, group, group], dim=1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            yield f"{layer}.attn_qkv.weight", torch.cat([q, k, v])
            yield f"{layer}.attn_gate.weight", z
            return
        if architecture.startswith("qwen35"):
            x = _tiled(name, x, keys, values, size, each)
        if leaf == "A_log":
            yield f"{layer}.ssm_a", x
            return
        if leaf == "dt_bias":
            yield f"{layer}.ssm_dt.bias", x
            return
    if "conv" in path and x.dim() == 3:
        x = x.squeeze(1)
    theirs = "output" if path == "lm_head" else known(path)
    assert theirs is not None, name
    yield f"{theirs}.{leaf}", x[0] if "ffn_gate_inp_shexp" in theirs else x


def _tiled(name: str, x: torch.Tensor, keys: int, values: int, size: int, each: int) -> torch.Tensor:
    """Reorders value heads from grouped by key head to tiled (all key heads, then again)."""

    def tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.view(keys, values // keys, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        own = 2 * keys * size
        return torch.cat([x[:own], tiled(x[own:], each)])
    if "in_proj_z" in name:
        return tiled(x, each)
    if "out_proj" in name:
        return tiled(x.T.contiguous(), each).T.contiguous()
    return x if name.endswith("norm.weight") else tiled(x, 1)


def _add(writer: Any, name: str, value: Any) -> None:
    import gguf

    kinds = {
        bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }  # fmt: skip
    if isinstance(value, list):
        kind = gguf.GGUFValueType.INT32 if type(value[0]) is int else kinds[type(value[0])]
        writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
    else:
        writer.add_key_value(name, value, kinds[type(value)])


def _add_tokenizer(writer: Any, split: str) -> None:
    if split == "gemma4":
        letters = [*"abcdefghijklmnopqrstuvwxyz", "he", "the", "▁"]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["<pad>", "<bos>", "<eos>", "<unk>", *letters, *(f"<unused{i}>" for i in range(31))])
        writer.add_token_scores([-1000.0] * VOCABULARY)
        writer.add_token_types([3, 3, 3, 3] + [1] * (VOCABULARY - 4))
        writer.add_token_merges(["h e", "t he"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)
        return
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", *"abcdefghijklmnopqrstuvwxyz", "he", "the"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([*words, *(f"<spare{i}>" for i in range(VOCABULARY - len(words)))])
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["h e", "t he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
