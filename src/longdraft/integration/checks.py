"""Checks a call of transformers' ``generate``, and refuses a call that longdraft would decode differently."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.generation import GenerationMode

from longdraft.errors import CapabilityError, PromptError
from longdraft.integration.generate_arguments import GenerateArguments, find_cache
from longdraft.model.compat import CACHE_NAMES
from longdraft.model.layout import KVLayout

_SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# {refused generation mode: the arguments of ``generate`` that select it}
_MODE_ARGUMENTS = {
    "contrastive_search": "penalty_alpha",
    "assisted_generation": "assistant_model, prompt_lookup_num_tokens, assistant_early_exit and use_mtp",
    "dola_generation": "dola_layers",
    "constrained_beam_search": "constraints and force_words_ids",
    "group_beam_search": "num_beams and num_beam_groups",
}
_TOKEN_TYPE_KEYWORDS = ("token_type_ids", "mm_token_type_ids")
# How names of inputs for images, sound or video start.
_MEDIA = re.compile("pixel|image|video|audio|input_features|mm_")
# Keywords of a forward that do not affect the tokens, or that are checked below.
_ACCEPTED_KEYWORDS = (
    *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep",
    "inputs_embeds", "output_attentions", "output_hidden_states",
)  # fmt: skip


def check_call(
    config: Any,
    model_kwargs: dict[str, Any],
    input_ids: torch.Tensor,
    generate_args: GenerateArguments,
    layout: KVLayout,
) -> None:
    """Refuses a call if longdraft's output would differ from the output of ``generate``.

    For the arguments see :func:`longdraft.integration.decoding.decode`. ``layout``: of the KV of the model's layers.

    Raises:
        CapabilityError: an argument is not supported; the message names it.
        PromptError: input_ids are not a batch of token ids.
    """
    _check_mode(config, generate_args)
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise CapabilityError(f"longdraft does not return {name}: leave it out.")
    _check_inputs(model_kwargs, generate_args)
    if input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise PromptError(
            f"generate was given {input_ids.dtype} input_ids of shape {tuple(input_ids.shape)}: give it whole numbers, "
            "at least one row, and at least one token in each."
        )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise CapabilityError(
            f"The attention_mask has the shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}: longdraft "
            "needs a mask with one number for each token of input_ids."
        )
    is_token = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    # Masked tokens between unmasked tokens would still count in sliding windows and recurrent states. A token is
    # enclosed if an unmasked token is at or before it, and another at or after it.
    is_enclosed = is_token.int().cummax(-1).values & is_token.int().flip(-1).cummax(-1).values.flip(-1)
    has_local_state = layout.windows or layout.recurrent
    if has_local_state and bool((is_enclosed.bool() & ~is_token).any()):
        raise CapabilityError(
            "The attention_mask masks tokens in the middle, which still count in sliding windows and recurrent layers, "
            "as this model has: take them out of input_ids, or leave custom_generate out."
        )
    _check_positions(model_kwargs.get("position_ids"), is_token)


def _check_mode(config: Any, generate_args: GenerateArguments) -> None:
    """Refuses beam search and other modes that are neither greedy nor sampling, lockstep, and a quantized cache."""
    mode = config.get_generation_mode(generate_args.assistant)
    if mode not in _SUPPORTED_MODES:
        name = str(mode.value)
        raise CapabilityError(
            f"longdraft decodes greedily or by sampling, not by {name.replace('_', ' ')}: leave "
            f"{_MODE_ARGUMENTS.get(name, 'num_beams')} out."
        )
    if generate_args.is_synced:
        raise CapabilityError("longdraft does not generate in lockstep with other processes: leave synced_gpus out.")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise CapabilityError("longdraft does not quantize its KV cache in this call: leave cache_implementation out.")


def _check_inputs(model_kwargs: dict[str, Any], generate_args: GenerateArguments) -> None:
    if model_kwargs.get("inputs_embeds") is not None:
        raise CapabilityError("longdraft reads token ids: pass input_ids instead of inputs_embeds.")
    cache = find_cache(model_kwargs)
    has_lengths = any(hasattr(layer, "get_seq_length") for layer in getattr(cache, "layers", ()))  # Mamba's do not
    if generate_args.has_user_cache or (cache is not None and has_lengths and cache.get_seq_length() > 0):
        raise CapabilityError(
            "longdraft has its own KV cache: leave cache (past_key_values) out. To read a prompt once for many calls, "
            "use Speculator.generate with cache=longdraft.PromptCache()."
        )
    if isinstance(model_kwargs.get("logits_to_keep"), torch.Tensor):
        raise CapabilityError("longdraft computes the logits it needs: leave logits_to_keep out.")
    other_kwargs = {k: v for k, v in model_kwargs.items() if v is not None and k not in _ACCEPTED_KEYWORDS}
    unsupported = sorted(k for k, v in other_kwargs.items() if not _says_text_only(k, v))
    if media := [name for name in unsupported if _MEDIA.match(name)]:
        raise CapabilityError(
            f"longdraft reads text alone, and was given {', '.join(media)}: leave custom_generate out for prompts "
            "with images, sound or video."
        )
    if unsupported:
        raise CapabilityError(f"longdraft does not pass {', '.join(unsupported)} to the model: leave it out.")


def _says_text_only(name: str, value: Any) -> bool:
    """Returns whether an input of a multimodal model says that the prompt is text only: no images, token types 0."""
    has_no_types = name in _TOKEN_TYPE_KEYWORDS and isinstance(value, torch.Tensor) and not value.any()
    return not value if name == "mm_encoder_outputs" else has_no_types


def _check_positions(positions: torch.Tensor | None, is_token: torch.Tensor) -> None:
    """Checks that positions count the unmasked tokens from 0. Positions of masked tokens do not matter."""
    if positions is None:
        return
    expected = is_token.long().cumsum(-1) - 1
    has_valid_shape = positions.dim() <= 2 and positions.shape[-1] == is_token.shape[-1]
    if not has_valid_shape or bool((positions.to(is_token.device).expand_as(expected) != expected)[is_token].any()):
        raise CapabilityError(
            "longdraft counts positions from the first unmasked token, but position_ids differ: leave position_ids out."
        )
