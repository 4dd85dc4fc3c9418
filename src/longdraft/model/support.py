"""Refuses what longdraft cannot decode exactly, with the reason: models, adapters, dtypes of KV, lengths, tokens."""

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

from longdraft.errors import CapabilityError, ContextError, PromptError, UnsupportedModelError, reason_of
from longdraft.model import quantised
from longdraft.model.called_functions import called_functions, functions_called_by, is_library_code
from longdraft.model.fingerprints import user_code_in
from longdraft.model.hosting import context_length, decoder_config, decoder_layers
from longdraft.model.layout import sparse_layer_types
from longdraft.model.positions import rope_parameters, rope_type
from longdraft.model.stored import StoredWeights, weight_shape

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

_LOAD = "Load it: model, tokenizer = longdraft.load(...), or model = AutoModelForCausalLM.from_pretrained(...)."
# Kinds of PEFT that compute more than a layer's rows one by one.
_OTHER_KINDS = {
    "ADAPTION_PROMPT": "changes what attention reads",
    "LILY": "mixes its parts by all rows of its input together",
    "POLY": "takes the number of a task with each forward",
    "SHADOW": "carries a state from layer to layer",
    "XLORA": "chooses its experts by the whole text",
}
# Arguments of ``generate`` that PEFT hands to its layers by hooks, a value for each row of a batch.
_BY_ROW = ("adapter_names", "alora_offsets")

_TEXT, _STEPS, _SEVERAL = 5, 2, (2, 64)
# Largest relative difference of a row's logits, in 16 bits and in more.
_ROUNDED, _CLOSE = 2e-2, 1e-5


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
    if sparse := sparse_layer_types(model):
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
    if not isinstance(head, StoredWeights) and not isinstance(getattr(head, "weight", None), torch.Tensor):
        raise UnsupportedModelError(f"{name} has a head of the kind {type(head).__name__}: give it one linear layer.")
    _check_adapters(model)


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
    own = {"attention": ALL_ATTENTION_FUNCTIONS.get(name), "mask": ALL_MASK_ATTENTION_FUNCTIONS.get(name)}
    if name == "eager":  # a function of the model's file
        files = {type(m).__module__ for m in model.modules() if is_library_code(type(m).forward)}
        own |= {file: vars(sys.modules[file]).get("eager_attention_forward") for file in files}
    # What torch writes in Python calls itself by name, twice where a mode is on; methods of tensors are called by all.
    own |= {
        at: f for at, f in called_functions(model).items() if at.startswith(("torch.nn.functional.", "torch.Tensor."))
    }
    own["torch.nn.Module.__call__"] = torch.nn.Module.__call__
    hooks = {**modules._global_forward_hooks, **modules._global_forward_pre_hooks}
    called = {place: code for role, each in own.items() for place, code in functions_called_by(role, each).items()}
    for place, code in (called | {f"hook {number}": hook for number, hook in hooks.items()}).items():
        if not is_library_code(code):
            raise UnsupportedModelError(
                f"{type(model).__name__} computes with {code}, a function of your own ({place}, attention: {name!r}), "
                "which longdraft would leave out. Decode without longdraft, or without the function: put back what was "
                'there; model.set_attn_implementation("sdpa") for an attention, a hook of one module for one of all.'
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


def check_length(model: PreTrainedModel, length: int, num_draft_tokens: int) -> None:
    """Refuses texts beyond which the model's rotary frequencies follow the longest text of a forward.

    Such a model ("dynamic") would rotate drafted tokens, or the rows of a batch, differently from one token at a time.
    Up to its trained length the frequencies are constant.

    Args:
        length: tokens of the longest text, prompt and output.
        num_draft_tokens: number of tokens by which a draft may exceed it. Frequencies that a draft beyond the limit sets remain
            for the verification after it.

    Raises:
        ContextError: names the kind of the rotary embedding, and the length up to which it is exact.
    """
    limit, longest = context_length(model), length + num_draft_tokens
    kind = next((kind for kind in map(rope_type, rope_parameters(model)) if "dynamic" in kind), None)
    if kind is not None and longest > limit:
        raise ContextError(
            f"{type(model).__name__} has rotary embeddings of the kind {kind}, whose frequencies depend on the "
            f"length of the text beyond {limit} tokens. longdraft decodes it exactly up to there, and this needs "
            f"{longest} (prompt, new tokens and draft). Shorten the prompt or ask for fewer new tokens."
        )


def check_kv_dtype(runner: TargetRunner, dtype: torch.dtype, option: str) -> None:
    """Raises CapabilityError for a dtype that cannot be kept here, of all keys and values (the option ``kv_dtype``) or
    of a view's (``view_dtype``)."""
    of_views = option == "view_dtype"
    offloaded = runner.offload is not None and not of_views
    reason = "it is for KV that is not offloaded" if offloaded else _unreadable(runner, dtype)
    if reason is None:
        return
    advice = "leave it out"
    if of_views:
        advice += "; a view of all rows needs it, so take another"
    elif runner.device.type == "cuda":
        advice += '; offload="host" or a partial view (specpv, self) takes less of a GPU\'s memory'
    name = str(dtype).removeprefix("torch.")
    raise CapabilityError(f"{option}={name} cannot be kept here: {reason}. So {advice}.")


def _unreadable(runner: TargetRunner, dtype: torch.dtype) -> str | None:
    """The reason why no attention path here reads keys and values rounded to a dtype; None if one does."""
    shape = runner.kv_shape
    if dtype == shape.dtype or runner.can_round_kv:
        return None
    if runner.has_custom_attention or shape.padded:
        return "the model attends with code of its own, or its layers' keys and values have several sizes"
    if runner.device.type != "cuda":
        own = f"{shape.dtype} on {runner.device} ({runner.attention_path})"
        return f"it is for models in float32 on a CPU with its own attention path, and this one is {own}"
    return None if dtype == torch.int8 else "on a GPU keys and values are in the model's dtype or in int8"


def _check_adapters(model: torch.nn.Module) -> None:
    """Raises UnsupportedModelError for an active adapter of PEFT that longdraft would compute differently.

    An adapter's layers stand around the model's own, so a twin has them as the model does.
    """
    in_layers = {name for module in model.modules() for name in _active(module)}
    # A PeftModel whose ``generate`` has called that of its model.
    asking = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    owners: list[Any] = [each for each in (model, asking) if isinstance(getattr(each, "peft_config", None), Mapping)]
    for owner in owners:
        # An adapter that changes no layer is the model's own: a PeftModel names it.
        named = () if getattr(owner, "_adapters_disabled", False) else _names(getattr(owner, "active_adapter", ()))
        for name in sorted({*in_layers, *named}):
            settings = owner.peft_config.get(name)
            if settings is not None and (why := _foreign(settings)) is not None:
                raise UnsupportedModelError(
                    f"The adapter {name!r} ({quantised.enum_value(settings.peft_type)}) {why}, which longdraft does not "
                    "host. Use one that adds to layers, such as LoRA, merge it (merge_and_unload), or disable it."
                )
    if given := _take_by_row(model):
        raise UnsupportedModelError(
            f"generate was given {given}: longdraft decodes all rows with one adapter. Leave it out, choose with "
            "set_adapter, and make a call for each adapter."
        )


def _take_by_row(model: torch.nn.Module) -> str:
    """Removes the hooks of a call with an adapter for each row, as PEFT leaves them behind when the call fails.

    Returns:
        The name of the argument of that call; empty if there was none.
    """
    found = ""
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            given = [key for key in _BY_ROW if isinstance(hook, partial) and key in hook.keywords]
            if given:
                found = given[0]
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
    return found


def _foreign(settings: Any) -> str | None:
    if getattr(settings, "is_prompt_learning", False):
        return "puts rows of its own before the text"
    if getattr(settings, "alora_invocation_tokens", None) is not None:
        return "begins in the middle of a text"
    return _OTHER_KINDS.get(quantised.enum_value(getattr(settings, "peft_type", "")))


def _active(module: torch.nn.Module) -> list[str]:
    """Names of the adapters that a layer computes with; empty for a layer without adapters."""
    if not getattr(module, "adapter_layer_names", ()):
        return []
    chosen = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ())
    return [*_names(getattr(module, "merged_adapters", ())), *_names(chosen)]


