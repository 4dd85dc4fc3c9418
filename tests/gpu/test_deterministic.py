"""``deterministic=True``: plain steps and verifications in one bucket of rows, on a simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longdraft import PromptCache, Speculator
from longdraft.errors import CapabilityError
from longdraft.model.gpu import deterministic
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.outputs import Taps
from longdraft.model.probes.linears import check_linears
from longdraft.model.runner import TargetRunner
from longdraft.trees.masks import make_tree_batch
from longdraft.trees.tree import TokenTree
from tests.support.methods import SpeculatorsByMethod
from tests.support.simulated_gpu import SimulatedGraphs, to_simulated_gpu
from tests.support.slow_marks import slow_except
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [8, 1, 1, 6] * 9]
TREE = TokenTree((5, 7, 8, 9, 3, 2), (-1, 0, 0, 1, 3, 2))


def on_card():
    model = tiny_model(layers=2, hidden=32, heads=4)
    TargetRunner(model)  # it is tried out on the host
    return to_simulated_gpu(model)


def with_text(runner: TargetRunner, slots: int = 1, length: int = 40):
    store = runner.new_store(slots, 200)
    for slot in range(slots):
        text = torch.randint(61, (length + slot,), generator=torch.Generator().manual_seed(slot)).tolist()
        runner.forward(store.make_forward_batch([slot], [text], is_prefill=True), store, logits="none")
        store.commit(slot, range(len(text)))
    return store


@pytest.mark.parametrize("recorded", [False, True])
def test_every_node_has_the_bits_of_a_plain_step(recorded, simulated_gpu):
    """Alone, in a batch, and in a tree of more rows than the bucket."""
    runner = TargetRunner(on_card(), deterministic=True)
    runner.graphs = CudaGraphs(SimulatedGraphs(simulated_gpu) if recorded else None, uses_before_capture=0)
    long = TokenTree(tuple(i % 61 for i in range(80)), (-1, *((i - 1) // 2 for i in range(1, 80))))
    for trees in ([TREE], [TREE, long, TREE]):
        store = with_text(runner, slots=3)
        taps = Taps(hidden=(1,), queries=(0,))
        out = runner.verify(make_tree_batch(store, list(range(len(trees))), trees), store, taps)
        for b, tree in enumerate(trees):
            for node in [n for n in range(tree.size) if n not in tree.parents][-1:]:
                store = with_text(runner, slots=3)
                for at in tree.path(node):
                    plain = runner.verify(store.make_forward_batch([b], [[tree.tokens[at]]]), store, taps)
                    store.commit(b, [0])
                    assert torch.equal(plain.logits[0, 0].cpu(), out.logits[b, at].cpu())
                    assert torch.equal(plain.hidden[1][0, 0].cpu(), out.hidden[1][b, at].cpu())
                    assert torch.equal(plain.queries[0][0, :, 0].cpu(), out.queries[0][b, :, at].cpu())


@pytest.mark.parametrize("method", slow_except(("ar", "self", "prompt-lookup", "longspec"), ["self"]))
def test_methods_decode_as_ar_does(method, tmp_path: Path, simulated_gpu):
    """In bfloat16, where near ties are many: every token, and the rows that are kept."""
    specs = SpeculatorsByMethod(tmp_path, torch.bfloat16)
    options = specs.options(method)
    TargetRunner(specs.model)  # it is tried out on the host
    model = to_simulated_gpu(specs.model)
    results, rows = [], []
    for name, own in (("ar", {}), (method, options)):
        spec, cache = Speculator(name, target=model, plan="fixed", deterministic=True, **own), PromptCache()
        results.append(spec.generate(PROMPTS[:1], max_new_tokens=10, eos_token_ids=[], cache=cache)[0].token_ids)
        results.append(spec.generate(PROMPTS, max_new_tokens=5, eos_token_ids=[])[1].token_ids)
        n = len(PROMPTS[0]) + 9
        rows.append(torch.cat([x[:, 0, :, :n].cpu().flatten() for x in (cache.store.keys, cache.store.values)]))
    assert results[:2] == results[2:]
    assert torch.equal(*rows)


def test_a_tree_has_no_more_rows_than_the_bucket(simulated_gpu, monkeypatch):
    monkeypatch.setattr(deterministic, "FIXED_BATCH_ROWS", 4)
    model = on_card()
    spec = Speculator("prompt-lookup", target=model, plan="fixed", deterministic=True, min_n=1)
    steps = list(spec.stream(PROMPTS, max_new_tokens=20, eos_token_ids=[]))
    assert max(step.drafted for step in steps) == 3


class ByPlace(torch.nn.Linear):
    """A product that gives the second half of the rows other bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return torch.cat([out[:, :32], out[:, 32:] + 1e-6], dim=1)


class ByNeighbours(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6 * x.amax()


@pytest.mark.parametrize("kind", [ByPlace, ByNeighbours])
def test_products_that_depend_on_a_rows_place_are_refused(kind):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), kind(8, 16))
    with pytest.raises(CapabilityError, match="deterministic"):
        check_linears(model, 64)
    check_linears(model[:1], 64)
