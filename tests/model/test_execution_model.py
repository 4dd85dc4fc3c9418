"""The execution model: the user's model is never written to, and what the user changes about it is seen."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft import Speculator
from longdraft.errors import CapabilityError, UnsupportedModelError
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward
from tests.support.slow_marks import rotate_pairs
from tests.support.tiny import FAMILIES, tiny_model

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
TEXT = [3, 9, 4, 7, 2, 5] * 3


def state(model: PreTrainedModel) -> list[Any]:
    """All that somebody could have written into a model, but for the numbers in its weights."""
    found: list[Any] = [copy.deepcopy(vars(model.config))]
    for name, module in model.named_modules():
        own = {n: x for n, x in vars(module).items() if not isinstance(x, dict)}
        tables = {n: [(k, id(x)) for k, x in table.items()] for n, table in vars(module).items() if type(table) is dict}
        hooks = [list(module._forward_hooks), list(module._forward_pre_hooks)]
        found.append((name, id(module), {n: id(x) for n, x in own.items()}, tables, hooks))
    return found


def logits(model: PreTrainedModel) -> torch.Tensor:
    """The model's own, after a text."""
    was = model.training
    with torch.inference_mode():
        found = model.eval()(torch.tensor([TEXT])).logits[0].float()
    model.train(was)
    return found


def hosted(runner: TargetRunner) -> torch.Tensor:
    """A run's: the text is read, but for its last three tokens, which are verified."""
    store = runner.new_store(1, 40)
    first = forward(runner, [TEXT[:-3]], store, [0], is_prefill=True).logits
    store.commit(0, range(len(TEXT) - 3))
    return torch.cat([first[0], forward(runner, [TEXT[-3:]], store, [0]).logits[0]])


@pytest.mark.parametrize(("family", "training"), rotate_pairs(FAMILIES, [False, True]))
def test_a_run_writes_nothing_into_the_model(family, training):
    model = tiny_model(family).train(training)
    model.model.layers[1].mlp.eval()  # and a part may be in another mode than the rest
    before = state(model)
    Speculator("prompt-lookup", target=model).generate(TEXT, max_new_tokens=12)
    runner = TargetRunner(model)
    forward(runner, [TEXT], runner.new_store(1, 20), [0], taps=Taps((0, 2), (1,)))
    assert state(model) == before
    torch.testing.assert_close(hosted(runner), logits(model), **CLOSE)


def test_hooks_are_the_users_own_and_what_they_change_counts_and_is_tapped():
    outputs, inputs = [], []

    class Recorder:
        def hook(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            outputs.append(output.shape)

    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(Recorder().hook)
    model.lm_head.register_forward_pre_hook(functools.partial(lambda to, m, x: to.append(x), inputs))
    model.model.layers[1].register_forward_hook(lambda m, x, out: out + 1)
    runner = TargetRunner(model)
    tapped = forward(runner, [TEXT], runner.new_store(1, 20), [0], taps=Taps((1,))).hidden[1]
    assert outputs == [(1, len(TEXT), 48)] and len(inputs) == 1
    torch.testing.assert_close(hosted(runner), logits(model), **CLOSE)
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(tapped, expected, **CLOSE)


def by_partial(module: nn.Module) -> None:
    """As accelerate does it."""
    old = module.forward
    module._old_forward = old

    def new(module: nn.Module, *given: Any, **named: Any) -> Any:
        return module._old_forward(*given, **named)

    module.forward = functools.update_wrapper(functools.partial(new, module), old)


def by_method(module: nn.Module) -> None:
    kind = type(module)
    module.forward = types.MethodType(lambda self, *given, **named: kind.forward(self, *given, **named), module)


def by_closure(module: nn.Module) -> None:
    old = module.forward
    module.forward = lambda *given, **named: old(*given, **named)


PARTS = ["model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(("part", "put"), rotate_pairs(PARTS, [by_partial, by_method, by_closure]))
def test_forwards_in_the_place_of_a_models_own_lead_into_the_twin(put, part):
    model = tiny_model()
    expected = logits(model)
    put(model.get_submodule(part))
    before = state(model)
    torch.testing.assert_close(hosted(TargetRunner(model)), expected, **CLOSE)
    assert state(model) == before


def test_a_model_that_cannot_be_copied_is_refused():
    model = tiny_model().train()
    model.model.layers[0].mlp.act_fn = torch.jit.script(nn.SiLU())
    with pytest.raises(UnsupportedModelError, match="scripted"):
        TargetRunner(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_was_cast_decodes_in_its_new_dtype_and_a_run_of_the_old_one_ends(dtype):
    model, other = tiny_model(), tiny_model("qwen3")
    spec = Speculator("prompt-lookup", target=model)
    runner = spec.runner()
    spec.runner(other)
    run = spec.stream(TEXT, max_new_tokens=6)
    next(iter(run))
    model.to(dtype)
    with pytest.raises(CapabilityError):
        run.results()
    with pytest.raises(CapabilityError):
        forward(runner, [TEXT], runner.new_store(1, 20), [0])
    result = spec.generate(TEXT, max_new_tokens=6)[0].token_ids
    assert spec.runner() is spec.runner(model) is not runner and spec.runner().kv_shape.dtype == dtype
    assert result == Speculator("ar", target=model).generate(TEXT, max_new_tokens=6)[0].token_ids
    if dtype == torch.float64:
        torch.testing.assert_close(hosted(spec.runner()), logits(model), **CLOSE)


def test_a_new_embedding_and_head_are_seen():
    model = tiny_model()
    spec = Speculator("prompt-lookup", target=model)
    spec.generate(TEXT, max_new_tokens=4)
    with torch.random.fork_rng():
        model.resize_token_embeddings(80, mean_resizing=False)
    assert spec.runner().vocab_size == 80
    assert spec.generate([70, 71, 79], max_new_tokens=4)[0].new_tokens == 4
    torch.testing.assert_close(hosted(spec.runner()), logits(model), **CLOSE)


def test_a_model_whose_hook_knows_it_is_freed():
    """The execution copy has the same hook; other models are tried in tests/exact/outside/test_let_go.py."""
    model = tiny_model()
    model.model.norm.register_forward_hook(functools.partial(lambda known, *_: None, model))
    spec = Speculator("prompt-lookup", target=model)
    spec.generate(TEXT, max_new_tokens=4)
    known = [weakref.ref(model), weakref.ref(spec.runner().execution_model.model)]
    del spec, model
    gc.collect()
    assert all(each() is None for each in known)
