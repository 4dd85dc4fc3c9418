"""A user's own code in and around a model: attention functions, masks, hooks, autocast. Text is the model's own, or the
call is refused by name."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from longdraft import PromptCache, Speculator
from longdraft.errors import CapabilityError, RequestError, UnsupportedModelError
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_model

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])
ONES = torch.ones_like(IDS)
DRAFTING: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"min_n": 1},
    "self": {"view": "streaming", "budget": 24, "sink": 4},
}
STRENGTH = torch.randn(48, generator=torch.Generator().manual_seed(3))


def both(model: Any, spec: Speculator, mask: torch.Tensor = ONES) -> bool:
    """True if generate gives the same text with and without longdraft."""
    known = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    return torch.equal(model.generate(IDS, **known), model.generate(IDS, **known, custom_generate=spec))


# --- attention functions ---


def own_sdpa(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **(kwargs | {"scaling": 0.02}))


def own_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **kwargs)


def registered(model: Any, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    AttentionInterface.register("mine", own_sdpa)
    AttentionMaskInterface.register("mine", own_mask)
    for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        stack.callback(known._global_mapping.pop, "mine")
    stack.callback(model.set_attn_implementation, "sdpa")
    model.set_attn_implementation("mine")


def in_the_place_of(known: Any, function: Callable[..., Any]) -> Callable[..., None]:
    return lambda model, stack, patch: patch.setitem(known._global_mapping, "sdpa", function)


def eager(model: Any, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.callback(model.set_attn_implementation, "sdpa")
    model.set_attn_implementation("eager")
    patch.setattr(modeling_llama, "eager_attention_forward", own_sdpa)


def hook_of_all(model: Any, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.enter_context(torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, out: None))


def autocast(kind: torch.dtype) -> Callable[..., None]:
    return lambda model, stack, patch: stack.enter_context(torch.autocast("cpu", dtype=kind))


def head_of_layers(model: Any, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    stack.callback(setattr, model, "lm_head", before := model.lm_head)
    model.lm_head = nn.Sequential(nn.Linear(before.in_features, 8), nn.Linear(8, before.out_features))


REFUSED: dict[str, tuple[Callable[..., None], str, type[Exception]]] = {
    "registered": (registered, "mine", UnsupportedModelError),
    "function": (in_the_place_of(ALL_ATTENTION_FUNCTIONS, own_sdpa), "own_sdpa", UnsupportedModelError),
    "mask": (in_the_place_of(ALL_MASK_ATTENTION_FUNCTIONS, own_mask), "own_mask", UnsupportedModelError),
    "eager": (eager, "own_sdpa", UnsupportedModelError),
    "hook of all modules": (hook_of_all, "hook", UnsupportedModelError),
    "head of several layers": (head_of_layers, "Sequential", UnsupportedModelError),
    "bfloat16": (autocast(torch.bfloat16), "autocast", CapabilityError),
    "float16": (autocast(torch.float16), "autocast", CapabilityError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_while_it_lasts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, word, error = REFUSED[name]
    model = tiny_model()
    used, unused = (Speculator("prompt-lookup", target=model, min_n=1) for _ in range(2))
    assert both(model, used)
    with ExitStack() as stack, monkeypatch.context() as patch:
        put(model, stack, patch)
        for run in (
            lambda: both(model, used),
            lambda: both(model, unused),
            lambda: used.generate(IDS.tolist(), max_new_tokens=4),
            lambda: Speculator("ar", target=model),
        ):
            with pytest.raises(error, match=word):
                run()
    assert both(model, used) and both(model, Speculator("ar", target=model))


# --- masks ---


def masked(*hidden: int) -> torch.Tensor:
    mask = ONES.clone()
    mask[0, slice(*hidden)] = 0
    return mask


@pytest.mark.parametrize("hole", [(8, 14), (34, 35)])
def test_a_mask_with_a_hole_and_padding_which_is_none(hole: tuple[int, int]) -> None:
    model = tiny_model()
    assert both(model, Speculator("ar", target=model), masked(*hole))
    for model in (tiny_model("mistral", sliding_window=16), tiny_model("gemma3"), recurrent_model()):
        spec = Speculator("ar", target=model)
        with pytest.raises(CapabilityError, match="attention_mask"):
            both(model, spec, masked(*hole))
        assert both(model, spec, masked(0, 7))


# --- hooks ---


def only_alone(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + STRENGTH if out.shape[1] == 1 else out


def few(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + STRENGTH if out.shape[1] <= 9 else out


def last(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[:, -1] += STRENGTH
    return out


def last_input(module: Any, inputs: Any) -> Any:
    return (last(module, (), inputs[0]), *inputs[1:])


def every(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + STRENGTH


def hook_layer(model: Any, hook: Callable[..., Any]) -> Any:
    return model.model.layers[1].register_forward_hook(hook)


def pre_hook(model: Any, hook: Callable[..., Any]) -> Any:
    return model.model.layers[2].mlp.register_forward_pre_hook(last_input)


def replaced(model: Any, hook: Callable[..., Any]) -> Any:
    part = model.model.layers[1].mlp
    forward = part.forward
    part.forward = lambda x: hook(part, (x,), forward(x))
    return types.SimpleNamespace(remove=lambda: None)


def own_class(model: Any, hook: Callable[..., Any]) -> Any:
    class Own(type(model.model.layers[1].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hook(self, (x,), super().forward(x))

    model.model.layers[1].mlp.__class__ = Own
    return types.SimpleNamespace(remove=lambda: None)


@pytest.mark.parametrize(
    ("put", "hook"),
    [(hook_layer, only_alone), (pre_hook, last), (replaced, few), (own_class, only_alone), (own_class, last)],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_hooks_that_count_rows_rule_drafts_out(put: Callable[..., Any], hook: Callable[..., Any]) -> None:
    model = tiny_model(layers=4)
    before = Speculator("prompt-lookup", target=model, min_n=1)
    handle = put(model, hook)
    if hook is last and put is own_class:  # no forward agrees with another
        with pytest.raises(UnsupportedModelError):
            Speculator("ar", target=model)
        return
    try:
        assert both(model, Speculator("ar", target=model))
        assert both(model, Speculator(target=model))
        for name, options in DRAFTING.items():
            spec = Speculator(name, target=model, **options)
            for run in (lambda: both(model, spec), lambda: spec.generate(IDS.tolist(), max_new_tokens=4)):  # noqa: B023
                with pytest.raises(UnsupportedModelError, match=r"model\.layers"):
                    run()
        with pytest.raises(UnsupportedModelError):
            both(model, before)
    finally:
        handle.remove()


@pytest.mark.parametrize("put", [hook_layer, replaced, own_class], ids=lambda put: put.__name__)
def test_hooks_that_treat_rows_alike_are_drafted_for(put: Callable[..., Any]) -> None:
    model = tiny_model(layers=4)
    handle = put(model, every)
    try:
        spec = Speculator("prompt-lookup", target=model, min_n=1, plan="fixed")
        assert both(model, spec)
        result = spec.generate(IDS.tolist(), max_new_tokens=30)[0]
        assert result.drafted > result.accepted > 0
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_hook_on_the_last_row_sees_prompts_whole(family: Any) -> None:
    model = tiny_model(family, layers=4, context=2048)
    hook_layer(model, last)
    ids = torch.randint(60, (1, 1100), generator=torch.Generator().manual_seed(0))
    known = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    spec, cache = Speculator("ar", target=model), PromptCache()
    expected = model.generate(ids, **known)
    assert torch.equal(expected, model.generate(ids, **known, custom_generate=spec))
    for prompt in (ids[0].tolist()[:1090], ids[0].tolist()):
        result = spec.generate([prompt], max_new_tokens=12, cache=cache)[0]
    assert result.token_ids == expected[0, 1100:].tolist()


# --- torch.compile, copies ---


def wrapped(model: Any) -> None:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)


def in_place(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile()


def functions(model: Any) -> None:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)


@pytest.mark.parametrize("compiled", [wrapped, in_place, functions], ids=lambda how: how.__name__)
def test_layers_that_torch_compiles_are_not_compiled_for_every_number_of_rows(compiled: Callable[[Any], None]) -> None:
    model = tiny_model(layers=4)
    expected = Speculator("ar", target=model).generate(IDS.tolist(), max_new_tokens=30)[0].token_ids
    compiled(model)
    torch._dynamo.utils.counters.clear()
    result = Speculator("prompt-lookup", target=model, min_n=1, plan="fixed").generate(IDS.tolist(), max_new_tokens=30)[
        0
    ]
    assert result.token_ids == expected and result.drafted > result.accepted > 0
    assert not torch._dynamo.utils.counters["frames"]


def test_a_speculator_says_that_it_is_not_copied() -> None:
    spec = Speculator("ar", target=tiny_model())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RequestError, match="Speculator"):
            copied(spec)
