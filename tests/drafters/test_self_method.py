"""The target as its own drafter, and MagicDec: what its views hold, what is counted, what is refused.

That the output is the target's: tests/exact.
"""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Sampling, Speculator
from longdraft.drafters.self_drafter import SelfDrafter, SelfOptions
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.engine.specpv import SpecPV, SpecPVOptions
from longdraft.errors import MemoryBudgetError
from longdraft.model.runner import TargetRunner
from tests.support.events import run_to_end
from tests.support.forwards import forward
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
SMALL = {"budget": 24, "window": 4}
STREAMING = {"view": "streaming", "budget": 24, "sink": 4}
SNAPKV = {"view": "snapkv", **SMALL}
CHUNKS = {"view": "chunks", "chunk": 4, "sink": 4, **SMALL}
TOKENS = {"view": "tokens", "sink": 2, **SMALL}
VIEWS = [STREAMING, SNAPKV, CHUNKS | {"refresh": 2}, TOKENS | {"refresh": 3}]
views = pytest.mark.parametrize("view", VIEWS, ids=str)


def tokens(results):
    return [r.token_ids for r in results]


def plain(model, prompts=PROMPTS, n=40, **settings):
    return Speculator("ar", target=model).generate(prompts, max_new_tokens=n, **settings)


@pytest.mark.parametrize("view", ["streaming", "snapkv", "chunks", "tokens"])
def test_a_view_of_everything_is_always_right(view):
    """Texts shorter than the budget: the draft is the target."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    results = Speculator("self", target=model, view=view, depth=3).generate(PROMPTS, max_new_tokens=21)
    assert tokens(results) == tokens(plain(model, n=21))
    assert [r.mean_accepted_length for r in results] == [4.0] * 4


def run(drafter, model, prompts, n=30, cache=None, **engine):
    sequences = [Sequence(i, list(p), n, sampler=Sampler(True, Sampling().processors())) for i, p in enumerate(prompts)]
    run_to_end(Engine(TargetRunner(model), drafter, cache=cache or PromptCache(), **engine), sequences)
    return sequences


@views
def test_only_verifications_write_to_the_full_store(view):
    """After a run it holds the KV of one forward over the text, but for rounding. On a view it would be another one."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    cache = PromptCache()
    (s,) = run(SelfDrafter(**view), model, [PROMPTS[2]], 40, cache)
    store, runner = cache.store, TargetRunner(model)
    n = store.lengths[0]
    assert n >= len(s.tokens) - 1 and s.drafted > s.accepted > 0 and store.num_unverified == [0]
    other = runner.new_store(1, n)
    forward(runner, [s.tokens[:n]], other, [0], logits="none")
    for own, exact in ((store.keys, other.keys), (store.values, other.values)):
        torch.testing.assert_close(own[:, 0, :, :n], exact[:, 0, :, :n], rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [5, 64, 65, 127, 129])
def test_snapkvs_window_of_queries_whatever_the_pieces_of_the_prompt(length):
    """The prompt's last queries choose, also where a piece ends among them."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    prompt = [(i * i) % 11 for i in range(length)]
    seen = []
    for chunk in (1024, 64):
        drafter = SelfDrafter(**SNAPKV, depth=2)
        told, observe = [], drafter.observe
        drafter.observe = lambda event, told=told, observe=observe: (told.append(event), observe(event))[1]
        (s,) = run(drafter, model, [prompt], 20, chunk_size=chunk)
        seen.append(told[0].queries[0].shape[1])
        seen.append((s.output, s.accepted))
    assert seen[0] == seen[2] == min(length, 4) and seen[1] == seen[3]


@pytest.mark.parametrize(("budget", "reads"), [(24, True), (2000, False)])
def test_queries_are_read_where_rows_are_chosen(budget, reads):
    """Not while a text fits the view: the prompt's own are there when it no longer does."""
    drafter = SelfDrafter(view="chunks", budget=budget, window=4, chunk=4, sink=4)
    told, observe = [], drafter.observe
    drafter.observe = lambda event: (told.append(event), observe(event))[1]
    run(drafter, tiny_model(vocab=11, dtype=torch.float64), [PROMPTS[2]], 20)
    first, *rounds = told
    assert first.queries and rounds and all(bool(event.queries) == reads for event in rounds)


@pytest.mark.parametrize("view", [{"view": "streaming"}, {"view": "chunks", "chunk": 4, "window": 4}], ids=str)
def test_specpv_takes_it_for_a_drafter(view):
    """Its views then hold rows that partial verification computed, until a full one replaces them."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    drafter, rows = SelfDrafter(budget=24, depth=3, **view), []
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
    schedule = SpecPV(SpecPVOptions(24, margin=6, sink=4, recent=4, block=4).view())
    texts = run(drafter, model, PROMPTS, 30, verifier=schedule)
    assert sum(s.drafted for s in texts) > sum(s.accepted for s in texts) > 0 and max(rows) >= 24
    assert [s.partial_rounds > 0 for s in texts] == [True, False, True, False]  # of the short ones none


def test_views_that_do_not_fit_the_memory(free_memory):
    model = tiny_model(vocab=11)
    spec = Speculator("self", target=model, budget=400)
    run = spec.stream([PROMPTS[2]], max_new_tokens=300)
    free_memory(10**9, 10)
    with pytest.raises(MemoryBudgetError):
        list(run)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("streaming", None, None, None, None), (512, 16, 496)),
        (("streaming", 100, None, None, None), (100, 16, 84)),
        (("streaming", None, 4, 30, None), (34, 4, 30)),
        (("streaming", 64, 4, 30, None), (64, 4, 30)),
        (("snapkv", None, None, None, None), (512, 16, 32)),
        (("chunks", 256, None, None, 6), (256, 18, 32)),
        (("tokens", 256, 0, 8, None), (256, 0, 8)),
        (("quest", 256, None, None, None), (256, 16, 32)),
        (("minmax", 256, None, None, 6), (256, 18, 32)),
        (("snapkv", 256, None, None, 6), (256, 18, 32)),
    ],
    ids=str,
)
def test_sizes_that_were_not_given(options, sizes):
    view = SelfOptions(**dict(zip(("view", "budget", "sink", "window", "chunk"), options, strict=True))).make_view()
    assert (view.size, view.sink, view.window) == sizes
