"""The target as its own drafter, and MagicDec: what its views hold, what is counted, what is refused.

That the output is the target's: tests/exact.
"""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.drafters.self_drafter import UNLIMITED, SelfDrafter, SelfOptions
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.engine.specpv import SpecPV, SpecPVOptions
from longdraft.errors import MemoryBudgetError
from longdraft.model.runner import TargetRunner
from longdraft.native.quantized_kv import INT4
from tests.support.events import run_to_end
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
SMALL = {"budget": 24, "window": 4}
SNAPKV = {"view": "snapkv", **SMALL}


@pytest.mark.parametrize("view", ["streaming", "snapkv", "chunks", "tokens"])
def test_a_view_of_everything_is_always_right(view):
    """Texts shorter than the budget: the draft is the target."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    results = Speculator("self", target=model, view=view, depth=3).generate(PROMPTS[1:], max_new_tokens=13)
    plain = Speculator("ar", target=model).generate(PROMPTS[1:], max_new_tokens=13)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert [r.mean_accepted_length for r in results] == [4.0] * 3


@pytest.mark.parametrize(
    ("options", "size", "dtype"),
    [
        ({}, 2048, torch.int8),
        ({"view_dtype": "int4"}, 2048, INT4),  # one option leaves the other's default alone
        ({"view_dtype": "float32"}, 2048, torch.float32),
        ({"budget": 100}, 100, torch.int8),
        ({"view": "snapkv"}, 512, torch.float32),
        ({"view": "all"}, UNLIMITED, torch.int8),
    ],
    ids=str,
)
def test_the_defaults_of_a_view(options, size, dtype):
    drafter = SelfDrafter(**options)
    runner = TargetRunner(tiny_model(vocab=11, dtype=torch.float32))
    drafter.bind(runner, runner.new_store(1, 64))
    assert (drafter.view.size, drafter.cache.store.dtype) == (size, dtype)


@pytest.mark.parametrize("length", [5, 65, 129])
def test_snapkvs_window_of_queries_whatever_the_pieces_of_the_prompt(length):
    """The prompt's last queries choose, also where a piece ends among them."""
    model, prompt = tiny_model(vocab=11, dtype=torch.float64), [(i * i) % 11 for i in range(length)]
    spec = Speculator("self", target=model, **SNAPKV, depth=2, plan="fixed")
    found = []
    for piece in (1024, 64):
        run = spec.stream([prompt], max_new_tokens=20, piece=piece)
        found.append([(step.token_ids, step.tree and step.tree.tokens) for step in run if step.mode != "prefill"])
    assert found[0] == found[1] and found[0]


def test_partial_verification_replaces_what_its_view_holds():
    """A view then holds rows that partial verification computed, until a full one replaces them."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    drafter, rows = SelfDrafter(budget=24, depth=3, view="chunks", chunk=4, window=4), []
    propose = drafter.propose

    def watched(texts, limit=None):
        trees = propose(texts, limit)
        sparse, full = drafter.cache.store, drafter.cache.full_store
        for slot in (s.slot for s in texts):
            n, m = sparse.lengths[slot], full.readable_len(slot)
            rows.append(n)
            for ours, theirs in ((sparse.keys, full.keys), (sparse.values, full.values)):
                distance = ours[:, slot, :, :n, None] - theirs[:, slot, :, None, :m]
                # Each row is one of the text as it is now.
                assert bool((distance.abs().amax(-1).amin(-1) == 0).all())
        return trees

    drafter.propose = watched
    verifier = SpecPV(SpecPVOptions(24, margin=6, sink=4, recent=4, block=4).view())
    texts = [Sequence(i, list(p), 30, sampler=Sampler(True, Sampling().processors())) for i, p in enumerate(PROMPTS)]
    run_to_end(Engine(TargetRunner(model), drafter, verifier), texts)
    assert sum(s.drafted for s in texts) > sum(s.accepted for s in texts) > 0 and max(rows) >= 24
    assert [s.partial_rounds > 0 for s in texts] == [True, False, True, False]  # of the short ones none


def test_views_that_do_not_fit_the_memory(free_memory):
    model = tiny_model(vocab=11)
    spec = Speculator("self", target=model, budget=400)
    run = spec.stream([PROMPTS[2]], max_new_tokens=300)
    free_memory(10**9, 10)
    with pytest.raises(MemoryBudgetError):
        list(run)


def test_sizes_that_were_not_given():
    names = ("view", "budget", "sink", "window", "chunk")
    for options, sizes in (
        (("streaming", None, None, None, None), (512, 16, 496)), (("streaming", None, 4, 30, None), (34, 4, 30)),
        (("streaming", 64, 4, 30, None), (64, 4, 30)), (("snapkv", None, None, None, None), (512, 16, 32)),
        (("chunks", 256, None, None, 6), (256, 18, 32)), (("tokens", 256, 0, 8, None), (256, 0, 8)),
    ):  # fmt: skip
        view = SelfOptions(**dict(zip(names, options, strict=True))).make_view()
        assert (view.size, view.sink, view.window) == sizes


def test_a_draft_that_was_given_up_costs_no_queries(forwards):
    """A planner to which a second token costs as much as a step gives a draft up. Then the view needs no queries."""
    options = {"budget": 64, "window": 16, "lookup": True}
    prompt = [[i % 11 for i in range(200)]]
    queries = {}
    for plan in ("fixed", {1: 1.0, 8: 8.0}):
        forwards.clear()
        spec = Speculator("self", target=tiny_model(context=512), plan=plan, **options)
        spec.generate(prompt, max_new_tokens=12, eos_token_ids=[])
        verified = [f for f in forwards if not f.prompt and f.taps is not None and f.context_length == 512]
        queries[str(plan)] = [bool(f.taps.queries) for f in verified]
    assert all(queries["fixed"]) and queries["{1: 1.0, 8: 8.0}"][-6:] == [False] * 6
