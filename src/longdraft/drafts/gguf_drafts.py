"""Reads drafts in GGUF files that llama.cpp's convert_hf_to_gguf.py wrote, as the folders that they were made from.

    eagle3          EAGLE-3 and 3.1, with the rows of q and k in llama.cpp's order
    dflash, dspark  DFlash, DFlash 2 and DSpark, usually without an embedding and a head
    gemma4-assistant, gemma4_assistant  Gemma 4's assistants; the second is the name in the first files

``target_layers`` (``extract_layers`` in the first files of EAGLE-3) names layers of the target whose inputs the draft
reads. Quantised matrices become floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from longdraft.errors import CheckpointError
from longdraft.model.gguf.architectures import ARCHITECTURES, DRAFT_ARCHITECTURES, build_config
from longdraft.model.gguf.header import ROPE_FREQS, GGUFHeader, GGUFTensor, read_architecture, require_package
from longdraft.model.gguf.rope import rope_scaling
from longdraft.model.gguf.tensor_mapping import read_tensor, unpermuted_rows
from longdraft.model.load.checkpoints import check_gguf, checkpoint_errors
from longdraft.native.quantized_matrix import HALF_DTYPES, QuantizedMatrix

_EAGLE3, _DFLASH, _ASSISTANTS = "eagle3", ("dflash", "dspark"), ("gemma4-assistant", "gemma4_assistant")
_REMEDY = (
    "Convert the draft again with today's convert_hf_to_gguf.py of llama.cpp (--target-model-dir TARGET), or name the "
    "draft's Hugging Face folder."
)
_ARCHITECTURE_NAMES = {_EAGLE3: "LlamaForCausalLMEagle3"} | dict.fromkeys(_DFLASH, "DFlashDraftModel")
_ARCHITECTURE_NAMES |= dict.fromkeys(_ASSISTANTS, "Gemma4AssistantForCausalLM")
# Field of the file, without the prefix ``<architecture>.`` -> entry of config.json.
_SIZES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_ASSISTANT_SIZES = ("attention.key_length", "attention.key_length_swa", "attention.sliding_window")
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads", "context_length": "max_position_embeddings",
    "hidden_activation": "hidden_act", "target_hidden_size": "target_hidden_size", "block_size": "block_size",
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "norm_output": "norm_output",
    "sample_from_anchor": "sample_from_anchor", "attention.causal": "is_causal",
    "attention.value_scale": "attention_value_scale", "markov_head_type": "markov_head_type",
}  # fmt: skip
_DFLASH2 = {name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
# Entries of dflash_config.
_NESTED = {"logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping"} | _DFLASH2
# Module in the file -> module in a folder; in layers without ``blk.N.``.
_MODULES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj",
    "markov.w1": "markov_head.markov_w1", "markov.w2": "markov_head.markov_w2",
    "confidence.proj": "confidence_head.proj",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
}  # fmt: skip
_LAYER_MODULES = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection",
}  # fmt: skip
_ASSISTANT_MODULES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    **{f"{name}.{x}_projection": f"{x}_projection" for name in ("nextn", "mtp") for x in ("pre", "post")},
    **dict.fromkeys(("masked_embd_centroids", "mtp.centroids"), "masked_embedding.centroids"),
    **dict.fromkeys(("masked_embd_ordering", "mtp.token_ordering"), "masked_embedding.token_ordering"),
}  # fmt: skip
_ASSISTANT_LAYER_MODULES = _LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "layer_output_scale": "layer_scalar",
}  # fmt: skip
# Ends of names that have no ``.weight`` in a folder.
_BARE_PARAMETERS = ("_codebook", "base_kernel", "layer_scalar", "token_ordering")
_MARKOV = ("markov_w1", "markov.w1")
_VOCABULARY_TABLES = ("token_embd", *_MARKOV, "selector_predecessor")  # with a row for each token of the target


def is_draft(path: Path) -> bool:
    """True if a GGUF file holds a draft of a kind that is read here; False for models, and if there is no such file.
    Raises CheckpointError if the file is damaged, or holds a draft of another kind."""
    if not path.is_file():
        return False
    check_gguf(path)
    with checkpoint_errors(path, f"{path} cannot be read as a GGUF file", "Fetch it again."):
        architecture = read_architecture(path)
    if architecture in DRAFT_ARCHITECTURES and architecture not in _ARCHITECTURE_NAMES:
        raise CheckpointError(f"{path} holds a draft of the architecture {architecture}, which is not read. {_REMEDY}")
    return architecture in _ARCHITECTURE_NAMES


@contextmanager
def _open(path: Path) -> Iterator[GGUFHeader]:
    """Opens a draft. Errors here and inside the context become CheckpointError."""
    require_package("gguf", path)
    with checkpoint_errors(path, f"{path} cannot be read as a draft", _REMEDY):
        yield GGUFHeader(path)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the settings of a draft (:func:`is_draft`), as the config.json of its authors' folder has them.

    Raises:
        CheckpointError: the file is damaged, or a field is missing or does not fit the tensors; the message names it.
        CapabilityError: RoPE is scaled in a way that is not read from GGUF files.
    """
    with _open(path) as header:
        prefix, is_assistant = f"{header.architecture}.", header.architecture in _ASSISTANTS
        for name in (*_SIZES, *(_ASSISTANT_SIZES if is_assistant else ())):
            _require_size(header, prefix + name)
        header.check()
        if is_assistant:
            return _assistant_config(header)
        config = _entries(header, _SIZES | _OPTIONAL)
        config |= {"architectures": [_ARCHITECTURE_NAMES[header.architecture]], "head_dim": header.head_dim}
        config |= {"rope_parameters": _rope_parameters(header), "vocab_size": _vocab_size(header)}
        config["draft_vocab_size"] = next((t.shape[0] for n, t in header.tensors.items() if n.startswith("d2t")), None)
        layers = _require(header, f"{prefix}target_layers", f"{prefix}extract_layers")
        if not isinstance(layers, list) or not layers or not all(type(i) is int and i > 0 for i in layers):
            raise CheckpointError(f"{path} has no list of layers from 1 in {prefix}target_layers. {_REMEDY}")
        config["aux_hidden_state_layer_ids"] = layers
        config |= _window_entries(header)
        if header.architecture == _EAGLE3:
            config["embed_requires_grad"] = True  # an embedding in the file is the draft's own
            config["fc_norm"] = any(name.startswith("fc_norm.") for name in header.tensors)
            size, key = _require(header, f"{prefix}target_hidden_size"), f"{prefix}target_hidden_size"
        else:
            config["dflash_config"] = config.get("dflash_config", {}) | _dflash_config(header)
            size, key = header("target_hidden_size", config["hidden_size"]), f"{prefix}embedding_length"
        features = header.tensors["fc.weight"].shape[0] if "fc.weight" in header.tensors else None
        if features not in (None, len(layers) * size):
            raise CheckpointError(
                f"{path} has {prefix}target_layers of {len(layers)} layers and {key} {size}, but fc.weight reads "
                f"{features} numbers. {_REMEDY}"
            )
        return config


