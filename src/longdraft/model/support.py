"""Refuses models, lengths and token ids that longdraft cannot decode exactly, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch.nn.modules import module as modules
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longdraft.errors import CapabilityError, ContextError, PromptError, UnsupportedModelError
from longdraft.model import adapters, quantised
from longdraft.model.fingerprints import is_known
from longdraft.model.hosting import context_length, decoder_config, decoder_layers
from longdraft.model.kinds import sparse_kinds
from longdraft.model.long_rope import rope_kind, rope_parameters
from longdraft.model.stored import weight_shape

_LOAD = "Load it: model, tokenizer = longdraft.load(...), or model = AutoModelForCausalLM.from_pretrained(...)."


def check_model(model: object) -> None:
    """Raises UnsupportedModelError for anything but a model of transformers: a name, a path, a pipeline."""
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise UnsupportedModelError(f"A target is a model of transformers, not {type(model).__name__}. {_LOAD}")


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError, with the reason, for a model that cannot be hosted exactly."""
    check_model(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; longdraft hosts decoder-only models.")
    if sparse := sparse_kinds(model):
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(sparse)}, which longdraft does not host: they choose by "
            "themselves which rows of the text they see."
        )
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    if head is None:
        raise UnsupportedModelError(f"{name} has no language modelling head, so it predicts no token. {_LOAD}")
    if isinstance(head, torch.nn.ModuleList):
        raise UnsupportedModelError(f"{name} predicts several tokens a step, which longdraft does not host.")
    empty = next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)
    if empty is not None:
        raise UnsupportedModelError(
            f"{name} has weights without values: {empty} is on the device 'meta' (made without weights, or put on disk "
            f"or in host memory by device_map). {_LOAD} Leave device_map out, or name one device."
        )
    _check_places(model)
    quantised.check(model)
    adapters.check(model)


def check_autocast(device: torch.device) -> None:
    """Raises CapabilityError under torch.autocast, which the model's own generate would follow."""
    if torch.is_autocast_enabled(device.type):
        raise CapabilityError(
            "longdraft computes in the model's own dtype, not in that of torch.autocast: decode outside of it, or load "
            "the model in 16 bits."
        )


def check_functions(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for functions of the user's that transformers or torch call in every model: those
    registered or replaced for attention and masks, and hooks of all modules."""
    name = decoder_config(model)._attn_implementation
    own = [known.get(name) for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    if name == "eager":  # a function of the model's file
        files = {sys.modules[type(m).__module__] for m in model.modules() if is_known(type(m).forward)}
        own += [vars(file).get("eager_attention_forward") for file in files]
    own += [*modules._global_forward_hooks.values(), *modules._global_forward_pre_hooks.values()]
    if foreign := next((code for code in own if code is not None and not is_known(code)), None):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes with {foreign}, a function of your own (attention: {name!r}), which "
            "longdraft would leave out. Decode without longdraft, or without the function: "
            'model.set_attn_implementation("sdpa") for an attention, a hook of one module for one of all.'
        )


def _check_places(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if a model's layers are on several devices: their KV is kept on one."""
    places = [next((str(p.device) for p in layer.parameters()), None) for layer in decoder_layers(model)]
    devices = sorted({place for place in places if place is not None})
    if len(devices) > 1:
        found = ", ".join(f"layer {places.index(device)} is on {device}" for device in devices)
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over several devices ({found}), as device_map='auto' does. longdraft "
            "keeps the KV of all layers on one: load the model on one device, with device_map={'': 0}, in fewer bits "
            "if need be; or share it among processes, one a GPU (docs/tensor-parallel.md)."
        )


def check_tokens(model: PreTrainedModel, tokens: torch.Tensor | Iterable[int]) -> None:
    """Raises PromptError, with the first one, for token ids that the model has no embedding for."""
    size = weight_shape(model.get_input_embeddings())[0]
    if isinstance(tokens, torch.Tensor):
        wrong = tokens[(tokens < 0) | (tokens >= size)].tolist()
    else:
        wrong = [token for token in tokens if not 0 <= token < size]
    if wrong:
        raise PromptError(
            f"The prompt has the token id {wrong[0]}, but the model's are 0 to {size - 1}. Was it made with "
            "another model's tokenizer?"
        )


def check_length(model: PreTrainedModel, length: int, ahead: int) -> None:
    """Refuses texts beyond which the model's rotary frequencies follow the longest text of a forward.

    Such a model ("dynamic") would rotate drafted tokens, or the rows of a batch, differently from one token at a time.
    Up to its trained length the frequencies are constant.

    Args:
        length: tokens of the longest text, prompt and output.
        ahead: number of tokens by which a draft may exceed it. Frequencies that a draft beyond the limit sets remain
            for the verification after it.

    Raises:
        ContextError: names the kind of the rotary embedding, and the length up to which it is exact.
    """
    limit, longest = context_length(model), length + ahead
    kind = next((kind for kind in map(rope_kind, rope_parameters(model)) if "dynamic" in kind), None)
    if kind is not None and longest > limit:
        raise ContextError(
            f"{type(model).__name__} has rotary embeddings of the kind {kind}, whose frequencies depend on the "
            f"length of the text beyond {limit} tokens. longdraft decodes it exactly up to there, and this needs "
            f"{longest} (prompt, new tokens and draft). Shorten the prompt or ask for fewer new tokens."
        )
