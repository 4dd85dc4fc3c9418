"""GGUF files of drafts, as llama.cpp's convert_hf_to_gguf.py makes them from a folder of the draft's authors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.gguf_files import add_field, blocks_of

_SIZES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length", "rope_theta": "rope.freq_base",
}  # fmt: skip
_NAMES = {
    r"^(midlayer|layers\.0)\.hidden_norm": "blk.0.attn_norm_2", r"^midlayer\.": "layers.0.", r"^layers\.": "blk.",
    r"input_layernorm": "attn_norm", r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"self_attn\.([qkv])_proj": r"attn_\1", r"self_attn\.o_proj": "attn_output", r"mlp\.(\w+)_proj": r"ffn_\1",
    r"attention_conv\.": "attn_conv_", r"mlp_conv\.": "ffn_conv_", r"_base_kernel": "_base",
    r"_kernel_projection": "_proj", r"^norm\.": "output_norm.", r"^lm_head": "output", r"^embed_tokens": "token_embd",
    r"^hidden_norm|^input_norm": "enc.output_norm", r"^markov_head\.": "", r"^confidence_head\.proj": "conf_proj",
    r"^candidate_selector\.hidden_projection": "selector_hidden",
    r"^candidate_selector\.(\w+)_codebook": r"selector_\1.weight",
}  # fmt: skip


def convert(
    folder: Path, file: Path, layers: int = 0, arch: str = "", kind: str = "F32",
    fields: Mapping[str, Any] = MappingProxyType({}), names: Mapping[str, str] = MappingProxyType({}),
    drop: Sequence[str] = (), offsets: bool = False, pack: str = "",
) -> Path:  # fmt: skip
    """Writes the GGUF file of a draft folder in the layout of its authors, or of `speculators`.

    Args:
        layers: number of the target's layers.
        arch: the architecture; "": the one that the converter takes today.
        kind: type of matrices; F16 where a row is no whole number of blocks.
        fields: other values of fields, or further fields, without the architecture.
        names: patterns in the tensors' names -> other names, as earlier converters gave.
        drop: fields that are left out. offsets: d2t holds offsets, as in the first files.
        pack: begin of the names of tensors that the file has as the rows of one.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    config |= config.get("transformer_layer_config", {})
    nested = config.get("dflash_config", {})
    tensors = load_file(folder / "model.safetensors")
    is_eagle3 = "hidden_norm.weight" not in tensors
    arch = arch or ("eagle3" if is_eagle3 else "dflash")
    config.setdefault("rope_theta", 1e4)
    own = {theirs: config[name] for name, theirs in _SIZES.items()}
    own |= {"rope.dimension_count": config["head_dim"], "attention.value_length": config["head_dim"]}
    if is_eagle3:
        ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
        size = config.get("target_hidden_size") or config["hidden_size"]
        own |= {"vocab_size": config["vocab_size"], "target_layers": ids, "target_hidden_size": size}
        own |= {name: config.get(name, False) for name in ("norm_before_residual", "norm_before_fc")}
    else:
        settings = config | nested
        own |= {"block_size": settings["block_size"]}
        own["target_layers"] = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in settings["target_layer_ids"]]
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            own |= {name: settings[name]} if name in settings else {}
        scales = {"output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping"}
        scales |= {"input_embedding_scale": "embedding_scale"}
        own |= {theirs: settings[name] for name, theirs in scales.items() if name in settings}
        if config.get("use_sliding_window") or nested.get("use_swa"):
            own["attention.sliding_window"] = nested.get("swa_window_size") or config["sliding_window"]
            slides = [x == "sliding_attention" for x in config.get("layer_types", [])]
            count = config["num_hidden_layers"]
            own["attention.sliding_window_pattern"] = [True] * count if nested.get("use_swa") else slides
        if "is_causal" in config:
            own["attention.causal"] = config["is_causal"]
        if "markov_head.markov_w1.weight" in tensors:
            own["sample_from_anchor"] = config.get("sample_from_anchor", "aux_hidden_state_layer_ids" not in config)
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])]}
    if not is_eagle3:
        tokens["tokenizer.ggml.mask_token_id"] = settings["mask_token_id"]
    if pack:
        rows = [tensors.pop(name) for name in sorted(tensors) if name.startswith(f"{pack}.")]
        tensors[f"{pack}.weight"] = torch.stack(rows)
    with _writing(file, arch, own | dict(fields), tokens, drop) as writer:
        if config.get("rope_scaling", {}).get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
        for name, tensor in tensors.items():
            if name in ("t2d", "verifier_norm.weight"):
                continue
            if name == "d2t":
                ids = tensor if offsets else tensor + torch.arange(len(tensor))
                writer.add_tensor("d2t", ids.long().numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
                continue
            theirs = _renamed(name, _NAMES | dict(names))
            if is_eagle3 and re.search(r"[qk]_proj", name):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            _add_tensor(writer, theirs, tensor.float(), kind)
    return file


_ASSISTANT_NAMES = {
    r"^model\.": "", r"layers\.": "blk.", r"^(pre|post)_projection": r"nextn.\1_projection",
    r"embed_tokens": "token_embd", r"^norm\.": "output_norm.", r"layer_scalar": "layer_output_scale.weight",
    r"input_layernorm": "attn_norm", r"post_attention_layernorm": "post_attention_norm",
    r"pre_feedforward_layernorm": "ffn_norm", r"post_feedforward_layernorm": "post_ffw_norm",
    r"self_attn\.q_norm": "attn_q_norm", r"self_attn\.q_proj": "attn_q", r"self_attn\.o_proj": "attn_output",
    r"mlp\.(\w+)_proj": r"ffn_\1", r"masked_embedding\.centroids": "masked_embd_centroids",
    r"masked_embedding\.token_ordering": "masked_embd_ordering",
}  # fmt: skip
# Patterns in the names of today's converter -> those of the first files, whose architecture is gemma4_assistant.
FIRST_NAMES = {
    r"^nextn\.": "mtp.", r"^masked_embd_centroids": "mtp.centroids",
    r"^masked_embd_ordering": "mtp.token_ordering.weight",
}  # fmt: skip


def convert_assistant(
    folder: Path, file: Path, arch: str = "gemma4-assistant", kind: str = "F32", clusters: bool = False,
    fields: Mapping[str, Any] = MappingProxyType({}), names: Mapping[str, str] = MappingProxyType({}),
    drop: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Writes the GGUF file of an assistant of Gemma 4. For the other arguments see :func:`convert`.

    Args:
        clusters: True: the file has the clusters of the head, which today's converter leaves out.
        drop: fields and tensors that are left out.
    """

    config = json.loads((folder / "config.json").read_text())
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    layers, types = text["num_hidden_layers"], text["layer_types"]
    size = next(x["head_dim"] for x in text["per_layer_config"].values())
    kv = [text["per_layer_config"].get(str(i), text)["num_key_value_heads"] for i in range(layers)]
    own = {
        "block_count": layers, "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"], "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"], "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"], "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [x == "sliding_attention" for x in types],
        "attention.shared_kv_layers": layers, "embedding_length_per_layer_input": 0,
        "attention.key_length": size, "attention.value_length": size, "attention.key_length_swa": text["head_dim"],
        "attention.value_length_swa": text["head_dim"], "rope.dimension_count": size,
        "rope.dimension_count_swa": text["head_dim"], "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "embedding_length_out": config["backbone_hidden_size"], "nextn_predict_layers": layers,
    }  # fmt: skip
    if clusters:
        own |= {"use_ordered_embeddings": True, "n_centroids": config["num_centroids"]}
        own |= {"centroid_top_k": config["centroid_intermediate_top_k"]}
    tokens = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": [f"t{i}" for i in range(text["vocab_size"])]}
    with _writing(file, arch, own | dict(fields), tokens, drop) as writer:
        turning = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * turning + [1e30] * (size // 2 - turning)
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
        for name, tensor in load_file(folder / "model.safetensors").items():
            theirs = _renamed(name, _ASSISTANT_NAMES | dict(names))
            if theirs in drop or (name.startswith("masked_embedding.") and not clusters):
                continue
            if not tensor.is_floating_point():
                writer.add_tensor(theirs, tensor.int().numpy())
            else:
                _add_tensor(writer, theirs, tensor.float(), kind)
    return file


@contextmanager
def _writing(
    file: Path, arch: str, own: Mapping[str, Any], tokens: Mapping[str, Any], drop: Sequence[str]
) -> Iterator[Any]:
    """Yields a writer with the fields of an architecture and of its tokens, and writes the file at the end."""
    import gguf

    writer = gguf.GGUFWriter(file, arch)
    for name, value in ({f"{arch}.{name}": x for name, x in own.items()} | tokens).items():
        if name.removeprefix(f"{arch}.") not in drop:
            add_field(writer, name, value)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, other in patterns.items():
        name = re.sub(pattern, other, name)
    return name


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    import gguf

    found = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else kind]
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[found][0]:
        found = gguf.GGMLQuantizationType.F16
    data = blocks_of(np.ascontiguousarray(tensor.reshape(-1, tensor.shape[-1]).numpy()), found)
    writer.add_tensor(name, data.reshape(*tensor.shape[:-1], -1), raw_dtype=found)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """The divisors of RoPE's frequencies."""
    rope, size = config["rope_scaling"], config["head_dim"]
    found = []
    for i in range(0, size, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * config["rope_theta"] ** (i / size))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)