def _require(header: GGUFHeader, *names: str) -> Any:
    """Returns the field with the first of the names that the file has. Raises CheckpointError if it has none."""
    for name in names:
        if (value := header.field(name)) is not None:
            return value
    raise CheckpointError(f"{header.path} lacks {names[0]}, which llama.cpp's drafts have. {_REMEDY}")


def _require_size(header: GGUFHeader, *names: str) -> Any:
    """Returns a field as :func:`_require`. Raises CheckpointError if it is no positive number, too."""
    if not isinstance(size := _require(header, *names), int | float) or size <= 0:
        raise CheckpointError(f"{header.path} has {names[0]} {size}, which is no size of a draft. {_REMEDY}")
    return size


def _entries(header: GGUFHeader, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns entries of config.json: ``names`` maps the file's fields to entries. Missing fields are left out."""
    entries = {entry: header(name) for name, entry in names.items() if header(name) is not None}
    # The file's float32 stands for the shortest decimal that rounds to it, which was in config.json.
    return {entry: float(str(np.float32(x))) if isinstance(x, float) else x for entry, x in entries.items()}


def _rope_parameters(header: GGUFHeader) -> dict[str, Any]:
    theta = _entries(header, {"rope.freq_base": "rope_theta"})
    sizes = SimpleNamespace(
        head_dim=header.head_dim, max_position_embeddings=header("context_length"),
        rope_parameters={"rope_theta": 1e4} | theta,
    )  # fmt: skip
    return rope_scaling(header, sizes) | theta


def _vocab_size(header: GGUFHeader) -> int:
    """Returns the size of the target's vocabulary: as the file says, or else the rows of a table, or the tokens."""
    tables = (header.tensors.get(f"{name}.weight") for name in _VOCABULARY_TABLES)
    rows = next((table.shape[-1] for table in tables if table is not None), header.vocab_size)
    return int(header("vocab_size") or rows or len(_require(header, "tokenizer.ggml.tokens")))


def _window_entries(header: GGUFHeader) -> dict[str, Any]:
    """Returns the entries of windows. If all layers have one, they stand in dflash_config, where they are not causal;
    in layer_types they are."""
    window = header("attention.sliding_window")
    pattern = header("attention.sliding_window_pattern", [True])
    if not window:
        return {}
    if header.architecture != _EAGLE3 and all(pattern):
        return {"dflash_config": {"use_swa": True, "swa_window_size": window}}
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": window, "layer_types": types}


def _dflash_config(header: GGUFHeader) -> dict[str, Any]:
    """Returns the entry dflash_config, without windows."""
    prefix, tensors = f"{header.architecture}.", header.tensors
    _require(header, f"{prefix}block_size")
    if "selector_hidden.weight" in tensors:
        for name in _DFLASH2:
            _require(header, prefix + name)
    config = _entries(header, _NESTED)
    config["mask_token_id"] = _require(header, "tokenizer.ggml.mask_token_id")
    config["attention_sink_bias"] = any(".attn_sinks." in name for name in tensors)
    scale = _entries(header, {"embedding_scale": "scale"}).get("scale")
    # The square root is Gemma's own factor, which the target's embedding has already.
    if scale is not None and abs(scale**2 / header("embedding_length") - 1) > 1e-3:
        config["input_embedding_scale"] = scale
    for name in _MARKOV:
        if (table := tensors.get(f"{name}.weight")) is not None:
            config["markov_rank"] = table.shape[0]
    return config


def _assistant_config(header: GGUFHeader) -> dict[str, Any]:
    """Returns the config.json of an assistant of Gemma 4, whose sizes have been checked."""
    prefix, num_layers = f"{header.architecture}.", int(header("block_count"))
    for name, least in (("attention.head_count_kv", 1), ("attention.sliding_window_pattern", 0)):
        value = _require(header, prefix + name)
        header.fields[prefix + name] = values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(isinstance(x, int) and x >= least for x in values):
            raise CheckpointError(f"{header.path} has {prefix}{name} {value} for {num_layers} layers. {_REMEDY}")
    header.fields.pop(f"{prefix}nextn_predict_layers", None)  # the number of all layers
    text = build_config(header, ARCHITECTURES["gemma4"]).to_dict() | _entries(header, _SIZES)
    text |= {"vocab_size": _vocab_size(header), "num_kv_shared_layers": num_layers}
    text |= {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
    target_size = _require_size(header, f"{prefix}embedding_length_out", f"{prefix}n_embd_backbone")
    config = {"model_type": "gemma4_assistant", "text_config": text, "backbone_hidden_size": target_size}
    # Today's converter leaves out the clusters of the head. The head then computes all logits, as in llama.cpp.
    names = {_folder_name(name, header.architecture): name for name in header.tensors}
    if (centroids := names.get("masked_embedding.centroids.weight")) is not None:
        config |= {"use_ordered_embeddings": True, "num_centroids": header.tensors[centroids].shape[-1]}
        config["centroid_intermediate_top_k"] = _require_size(header, f"{prefix}centroid_top_k")
    return config


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a draft (:func:`is_draft`) by the names of its authors' folder, on the CPU.
    Raises CheckpointError if the file is damaged."""
    with _open(path) as header:
        heads: dict[str, int] = {}  # of tensors whose rows are in llama.cpp's order
        if header.architecture == _EAGLE3:
            q_heads = int(_require(header, f"{_EAGLE3}.attention.head_count"))
            heads = {"attn_q": q_heads, "attn_k": int(header("attention.head_count_kv", q_heads))}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in header.tensors.items():
            if name == ROPE_FREQS:
                continue
            weight = _read_floats(tensor)
            part = name.split(".")[2] if name.startswith("blk.") else ""
            num_heads, num_rows = heads.get(part, 0), len(weight)
            if num_heads and num_rows == num_heads * header.head_dim:  # check_tensors refuses other sizes
                weight = weight[unpermuted_rows(num_rows, num_heads)]
            if name == "fc_norm.weight":  # a row for each layer of the target
                tensors |= {f"fc_norm.{i}.weight": row for i, row in enumerate(weight)}
            elif name.startswith("d2t"):
                tensors["d2t"] = _offsets(weight)
            else:
                tensors[_folder_name(name, header.architecture)] = weight
        return tensors


def _read_floats(tensor: GGUFTensor) -> torch.Tensor:
    """Returns a tensor in torch's shape: 16-bit floats and integers as they are, quantised ones in float32."""
    dtype = {"I64": torch.int64, "I32": torch.int32, **HALF_DTYPES}.get(tensor.quant_type)
    weight = read_tensor(tensor, requantize=False) if dtype is None else torch.from_numpy(tensor.data).view(dtype)
    weight = weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight
    return weight.reshape(tensor.shape[::-1])


def _offsets(ids: torch.Tensor) -> torch.Tensor:
    """Returns d2t as folders have it, target id - draft id. llama.cpp stores target ids, which differ from one another;
    earlier converters stored the offsets."""
    return ids - torch.arange(len(ids), device="cpu") if len(ids.unique()) == len(ids) else ids


def _folder_name(name: str, architecture: str) -> str:
    """Returns a tensor's name in the folder of the draft's authors; the same name if the tensor is unknown."""
    module, _, leaf = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    layer = re.match(r"blk\.(\d+)\.(.+)", module)
    if architecture in _ASSISTANTS and layer is not None:
        module = f"model.layers.{layer[1]}.{_ASSISTANT_LAYER_MODULES.get(layer[2], layer[2])}"
    elif architecture in _ASSISTANTS:
        module = _ASSISTANT_MODULES.get(module, module)
    elif layer is not None:
        part = "attn_norm_2" if layer[2] == "hidden_norm" else layer[2]  # the first files of EAGLE-3
        module = f"layers.{layer[1]}.{_LAYER_MODULES[part]}" if part in _LAYER_MODULES else module
    elif module == "enc.output_norm":
        module = "input_norm" if architecture == _EAGLE3 else "hidden_norm"
    else:
        module = _MODULES.get(module, module)
    return f"{module}.{leaf}" if leaf and not module.endswith(_BARE_PARAMETERS) else module
