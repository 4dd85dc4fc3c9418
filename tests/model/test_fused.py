"""Fused layers: taken where they give what the model's own code gives, and only there."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from longdraft import native
from longdraft.errors import UnsupportedModelError
from longdraft.model.few_rows import MOST
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.native import Kernels
from tests.forwards import forward
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")

TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DEPTHS = [0, 1, 1, 2]


def outputs(model, fused: bool, monkeypatch):
    """Logits, taps and the store after prefill, a tree and a commit, for two ragged sequences."""
    monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if fused else "0")
    runner = TargetRunner(model)
    store = runner.new_store(3, 40)
    for slot, n in ((2, 9), (0, 4)):
        forward(runner, [list(range(1, n + 1))], store, [slot], logits="none")
        store.commit(slot, range(n))
    taps = Taps(hidden=(0, 2), queries=(1, 2))
    mask, depths = TREE.expand(2, -1, -1), [DEPTHS, DEPTHS]
    tree = forward(runner, [[5, 6, 7, 8], [9, 10, 11, 12]], store, [2, 0], mask=mask, depths=depths, taps=taps)
    store.commit(2, [0, 1, 3])
    after = forward(runner, [[20]], store, [2])
    return runner, [tree.logits, *tree.hidden.values(), *tree.queries.values(), after.logits, store.keys[:, 2, :, :12]]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("family", "over", "fused"),
    [
        *((family, {}, True) for family in FAMILIES),
        ("llama", {"attention_bias": True}, True),
        ("llama", {"mlp_bias": True}, True),
        ("llama", {"rope_parameters": YARN}, True),
        ("llama", {"hidden_act": "gelu"}, False),
        ("llama", {"head_dim": 8}, False),
    ],
    ids=str,
)
def test_the_same_as_the_models_own_code(family, over, fused, monkeypatch):
    model = tiny_model(family, **over)
    runner, found = outputs(model, True, monkeypatch)
    assert bool(runner.twin.fused.layers) is (runner.twin.fused.stack is not None) is fused
    _, wanted = outputs(model, False, monkeypatch)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_view_of_another_dtype(dtype, monkeypatch):
    """Rows are rounded as they are written, by the kernels and by torch."""
    model, found = tiny_model(), []
    for fused in (True, False):
        monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if fused else "0")
        runner = TargetRunner(model)
        view = runner.new_store(2, 30, dtype=dtype)
        forward(runner, [[1, 2, 3, 4, 5, 6, 7], [3, 2, 1]], view, [1, 0])
        for slot, n in ((1, 7), (0, 3)):
            view.commit(slot, range(n))
        tree = forward(runner, [[5, 6, 7, 8]] * 2, view, [1, 0], mask=TREE.expand(2, -1, -1), depths=[DEPTHS] * 2)
        view.commit(1, [0, 2])
        rows = [x[:, 1, :, :9].to(torch.float32) for x in (view.keys, view.values)]
        found.append([tree.logits, *rows, forward(runner, [[9]], view, [1]).logits])
    # What is rounded the other way here and there makes more of a difference than summing in another order.
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 0.02 * b.abs().max() and (a - b).abs().mean() < 1e-3 * b.abs().max()
    plain = TargetRunner(model)
    store = plain.new_store(1, 30)
    forward(plain, [[1, 2, 3, 4, 5, 6, 7]], store, [0])
    rounded = store.keys[:1, 0, :, :7]  # the first layer's keys do not depend on what was rounded
    torch.testing.assert_close(found[0][1][:1, :, :7], rounded, rtol=1e-2, atol=0.05)


def test_one_strange_layer_among_others():
    model = tiny_model()
    model.model.layers[1].input_layernorm.forward = lambda x: 2 * x
    runner = TargetRunner(model)
    runner.new_store(1, 8)
    assert not runner.twin.fused.layers


def test_a_forward_that_somebody_put_in_a_layers_place_is_called():
    model, calls = tiny_model(), []
    layer = model.model.layers[1]

    def other(*given, **named):
        calls.append(given)
        return type(layer).forward(layer, *given, **named)

    layer.forward = other
    runner = TargetRunner(model)
    calls.clear()  # it is tried out first
    logits = forward(runner, [[1, 2]], runner.new_store(1, 8), [0]).logits
    assert len(calls) == 1 and not runner.twin.fused.layers
    del layer.forward
    torch.testing.assert_close(logits, model(torch.tensor([[1, 2]])).logits, rtol=1e-4, atol=2e-4)


def reads_a_position(self, hidden_states, position_ids=None, **named):
    assert position_ids.shape[-1]
    return LlamaDecoderLayer.forward(self, hidden_states, position_ids=position_ids, **named)


def reads_what_is_not_there(self, hidden_states, **named):
    return self.renamed(hidden_states, **named)


def with_layers_that(forward):
    model = tiny_model()
    for layer in model.model.layers:
        layer.__class__ = type("Other", (LlamaDecoderLayer,), {"forward": forward})
    return model


def test_layers_that_want_more_arguments_are_called_themselves():
    model = with_layers_that(reads_a_position)
    runner = TargetRunner(model)
    assert not runner.twin.fused.layers
    logits = forward(runner, [[1, 2]], runner.new_store(1, 8), [0]).logits
    torch.testing.assert_close(logits, tiny_model()(torch.tensor([[1, 2]])).logits, rtol=1e-4, atol=2e-4)


def test_an_attribute_that_is_missing_is_no_reason_to_compute_otherwise():
    with pytest.raises(UnsupportedModelError, match="renamed"):
        TargetRunner(with_layers_that(reads_what_is_not_there))


def test_hooks_of_a_layer_are_called_around_it_and_not_for_made_up_rows():
    model, seen = tiny_model(), []
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    runner = TargetRunner(model)
    store = runner.new_store(1, 8)
    assert runner.twin.fused.layers and runner.twin.fused.stack is None and not seen
    forward(runner, [[1, 2]], store, [0])
    assert seen == [2]


@pytest.mark.parametrize("prompt", [False, True])
def test_decoding_takes_one_way_for_any_number_of_rows_and_a_long_prompt_the_models_own(prompt, monkeypatch):
    model = tiny_model(layers=1)
    runner = TargetRunner(model)
    rows: list[int] = []
    whole = Kernels.stack

    def stack(self, of, block, *others, **named):
        rows.append(block.size)
        return whole(self, of, block, *others, **named)

    monkeypatch.setattr(Kernels, "stack", stack)
    for size in (MOST, MOST + 1):
        forward(runner, [[1] * size], runner.new_store(1, size), [0], prompt=prompt)
    assert rows == ([MOST] if prompt else [MOST, MOST + 1])
