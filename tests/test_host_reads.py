"""How often a round waits for the device: counted where a tensor is read on the host, as a GPU would make it wait."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from tests.drafts import random_draft, random_eagle3, random_onepass
from tests.tiny import tiny_model

# What hands a tensor's numbers to the host, or needs one of them there to go on.
READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class Fetched(torch.Tensor):
    """A tensor that has been fetched: reading it again costs nothing."""


@pytest.fixture
def reads(monkeypatch):
    """Counts; tensors made on the host are taken for the device's."""
    found: list[str] = []

    def counted(name, method):
        def read(self, *args, **kwargs):
            if isinstance(self, Fetched):
                return method(self, *args, **kwargs)
            found.append(name)
            out = method(self, *args, **kwargs)
            return out.as_subclass(Fetched) if name == "cpu" else out

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    return found


def rounds(spec, reads) -> list[int]:
    """Reads of each round but the first one."""
    run = spec.stream([[3, 9, 4, 7, 2, 5] * 8], max_new_tokens=24, eos_token_ids=[])
    found = []
    for step in run:
        if step.mode != "prefill":
            found.append(len(reads))
        reads.clear()
    return found[1:]


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        # One to know what was accepted; one more to know the tree, which is made on the host.
        ("ar", {}, 1),
        ("prompt-lookup", {}, 1),
        ("longspec", {"widths": (3, 3, 2)}, 2),
        ("eagle3", {"depth": 3, "top_k": 3, "nodes": 8}, 2),
        ("onepass", {"depth": 3, "top_k": 3, "nodes": 8}, 2),
    ],
)
def test_a_round_waits_for_the_device_as_seldom_as_it_can(method, options, expected, tmp_path, reads):
    model = tiny_model(vocab=11, layers=6)
    made = {"longspec": random_draft, "eagle3": random_eagle3, "onepass": random_onepass}
    if method in made:
        options = options | {"draft": made[method](tmp_path / "draft", model)}
    found = rounds(Speculator(method, target=model, **options), reads)
    # The last rounds have no room for a tree.
    assert len(found) > 2 and max(found) == expected
