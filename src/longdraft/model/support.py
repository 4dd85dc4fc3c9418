"""Refuses what longdraft cannot decode exactly, with the reason: models, adapters, KV dtypes, lengths and tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as modules
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longdraft.errors import CapabilityError, ContextError, PromptError, UnsupportedModelError
from longdraft.model.called_functions import called_functions, functions_called_by, is_library_code
from longdraft.model.layout import sparse_layer_types
from longdraft.model.model_parts import context_length, decoder_config, decoder_layers
from longdraft.model.quant import external
from longdraft.model.quant.stored import StoredWeights, weight_shape
from longdraft.model.rope import rope_parameters, rope_type
from longdraft.native.quantized_kv import INT4

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

_LOAD = "Load it: model, tokenizer = longdraft.load(...), or model = AutoModelForCausalLM.from_pretrained(...)."
# PEFT type that longdraft cannot host -> the reason, as a message states it.
_UNSUPPORTED_ADAPTERS = {
    "ADAPTION_PROMPT": "adds keys and values to attention",
    "LILY": "mixes its parts by all tokens of a forward together",
    "POLY": "takes a task id with each forward",
    "SHADOW": "carries a state from layer to layer",
    "XLORA": "chooses its experts by the whole prompt",
}
# Arguments of ``generate`` with a value for each sequence. PEFT passes them to its layers by hooks.
_PER_SEQUENCE_ARGS = ("adapter_names", "alora_offsets")


def check_model(model: object) -> None:
    """Raises UnsupportedModelError for an object that is not a transformers model, such as a name or a pipeline."""
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise UnsupportedModelError(f"A target is a model of transformers, not {type(model).__name__}. {_LOAD}")


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError, with the reason, for a model that cannot be hosted exactly."""
    check_model(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; longdraft hosts decoder-only models.")
    if sparse := sparse_layer_types(model):
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(sparse)}, which longdraft does not host: they choose the tokens "
            "that they attend to."
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
            f"{name} has no values for some weights: {empty} is on the device 'meta'. The model was made without "
            f"weights, or device_map put them on disk or in host memory. {_LOAD} Leave device_map out or name a device."
        )
    _check_devices(model)
    external.check(model)
    if not isinstance(head, StoredWeights) and not isinstance(getattr(head, "weight", None), torch.Tensor):
        raise UnsupportedModelError(f"{name} has a head of the kind {type(head).__name__}, but needs a linear layer.")
    _check_adapters(model)


def check_autocast(device: torch.device) -> None:
    """Raises CapabilityError inside torch.autocast, which would change the results of the model's own generate."""
    if torch.is_autocast_enabled(device.type):
        raise CapabilityError(
            "longdraft computes in the model's dtype, not in torch.autocast's: decode outside of torch.autocast, or "
            "load the model in 16 bits."
        )


def check_functions(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if a user replaced functions that all models call, or set global hooks of modules.
    The checked functions are transformers' functions for attention and masks, and torch's functions."""
    attention = decoder_config(model)._attn_implementation
    functions = {"attention": ALL_ATTENTION_FUNCTIONS.get(attention)}
    functions["mask"] = ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    if attention == "eager":  # each model file has its own attention function
        files = {type(m).__module__ for m in model.modules() if is_library_code(type(m).forward)}
        functions |= {file: vars(sys.modules[file]).get("eager_attention_forward") for file in files}
    # Our batch invariant mode would bypass replaced functions and tensor methods of torch, or call them twice.
    prefixes = ("torch.nn.functional.", "torch.Tensor.")
    functions |= {n: f for n, f in called_functions(model).items() if n.startswith(prefixes)}
    functions["torch.nn.Module.__call__"] = torch.nn.Module.__call__
    hooks = {**modules._global_forward_hooks, **modules._global_forward_pre_hooks}
    called: dict[str, Any] = {}
    for role, function in functions.items():
        called |= functions_called_by(role, function)
    for dotted_name, function in (called | {f"hook {i}": hook for i, hook in hooks.items()}).items():
        if not is_library_code(function):
            raise UnsupportedModelError(
                f"{type(model).__name__} computes with {function}, a function of your own ({dotted_name}, attention: "
                f"{attention!r}), which longdraft would leave out. Decode without longdraft, or restore the library's "
                'function (of attention: model.set_attn_implementation("sdpa")). Set hooks on single modules only.'
            )


def _check_devices(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if a model's layers are on several devices: all KV is on one device."""
    layer_devices = [next((str(p.device) for p in layer.parameters()), None) for layer in decoder_layers(model)]
    devices = sorted({device for device in layer_devices if device is not None})
    if len(devices) > 1:
        parts = ", ".join(f"layer {layer_devices.index(device)} is on {device}" for device in devices)
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over several devices ({parts}), as device_map='auto' does. longdraft "
            "keeps the KV of all layers on one device: load the model on one, with device_map={'': 0}, in fewer bits "
            "if need be, or use tensor parallelism with a process for each GPU (docs/tensor-parallel.md)."
        )


def check_tokens(model: PreTrainedModel, tokens: torch.Tensor | Iterable[int]) -> None:
    """Raises PromptError if the model has no embedding for a token id. The error names the first such id."""
    vocab_size = weight_shape(model.get_input_embeddings())[0]
    if isinstance(tokens, torch.Tensor):
        unknown = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
    else:
        unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if unknown:
        raise PromptError(
            f"The prompt has the token id {unknown[0]}, but the model's are 0 to {vocab_size - 1}. Was it made with "
            "another model's tokenizer?"
        )


