"""Configurations of GGUF files whose architectures transformers does not read, or not in every version of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

# Field of a file behind its architecture's name -> field of the configuration.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TOKENS = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}


@dataclass(frozen=True)
class Header:
    """The fields of a file.

    Attributes:
        whole: gives the value of a whole name, or None.
        tensors: names of the tensors.
        tokens: size of the vocabulary.
    """

    architecture: str
    whole: Callable[[str], Any]
    tensors: Collection[str]
    tokens: int

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a name behind the architecture's."""
        found = self.whole(f"{self.architecture}.{name}")
        return default if found is None else found

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        return int(self("block_count")) - int(self("nextn_predict_layers", 0))

    @property
    def head_dim(self) -> int:
        size = self("attention.key_length")
        return int(self("embedding_length")) // int(self("attention.head_count")) if size is None else int(size)


Settings = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An architecture.

    Attributes:
        model_type: transformers' name of it.
        fields: more of the file's fields -> the configuration's.
        more: what follows from several fields.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Header], Settings] = lambda header: {}


def _delta(header: Header) -> Settings:
    """Layers of gated DeltaNet beside full attention with a gate."""
    heads = int(header("ssm.time_step_rank"))
    recurrent = header("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        every = int(header("full_attention_interval", 4))
        recurrent = [(layer + 1) % every != 0 for layer in range(header.layers)]
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent[: header.layers]]
    rope: Settings = {"partial_rotary_factor": int(header("rope.dimension_count")) / header.head_dim}
    if sections := header("rope.dimension_sections"):
        rope |= {"mrope_section": [int(each) for each in sections[:3]], "mrope_interleaved": True}
    return {
        "layer_types": kinds,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": int(header("ssm.inner_size")) // heads,
        "rope_parameters": rope,
    }


_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}


def _lfm2(header: Header) -> Settings:
    heads = [int(each) for each in header("attention.head_count_kv")]
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.tensors),
    }


_LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}

KINDS = {
    "qwen35": Kind("qwen3_5_text", _DELTA, _delta),
    "qwen35moe": Kind("qwen3_5_moe_text", _DELTA | _EXPERTS, _delta),
    "qwen3next": Kind("qwen3_next", _DELTA | _EXPERTS, _delta),
    "lfm2": Kind("lfm2", _LFM2, _lfm2),
}


def config_of(header: Header) -> Any:
    """The configuration, with plain rotary frequencies, of a file whose architecture is one of :data:`KINDS`."""
    kind = KINDS[header.architecture]
    found: Settings = {"num_hidden_layers": header.layers, "head_dim": header.head_dim}
    for names, value in (
        (_FIELDS | dict(kind.fields), header),
        (_TOKENS, lambda n: header.whole(f"tokenizer.ggml.{n}")),
    ):
        found |= {ours: x for theirs, ours in names.items() if (x := value(theirs)) is not None}
    found |= kind.more(header)
    found["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": float(header("rope.freq_base", 1e4)),
        **found.get("rope_parameters", {}),
    }
    found["vocab_size"] = int(header("vocab_size", header.tokens))
    found["tie_word_embeddings"] = "output.weight" not in header.tensors
    return AutoConfig.for_model(kind.model_type, **found)
