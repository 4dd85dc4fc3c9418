"""Models that attend with code of their own: trees run branch by branch through the model's own cache."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from longdraft.errors import CapabilityError
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.forwards import forward
from tests.zoo.tiny_models import tiny_model

TEXTS = [[5, 9, 17, 3, 60, 41], [12, 7]]
# Of two sequences: a tree of five nodes; one of two, padded with its root.
TREES = [[30, 31, 32, 33, 34], [40, 41, 40, 40, 40]]
PARENTS = [[-1, 0, 0, 2, 1], [-1, 0, -1, -1, -1]]


@pytest.fixture(scope="module", params=["bloom", "gpt_neo", "falcon"])
def model(request):
    return tiny_model(request.param)


def path(parents, row):
    return [*path(parents, parents[row]), row] if row >= 0 else []


def tree():
    """Mask (B, T, T) and depths of the trees."""
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    for b, parents in enumerate(PARENTS):
        for row in range(5):
            mask[b, row, path(parents, row)] = True
    return mask, [[len(path(parents, row)) - 1 for row in range(5)] for parents in PARENTS]


def started(model):
    runner = TargetRunner(model)
    assert runner.attends_itself
    store = runner.new_store(2, 32)
    for slot, text in enumerate(TEXTS):
        forward(runner, [text], store, [slot], logits="none")
        store.commit(slot, range(len(text)))
    return runner, store


def close(found, expected):
    """Equal up to the order of sums, which depends on the processor."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))


def own(model, text, **more):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text]), use_cache=False, **more)


def test_rows_of_a_batch_of_trees_are_those_of_their_paths(model):
    runner, store = started(model)
    mask, depths = tree()
    taps = Taps(hidden=(0, 2))
    out = forward(runner, TREES, store, [0, 1], mask=mask, depths=depths, taps=taps)
    for b, rows in enumerate((range(5), range(2))):
        for row in rows:
            text = TEXTS[b] + [TREES[b][i] for i in path(PARENTS[b], row)]
            alone = own(model, text, output_hidden_states=True)
            close(out.logits[b, row], alone.logits[0, -1])
            for layer in taps.hidden:
                close(out.hidden[layer][b, row], alone.hidden_states[layer + 1][0, -1])


def test_an_accepted_path_is_kept_and_the_rest_leaves_no_trace(model):
    runner, store = started(model)
    mask, depths = tree()
    forward(runner, TREES, store, [0, 1], mask=mask, depths=depths)
    store.commit(0, [0, 2, 3])
    store.commit(1, [0])
    out = forward(runner, [[50], [51]], store, [0, 1])
    for b, text in enumerate(([*TEXTS[0], 30, 32, 33, 50], [*TEXTS[1], 40, 51])):
        close(out.logits[b, 0], own(model, text).logits[0, -1])


def test_a_tree_is_fed_level_by_level(model):
    runner, store = started(model)
    forward(runner, [[30]], store, [0])
    mask = torch.tensor([[[True, True, False], [True, False, True]]])
    out = forward(runner, [[31, 32]], store, [0], mask=mask, depths=[[1, 1]], offset=1)
    for row, token in enumerate((31, 32)):
        alone = own(model, [*TEXTS[0], 30, token]).logits[0, -1]
        close(out.logits[0, row], alone)


def test_its_queries_are_not_shown(model):
    runner, store = started(model)
    with pytest.raises(CapabilityError, match="does not show its queries"):
        forward(runner, [[1]], store, [0], taps=Taps(queries=(0,)))


def test_a_method_that_needs_them_says_so(model):
    with pytest.raises(CapabilityError, match="does not show its queries"):
        Speculator("self", target=model, view="snapkv", budget=24, window=4).generate([TEXTS[0]], max_new_tokens=4)
