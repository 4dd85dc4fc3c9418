"""What longdraft can decode exactly: which models, which lengths, which token ids. Anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from longdraft.errors import ContextError, PromptError, UnsupportedModelError
from longdraft.model.hosting import context_length, decoder_config
from longdraft.model.stored import weight_shape

_LOAD = "Load it: model, tokenizer = longdraft.load(...), or model = AutoModelForCausalLM.from_pretrained(...)."


def check_model(model: object) -> None:
    """Refuses what is no model of transformers: a name, a path, a pipeline.

    Raises:
        UnsupportedModelError: saying what it is.
    """
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise UnsupportedModelError(f"A target is a model of transformers, not {type(model).__name__}. {_LOAD}")


def check_supported(model: PreTrainedModel) -> None:
    """Refuses what cannot be hosted exactly.

    Raises:
        UnsupportedModelError: naming what stands in the way.
    """
    check_model(model)
    name = type(model).__name__
    config = decoder_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; longdraft hosts decoder-only models.")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not go through transformers' attention interface, so longdraft cannot host it."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Mistral and its like carry no layer_types: a window there applies to every layer.
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    foreign = sorted(kinds - {"full_attention"})
    if foreign:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(foreign)}, which longdraft cannot host exactly yet. "
            "It hosts decoders whose layers are all full_attention (Llama, Qwen2, Qwen3, Mistral without a window)."
        )
    for option in ("attn_logit_softcapping",):
        if getattr(config, option, None) is not None:
            raise UnsupportedModelError(f"{name} uses {option}, which longdraft does not host exactly.")
    _check_head(model)
    _check_weights(model)


def _check_head(model: PreTrainedModel) -> None:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    if head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language modelling head, so it says no next token. {_LOAD}"
        )


def _check_weights(model: PreTrainedModel) -> None:
    """Weights have to be there, and what a row's result is must not depend on the rows beside it."""
    name = type(model).__name__
    empty = next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)
    if empty is not None:
        raise UnsupportedModelError(
            f"{name} has weights without values: {empty} is on the device 'meta' (made without weights, or put on disk "
            f"or in host memory by device_map). {_LOAD} Leave device_map out, or name one device."
        )
    for path, module in model.named_modules():
        if (why := _depends_on_rows(module)) is not None:
            raise UnsupportedModelError(
                f"{name} is quantised so that {path} ({type(module).__name__}) {why}. What it computes for a token "
                "then depends on the tokens beside it, so drafted tokens would change the text. Use a quantisation of "
                "weights alone, or one that scales each row by itself."
            )


def _depends_on_rows(module: torch.nn.Module) -> str | None:
    """How a quantised layer's result for a row depends on the other rows of its input, as far as that can be seen."""
    kind = type(module)
    scaled = "scales all rows of its input together"
    if ".quantized.dynamic." in f"{kind.__module__}.":  # torch.ao.quantization.quantize_dynamic
        return scaled
    if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
        return "finds outliers in all rows of its input together (load it with llm_int8_threshold=0)"
    scheme = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
    if getattr(scheme, "dynamic", False) is True and _word(getattr(scheme, "strategy", None)) == "tensor":
        return scaled  # compressed-tensors
    # torchao: what it knows of the activations lies in the weight.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    settings = getattr(weight, "act_quant_kwargs", None) or getattr(weight, "quant_kwargs", None)
    if type(getattr(settings, "granularity", None)).__name__ == "PerTensor":
        return scaled
    if isinstance(settings, Mapping) and type(settings.get("activation_granularity")).__name__ == "PerTensor":
        return scaled
    return None


def _word(value: Any) -> str:
    """An option's value as a word, be it an enum's member or a string."""
    return str(getattr(value, "value", value))


def check_tokens(model: PreTrainedModel, tokens: torch.Tensor | Iterable[int]) -> None:
    """Refuses token ids that the model has no embedding for.

    Raises:
        PromptError: naming the first one.
    """
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
    """Refuses texts so long that the model's rotary frequencies change with what is beside a token in a forward.

    A model that stretches its frequencies by the longest text of a forward would turn drafted tokens, or the rows of a
    batch, otherwise than one token at a time. Up to the length it was trained on it stretches none.

    Args:
        length: tokens of the longest text, prompt and output. ahead: how many more a draft may go beyond it.

    Raises:
        ContextError: naming the kind of the rotary embedding, and the length up to which it is exact.
    """
    for parameters in _rotary_parameters(model):
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if kind == "longrope":
            # Chosen anew in each forward, by its last position. Nothing that is verified goes beyond the text.
            limit, longest = int(parameters.get("original_max_position_embeddings") or context_length(model)), length
        elif "dynamic" in kind:
            # What a draft beyond the limit sets stays for the verification after it.
            limit, longest = context_length(model), length + ahead
        else:
            continue
        if longest > limit:
            raise ContextError(
                f"{type(model).__name__} has rotary embeddings of the kind {kind}, whose frequencies depend on the "
                f"length of the text beyond {limit} tokens. longdraft decodes it exactly up to there, and this needs "
                f"{longest} (prompt, new tokens and draft). Shorten the prompt or ask for fewer new tokens."
            )


def _rotary_parameters(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """The RoPE parameters of the decoder: one set, or one for each kind of its layers."""
    config = decoder_config(model)
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    return nested or [found]