def _names(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    return list(given) if isinstance(given, list | tuple) else []


def reason_against_drafts(runner: TargetRunner) -> str | None:
    """Runs a model with hooks, replaced forwards or layers of the user's on made-up tokens, row by row and several rows
    at once. Returns why it takes no drafts, with the name of a module; None if a row does not depend on the others.
    """
    with runner.lock:
        runner.sync_with_model()
        if not (names := user_code_in(runner.model, include_classes=True)):
            return None
        why = "it gives a row another result if several come at once"
        try:
            alone, *others = (_rows(runner, sizes) for sizes in ([1] * _STEPS, *([n] for n in _SEVERAL)))
            most = _ROUNDED if alone.element_size() == 2 else _CLOSE
            apart = [((each - alone).float().norm(dim=-1) / alone.float().norm(dim=-1)).max() for each in others]
            if bool(torch.stack(apart).max() <= most):
                return None
        except Exception as error:  # a user's code can raise any type
            why = f"with several rows it fails ({reason_of(error)})"
    return (
        f"{type(runner.model).__name__} has code of its user's in {', '.join(dict.fromkeys(names))}, and drafts are "
        f"verified several rows at a time: {why}. Remove it, or decode plainly, with the method ar."
    )


def _rows(runner: TargetRunner, sizes: list[int]) -> torch.Tensor:
    """Logits (steps, vocabulary) of the rows behind a text, fed so many at a time."""
    store, found = runner.new_store(1, _TEXT + sum(sizes)), []
    tokens = [(37 * i + 11) % runner.vocab_size for i in range(_TEXT + sum(sizes))]
    runner.forward(store.make_forward_batch([0], [tokens[:_TEXT]], is_prefill=True), store, logits="none")
    store.commit(0, range(_TEXT))
    for size in sizes:
        start = store.lengths[0]
        out = runner.verify(store.make_forward_batch([0], [tokens[start : start + size]]), store)
        assert out.logits is not None
        found.append(out.logits[0].clone())
        store.commit(0, range(size))
    return torch.cat(found)[:_STEPS]
