"""Layers with a gated DeltaNet in one native call, beside the model's own code."""

from __future__ import annotations

import pytest
import torch

from longdraft import native
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.forwards import forward
from tests.recurrent_models import recurrent_model

pytestmark = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")

TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DEPTHS = [0, 1, 1, 2]
PROMPTS = {2: 37, 0: 5}


def begun(model):
    runner = TargetRunner(model)
    store = runner.new_store(3, 100)
    for slot, n in PROMPTS.items():
        forward(runner, [[(7 * i + slot) % 60 for i in range(n)]], store, [slot], logits="none", prompt=True)
        store.commit(slot, range(n))
    return runner, store


def outputs(model):
    """Logits and taps of a batch of trees, then of steps behind a part of one."""
    runner, store = begun(model)
    taps = Taps(hidden=(0, 3), queries=(0,))
    mask, depths = TREE.expand(2, -1, -1), [DEPTHS, DEPTHS]
    tree = forward(runner, [[5, 6, 7, 8], [9, 10, 11, 12]], store, [2, 0], mask=mask, depths=depths, taps=taps)
    found = [tree.logits, *tree.hidden.values(), *tree.queries.values()]
    store.commit(2, [0, 1, 3])
    store.commit(0, [])
    for token in range(4):
        found.append(forward(runner, [[token], [token + 1]], store, [2, 0]).logits)
        store.commit(2, [0])
        store.commit(0, [0])
    return runner, found


@pytest.mark.parametrize("heads", [2, 4])
def test_the_same_as_the_models_own_code(heads, monkeypatch):
    model = recurrent_model("qwen3_5_text", linear_num_key_heads=heads)
    runner, found = outputs(model)
    assert len(runner.twin.fused.layers) == 4 and runner.twin.fused.stack is not None
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    _, wanted = outputs(model)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_tree_that_grows_has_the_bits_of_one_that_is_there():
    runner, store = begun(recurrent_model("qwen3_5_text"))
    tokens, whole = [5, 6, 7, 8], TREE[None]
    at_once = forward(runner, [tokens], store, [2], mask=whole, depths=[DEPTHS]).logits
    parts = []
    for first, end in ((0, 1), (1, 3), (3, 4)):
        mask, depths = whole[:, first:end, :end], [DEPTHS[first:end]]
        block = store.block([2], [tokens[first:end]], depths=depths, mask=mask, offset=first)
        parts.append(runner.forward(block, store).logits)
    assert torch.equal(torch.cat(parts, 1), at_once)


def test_a_layer_with_hooks_inside_runs_by_its_own_code():
    model = recurrent_model("qwen3_5_text")
    model.model.layers[0].linear_attn.out_proj.register_forward_hook(lambda *_: None)
    assert not TargetRunner(model).twin.fused.layers