def check_length(model: PreTrainedModel, length: int, num_draft_tokens: int) -> None:
    """Raises ContextError for lengths at which a model with dynamic RoPE would not decode exactly.

    Dynamic RoPE's frequencies depend on the longest sequence of a forward, beyond the trained length. There, drafted
    tokens, and sequences in a batch, would get other frequencies than in plain decoding.

    Args:
        model: the target.
        length: number of tokens in the longest sequence, prompt and output.
        num_draft_tokens: number of draft tokens beyond ``length``, which a verification adds to the sequence."""
    limit, needed = context_length(model), length + num_draft_tokens
    dynamic_type = next((name for name in map(rope_type, rope_parameters(model)) if "dynamic" in name), None)
    if dynamic_type is not None and needed > limit:
        raise ContextError(
            f"{type(model).__name__} has rotary embeddings of the kind {dynamic_type}, whose frequencies depend on the "
            f"length of the text beyond {limit} tokens. longdraft decodes exactly up to {limit} tokens, but prompt, "
            f"new tokens and draft are {needed}. Shorten the prompt or ask for fewer new tokens."
        )


def check_kv_dtype(runner: TargetRunner, option: str, dtype: torch.dtype) -> None:
    """Raises CapabilityError if no attention path of this machine reads the target's KV in ``dtype``.
    ``option`` is the user's option: "kv_dtype" for all KV, or "view_dtype" for the KV of a view, which stays here."""
    for_view, shape, device = option == "view_dtype", runner.kv_shape, runner.device
    if runner.offload is not None and not for_view:
        reason = "offloaded KV has the model's dtype"
    elif dtype == shape.dtype or (runner.can_round_kv and not (dtype == INT4 and shape.padded)):
        return
    elif shape.padded:
        reason = "the model has keys and values of several sizes"
    elif device.type != "cuda":
        setup = f"{shape.dtype} on {device} ({runner.attention_path})"
        reason = f"other KV dtypes need a float32 model on a CPU with our kernels, and this one is {setup}"
    elif dtype in (torch.int8, INT4):
        return
    else:
        reason = "on a GPU keys and values are in the model's dtype, int8 or int4"
    advice = "leave it out"
    if for_view:
        advice += '; with view="all", which needs int8, take another view'
    elif device.type == "cuda":
        advice += '; offload="host" or a partial view (specpv, self) takes less of a GPU\'s memory'
    name = str(dtype).removeprefix("torch.")
    raise CapabilityError(f"{option}={name} cannot be kept here: {reason}. So {advice}.")


def _check_adapters(model: torch.nn.Module) -> None:
    """Raises UnsupportedModelError for an active PEFT adapter that longdraft would compute differently.
    Adapters that add to layers are supported: the execution model copies the layers that such an adapter wraps."""
    active = {name for module in model.modules() for name in _active_adapters(module)}
    # If model is the base model in PeftModel.generate, the method that PEFT has replaced leads to the PeftModel.
    peft_model = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    owners: list[Any] = [m for m in (model, peft_model) if isinstance(getattr(m, "peft_config", None), Mapping)]
    for owner in owners:
        # Only the PeftModel knows which adapter without layers is active, such as prompt tuning.
        disabled = getattr(owner, "_adapters_disabled", False)
        prompt_adapters = () if disabled else _as_list(getattr(owner, "active_adapter", ()))
        for name in sorted({*active, *prompt_adapters}):
            settings = owner.peft_config.get(name)
            if settings is not None and (why := _adapter_problem(settings)) is not None:
                kind = external.enum_value(settings.peft_type)
                raise UnsupportedModelError(
                    f"The adapter {name!r} ({kind}) {why}, which longdraft does not host. Use one that adds to layers, "
                    "such as LoRA, merge it (merge_and_unload), or disable it."
                )
    if argument := _remove_per_sequence_hooks(model):
        raise UnsupportedModelError(
            f"generate was given {argument}, but longdraft decodes all sequences with one adapter. Leave it out, "
            "choose the adapter with set_adapter, and call generate once for each adapter."
        )


def _remove_per_sequence_hooks(model: torch.nn.Module) -> str:
    """Removes the hooks that PEFT's ``generate`` sets to use an adapter for each sequence. A failed call leaves them.
    Returns the name of the argument that the hooks were set for; "" if there were no hooks."""
    argument = ""
    for module in model.modules():
        for hook_id, hook in list(module._forward_pre_hooks.items()):
            arguments = [key for key in _PER_SEQUENCE_ARGS if isinstance(hook, partial) and key in hook.keywords]
            if arguments:
                argument = arguments[0]
                del module._forward_pre_hooks[hook_id]
                module._forward_pre_hooks_with_kwargs.pop(hook_id, None)
    return argument


def _adapter_problem(settings: Any) -> str | None:
    """Returns the reason why longdraft cannot host an adapter; None if it can."""
    if getattr(settings, "is_prompt_learning", False):
        return "puts tokens of its own before the prompt"
    if getattr(settings, "alora_invocation_tokens", None) is not None:
        return "begins in the middle of a sequence"
    return _UNSUPPORTED_ADAPTERS.get(external.enum_value(getattr(settings, "peft_type", "")))


def _active_adapters(module: torch.nn.Module) -> list[str]:
    """Returns the names of the adapters that a layer computes with, merged ones included."""
    if not getattr(module, "adapter_layer_names", ()):
        return []
    unmerged = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ())
    return [*_as_list(getattr(module, "merged_adapters", ())), *_as_list(unmerged)]


def _as_list(names: Any) -> list[str]:
    if isinstance(names, str):
        return [names]
    return list(names) if isinstance(names, list | tuple) else []
