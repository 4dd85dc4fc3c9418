"""Small draft models: Llamas of a few layers that share the target's embedding and head. Files omit the shared parts.

Shapes: T tokens of packed sequences (one behind the other), Hq query heads, Hkv KV heads, head size d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from longdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from longdraft.model import hosting
from longdraft.model.model_parts import decoder_layers, decoder_of
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import full_tensor

# Attention of packed sequences: q (Hq, T, d), k and v (Hkv, T, d) after RoPE -> (Hq, T, d).
PackedAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# LlamaConfig's default ids would lie outside of the vocabulary of one token that _new_llama makes.
_NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def packed_attention(attend: PackedAttend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Wraps ``attend`` as an attention function of transformers, which a caller passes as ``longdraft_attend``.

    Queries, keys and values are padded to d, the larger of key and value size. ``attend`` scales scores by d**-0.5, so
    queries are multiplied by the layer's scale over d**-0.5."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks")):
            raise UnsupportedModelError(f"{type(module).__name__} has sinks or a softcap, which drafts do not support.")
        value_dim, head_dim = value.shape[-1], max(key.shape[-1], value.shape[-1])
        factor = (query.shape[-1] ** -0.5 if scaling is None else scaling) * head_dim**0.5
        query = query if math.isclose(factor, 1.0) else query * factor
        # Under autocast RoPE leaves q and k in float32, but v is in 16 bits.
        tensors = (x[0].to(value.dtype) for x in (query, key, value))
        q, k, v = (x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1])) for x in tensors)
        return attend(q, k, v)[..., :value_dim].transpose(0, 1)[None].contiguous(), None

    return attention


def small_llama_config(
    runner: TargetRunner, layers: int, intermediate_size: int | None, rope_theta: float, length: int
) -> dict[str, Any]:
    """Makes the configuration of a small Llama for a target, as in transformers' ``config.json``.

    Args:
        runner: the target.
        layers: number of decoder layers.
        intermediate_size: size of the MLP; None takes the target's.
        rope_theta: base of the rotary embedding.
        length: number of tokens in the longest training sequence."""
    parts, kv = runner.shared_parts, runner.kv_shape
    return {
        "model_type": "llama",
        "vocab_size": runner.vocab_size,
        "hidden_size": parts.hidden_size,
        "intermediate_size": intermediate_size or parts.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": parts.num_heads,
        "num_key_value_heads": kv.kv_heads,
        "head_dim": kv.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": parts.rms_norm_eps,
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope_theta)},
        "tie_word_embeddings": False,
    }


def build_decoder(config: Mapping[str, Any]) -> PreTrainedModel:
    """Makes the layers and the final norm of a Llama, in float32 on the CPU, for :func:`hidden_states`.
    Raises CheckpointError if ``model_type`` is not llama, and transformers' errors for invalid sizes."""
    model = _new_llama(LlamaModel, config)
    model.embed_tokens = None
    model.config._attn_implementation = hosting.ATTENTION_NAME
    return model


def hidden_states(decoder: nn.Module, x: torch.Tensor, positions: torch.Tensor, attend: PackedAttend) -> torch.Tensor:
    """Returns the decoder's hidden states (T, hidden) after the final norm.

    Args:
        decoder: made by :func:`build_decoder`.
        x: embeddings (T, hidden).
        positions: (T,).
        attend: computes attention, with the mask between the packed sequences."""
    attention = packed_attention(attend)
    out = decoder(inputs_embeds=x[None], position_ids=positions[None], use_cache=False, longdraft_attend=attention)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def initialize(decoder: PreTrainedModel, seed: int, head: torch.Tensor) -> None:
    """Initialises the weights at random.
    The final norm's weight is chosen so that logits of the target's ``head`` (vocabulary, hidden) are about 1 in size.
    With a norm weight of ones a new draft would be as confident as the target, but wrong."""
    config = decoder.config
    std = config.hidden_size**-0.5
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            weight.normal_(0.0, std, generator=generator)
            # As in GPT-2, outputs that the residual stream sums are the smaller, the more outputs there are.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        decoder.norm.weight.copy_(1 / head.float().norm(dim=-1).median().clamp_min(1e-6).double())


def copy_target_layers(decoder: PreTrainedModel, runner: TargetRunner, layers: tuple[int, ...]) -> None:
    """Initialises the decoder from these layers of the target, and from the target's final norm.
    Raises ConfigError if the decoder has another number of layers, the target lacks one, or sizes or parts differ."""
    target_layers = decoder_layers(runner.model)
    if len(layers) != len(decoder.layers):
        raise ConfigError(f"start_from names {len(layers)} layers for a draft of {len(decoder.layers)}: name as many.")
    if not all(0 <= i < len(target_layers) for i in layers):
        raise ConfigError(f"start_from {list(layers)}: the target has layers 0 to {len(target_layers) - 1}.")
    pairs = [(module, target_layers[i]) for module, i in zip(decoder.layers, layers, strict=True)]
    # Without a norm, nn.Module() lets load_state_dict raise.
    pairs.append((decoder.norm, getattr(decoder_of(runner.model), "norm", None) or nn.Module()))
    try:
        for module, target_module in pairs:
            state = target_module.state_dict()
            module.load_state_dict({name: full_tensor(t).float().cpu() for name, t in state.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"start_from: the target's layers have other parts or sizes than the draft's ({reason[:300]}). Leave out "
            "start_from or intermediate_size."
        ) from error


def build_causal_lm(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], embedding: nn.Module, head: torch.Tensor
) -> PreTrainedModel:
    """Makes a small Llama with a target's embedding and head, which can be hosted.

    Args:
        config: the configuration (:func:`small_llama_config`).
        weights: state dict of a decoder (:func:`build_decoder`), in the dtype and on the device in which it shall run.
        embedding: the target's token embedding.
        head: weight (draft vocabulary, hidden) of the LM head.

    Raises CheckpointError if ``model_type`` is not llama."""
    model = _new_llama(LlamaForCausalLM, config)
    model.model.embed_tokens = None
    model.model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval()  # before the target's modules are added, which must not change
    model.model.embed_tokens = embedding
    # Only the device of the rotary embedding changes: its frequencies stay float32.
    model.model.rotary_emb.to(head.device)
    model.lm_head = frozen_linear(head)
    model.config.vocab_size = head.shape[0]
    return model


def frozen_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Makes a frozen linear layer that shares the tensors weight (out, in) and bias (out,)."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _new_llama(model_class: type[PreTrainedModel], config: Mapping[str, Any]) -> Any:
    """Makes a model with random weights and a vocabulary of one token. The caller replaces embedding and head."""
    if config.get("model_type") != "llama":
        raise CheckpointError(f"The draft's model_type is {config.get('model_type')!r}: only llama is supported.")
    return model_class(LlamaConfig(**{**config, "vocab_size": 1, **_NO_SPECIAL_TOKENS}))
