"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Architectures whose files have 1 + the weight of a norm; and whose heads have their rotated halves in pairs.
_ONE_MORE = ("qwen35", "qwen35moe", "qwen3next", "gemma2", "gemma3")
_PAIRED = ("llama", "smollm3", "granite")

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
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
}


def write_gguf(
    file: Path, family: Family = "llama", kind: str | Callable[[str], str] = "Q8_0", *, words: str = "F16",
    tie: bool = True, rope_freqs: Sequence[float] = (), rope: Mapping[str, Any] = MappingProxyType({}),
    tokens: Sequence[str] = (), by_length: bool = False, pre: str = "smollm",
    numbers: Mapping[str, Any] = MappingProxyType({}), split: int = 0,
    beside: Mapping[str, Sequence[float]] = MappingProxyType({}), **over: Any,
) -> PreTrainedModel:  # fmt: skip
    """Writes a full model of some 100 kB, with a byte tokenizer that has two merges.

    Args:
        kind: type of the layers' matrices, or name of a tensor -> its type.
        words: type of the embedding and the head.
        rope_freqs: divisors of RoPE's frequencies. rope: further ``rope.`` fields.
        by_length: with LongRoPE's factors for short and long contexts.
        tokens: the first tokens of the tokenizer, in place of the usual ones.
        pre: the pre-tokenizer. numbers: further fields, or other values, by their full names.
        split: tensors of each split file; 0: one file.
        beside: further tensors in float32.
        over: arguments of :func:`tests.support.tiny.tiny_model`.

    Returns:
        The model with the dequantised weights.
    """
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab": 64, "tie": tie} | over
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    model = tiny_model(family, rms_norm_eps=1e-5, **sizes)
    config, architecture = model.config, "llama" if family == "mistral" else family
    own = {f"rope.{name}": value for name, value in rope.items()}
    if family.startswith("gemma"):
        own["attention.sliding_window"] = config.sliding_window
    tensors = dict(beside) | ({"rope_freqs.weight": rope_freqs} if rope_freqs else {})
    if by_length:
        tensors |= {f"rope_factors_{text}.weight": [1.0] * (config.head_dim // 2) for text in ("long", "short")}
    fields = {"general.name": "mistral" if family == "mistral" else "Some Training Run"}
    fields |= {f"{architecture}.{name}": value for name, value in (decoder_fields(config) | own).items()}
    fields |= tokenizer_fields(pre, config.vocab_size, tokens) | dict(numbers)
    write_file(file, model, architecture, fields, kind, words, tensors, split=split)
    return model


def write_file(
    file: Path, model: PreTrainedModel, architecture: str, fields: Mapping[str, Any], kind: str | Callable[[str], str],
    words: str, tensors: Mapping[str, Sequence[float]] = MappingProxyType({}),
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}), split: int = 0,
) -> None:  # fmt: skip
    """Writes a model by the names and layouts of its architecture, and gives the model the dequantised weights.

    Args:
        kind, words, split: as of :func:`write_gguf`.
        tensors: further tensors in float32.
        beside: further tensors; matrices are written as ``kind`` and replaced by their dequantised values.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for name, value in fields.items():
        add_field(writer, name, value)
    for name, numbers in tensors.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def add_matrix(name: str, values: torch.Tensor) -> torch.Tensor:
        """Returns the dequantised values."""
        chosen = kind(name) if callable(kind) else words if name.startswith(("token_embd.", "output.")) else kind
        found = gguf.GGMLQuantizationType[chosen]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[found][0]:
            found = gguf.GGMLQuantizationType.Q8_0  # as llama.cpp does it
        data = blocks_of(np.ascontiguousarray(values.flatten(0, -2).numpy()), found)
        writer.add_tensor(name, data.reshape(*values.shape[:-1], -1), raw_dtype=found)
        return torch.from_numpy(gguf.dequantize(data, found).astype(np.float32)).view(values.shape)

    for name, weight in model.named_parameters():
        places = torch.arange(weight.numel()).view(weight.shape)
        for theirs, at in _arranged(architecture, name, places, config, known.get_name):
            flat = weight.data.view(-1)
            values = flat[at]
            if at.dim() == 1 or "conv" in theirs or "ffn_gate_inp" in theirs or theirs.endswith("bias"):
                values = values + 1 if architecture in _ONE_MORE and _is_norm(theirs) else values
                values = -values.exp() if "ssm_a" in theirs else values
                writer.add_tensor(theirs, np.ascontiguousarray(values.numpy()))
            else:
                flat[at.flatten()] = add_matrix(theirs, values).flatten()
    for name, buffer in model.named_buffers():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(("correction_bias", "expert_bias")):
            writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", buffer.numpy())
        if name.endswith("layer_scalar"):
            writer.add_tensor(f"blk.{layer}.layer_output_scale.weight", buffer.numpy())
    for name, tensor in beside.items():
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            tensor.copy_(add_matrix(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def decoder_fields(c: Any) -> dict[str, Any]:
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


def add_field(writer: Any, name: str, value: Any) -> None:
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


def tokenizer_fields(pre: str, vocabulary: int, first: Sequence[str] = ()) -> dict[str, Any]:
    """A tokenizer of letters with two merges.

    Args:
        pre: the pre-tokenizer; "gemma4": Gemma's kind of tokenizer.
        first: the first tokens, in place of the usual ones.
    """
    letters = [*"abcdefghijklmnopqrstuvwxyz", "he", "the"]
    if pre == "gemma4":
        known, own = ["<pad>", "<bos>", "<eos>", "<unk>", *letters, "▁"], {"model": "gemma4", "padding_token_id": 0}
        own |= {"scores": [-1000.0] * vocabulary, "unknown_token_id": 3, "add_space_prefix": False}
    else:
        known = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *letters, "Ċ"]
        own = {"model": "gpt2", "pre": pre, "padding_token_id": 2}
    known = [*first, *known[len(first) :]]
    known += [f"<spare{i}>" for i in range(vocabulary - len(known))]
    special = 4 if pre == "gemma4" else 3
    own |= {"tokens": known, "token_type": [3] * special + [1] * (len(known) - special), "merges": ["h e", "t he"]}
    return {f"tokenizer.ggml.{name}": x for name, x in (own | {"bos_token_id": 1, "eos_token_id": 2}).items()}


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
    if kind.name == "NVFP4":
        data[..., :4] = (8, 9, 10, 11)
    if kind.name == "IQ1_M":  # the scale is in the high halves of four bytes
        data[..., 49::2] = data[..., 49::2] & 15 | np.array([0x90, 0x10, 0x80, 0x10], np.uint8)
    for at in HALVES.get(kind.name, ()):
        data[..., at : at + 2] = np.array([2e-3 if kind.name == "IQ1_S" else 2e-4], dtype=np.float16).view(np.uint8)
    return data.reshape(len(weights), -1)


def ids(rows: int = 20) -> torch.Tensor:
    return torch.arange(1, rows + 1)[None]
