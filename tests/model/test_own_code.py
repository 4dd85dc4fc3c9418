"""Models that attend with code of their own: trees run branch by branch through the model's own cache."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from longdraft.errors import CapabilityError
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.forwards import forward
from tests.support.tree_rows import check_rows, text
from tests.zoo.tiny_models import tiny_model


@pytest.fixture(scope="module", params=["bloom", "gpt_neo", "falcon"])
def model(request):
    return tiny_model(request.param)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the order of sums, which depends on the processor."""
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_rows_of_trees_are_the_models_own(model):
    runner = TargetRunner(model)
    assert runner.attends_itself
    plain = check_rows(runner, close, (40, 5))
    whole = torch.tensor([text(40, 40) + text(7, 3)])
    with torch.inference_mode():
        own = model(input_ids=whole, use_cache=False, output_hidden_states=True)
    assert close(plain, own.logits[0, 40:])
    store, taps = runner.new_store(1, 60), Taps(hidden=(0, 2))
    out = forward(runner, whole.tolist(), store, [0], taps=taps)
    assert all(close(out.hidden[layer], own.hidden_states[layer + 1]) for layer in taps.hidden)


def test_its_queries_are_not_shown_and_a_method_that_needs_them_says_so(model):
    runner = TargetRunner(model)
    with pytest.raises(CapabilityError, match="does not show its queries"):
        forward(runner, [[1]], runner.new_store(1, 8), [0], taps=Taps(queries=(0,)))
    with pytest.raises(CapabilityError, match="does not show its queries"):
        Speculator("self", target=model, view="snapkv", budget=24, window=4).generate([text(6)], max_new_tokens=4)
