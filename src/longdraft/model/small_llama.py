"""Small Llamas, of a few layers, that draft for a target with the target's own embedding and head.

Embedding and head are the target's modules, by reference, and are never saved.
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
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import full_tensor

# q (Hq, T, d), k and v (Hkv, T, d) after RoPE -> (Hq, T, d)
PackedAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# A draft has no special tokens.
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def packed_attention(attend: PackedAttend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention over one packed text, for ``longdraft_attend``; the function's scale is that of the widest head."""

    def given(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks")):
            raise UnsupportedModelError(f"{type(module).__name__} attends otherwise than drafts' layers are computed.")
        narrow, size = value.shape[-1], max(key.shape[-1], value.shape[-1])
        factor = (query.shape[-1] ** -0.5 if scaling is None else scaling) * size**0.5
        query = query if math.isclose(factor, 1.0) else query * factor
        # Autocast rounds the value alone: RoPE's tables are float32.
        rows = (x[0].to(value.dtype) for x in (query, key, value))
        q, k, v = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in rows)
        return attend(q, k, v)[..., :narrow].transpose(0, 1)[None].contiguous(), None

    return given


def small_llama_config(
    runner: TargetRunner, layers: int, intermediate_size: int | None, rope_theta: float, length: int
) -> dict[str, Any]:
    """The configuration of a small Llama for a target, with the keys of transformers' ``config.json``.

    Args:
        layers: number of decoder layers.
        intermediate_size: size of the MLP; None takes the target's.
        rope_theta: base of the rotary embedding.
        length: tokens of the longest training text.
    """
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
    """The layers and the final norm of a Llama, in float32 on the CPU, without an embedding.

    :func:`hidden_states` runs it.

    Raises:
        CheckpointError: it is no Llama. Sizes that are none raise any error.
    """
    model = _built(LlamaModel, config)
    model.embed_tokens = None
    model.config._attn_implementation = hosting.ATTENTION_NAME
    return model


def hidden_states(decoder: nn.Module, x: torch.Tensor, positions: torch.Tensor, attend: PackedAttend) -> torch.Tensor:
    """The decoder's hidden states (T, hidden) after the final norm, for packed texts.

    Args:
        x: (T, hidden) embeddings.
        positions: (T,).
        attend: the attention, which decides which rows attend to which.
    """
    out = decoder(
        inputs_embeds=x[None], position_ids=positions[None], use_cache=False, longdraft_attend=packed_attention(attend)
    )
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def initialize(decoder: PreTrainedModel, seed: int, head: torch.Tensor) -> None:
    """Initialises the weights at random. The final norm makes logits of unit size with the target's head; with unit
    weights a new draft would be as confident as the target and always wrong."""
    config = decoder.config
    std = config.hidden_size**-0.5
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            weight.normal_(0.0, std, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what is added to the residual stream
                weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        decoder.norm.weight.copy_(1 / head.float().norm(dim=-1).median().clamp_min(1e-6).double())


def copy_target_layers(decoder: PreTrainedModel, runner: TargetRunner, layers: tuple[int, ...]) -> None:
    """Initialises the decoder's layers with these layers of the target, and its final norm with the target's.

    Raises:
        ConfigError: the number of layers differs from the decoder's, the target does not have them, or they have
            other sizes or parts.
    """
    theirs = hosting.decoder_layers(runner.model)
    if len(layers) != len(decoder.layers):
        raise ConfigError(f"start_from names {len(layers)} layers for a draft of {len(decoder.layers)}: name as many.")
    if not all(0 <= i < len(theirs) for i in layers):
        raise ConfigError(f"start_from {list(layers)}: the target has layers 0 to {len(theirs) - 1}.")
    pairs = [(mine, theirs[i]) for mine, i in zip(decoder.layers, layers, strict=True)]
    pairs.append((decoder.norm, getattr(hosting.decoder_of(runner.model), "norm", None) or nn.Module()))
    try:
        for mine, its in pairs:
            mine.load_state_dict({name: full_tensor(t).float().cpu() for name, t in its.state_dict().items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"start_from: the target's layers have other parts or sizes than the draft's ({reason[:300]}). Leave "
            "start_from out, or intermediate_size."
        ) from error


def build_causal_lm(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], embedding: nn.Module, head: torch.Tensor
) -> PreTrainedModel:
    """A small Llama with a target's embedding and head, by reference, ready to be hosted.

    Args:
        weights: state of :func:`build_decoder`, in the dtype and on the device to run with.
        head: (draft vocabulary, hidden).

    Raises:
        CheckpointError: it is no Llama.
    """
    model = _built(LlamaForCausalLM, config)
    model.model.embed_tokens = None
    model.model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval()  # before it gets the target's modules
    model.model.embed_tokens = embedding
    # The rotary embedding's frequencies stay float32; only the device changes.
    model.model.rotary_emb.to(head.device)
    model.lm_head = frozen_linear(head)
    model.config.vocab_size = head.shape[0]
    return model


def frozen_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A frozen layer with these very tensors: weight (out, in) and bias (out,)."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _built(kind: type[PreTrainedModel], config: Mapping[str, Any]) -> Any:
    """A model of random weights with a vocabulary of one; the caller replaces embedding and head."""
    if config.get("model_type") != "llama":
        raise CheckpointError(f"A small language model of model_type {config.get('model_type')!r} is not llama.")
    return kind(LlamaConfig(**{**config, "vocab_size": 1, **_NO_TOKENS}))
