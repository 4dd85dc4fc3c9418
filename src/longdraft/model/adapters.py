"""Adapters of PEFT on a target: which of them longdraft hosts.

An adapter's layers stand around the model's own, so a twin has them as the model does, and a switch of adapters changes
attributes of theirs, which the next run notices (:mod:`longdraft.model.model_copy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from longdraft.errors import UnsupportedModelError

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


def check(model: nn.Module) -> None:
    """Raises UnsupportedModelError for an active adapter that longdraft would compute differently."""
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
                    f"The adapter {name!r} ({_word(settings.peft_type)}) {why}, which longdraft does not host. Use one "
                    "that adds to layers, such as LoRA, merge it (merge_and_unload), or disable it."
                )
    if given := _take_by_row(model):
        raise UnsupportedModelError(
            f"generate was given {given}: longdraft decodes all rows with one adapter. Leave it out, choose with "
            "set_adapter, and make a call for each adapter."
        )


def _take_by_row(model: nn.Module) -> str:
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
    return _OTHER_KINDS.get(_word(getattr(settings, "peft_type", "")))


def _active(module: nn.Module) -> list[str]:
    """Names of the adapters that a layer computes with; empty for a layer without adapters."""
    if not getattr(module, "adapter_layer_names", ()):
        return []
    chosen = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ())
    return [*_names(getattr(module, "merged_adapters", ())), *_names(chosen)]


def _names(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    return list(given) if isinstance(given, list | tuple) else []


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
