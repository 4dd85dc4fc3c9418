"""EAGLE-3 with retrieval: what is proposed.

That the output is the target's, and that nothing outlives a request: tests/exact.
"""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.drafts.kinds import KINDS
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Draws, Sampler
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from tests.drafters.watching import Watching
from tests.support.drafts import random_draft, random_eagle3
from tests.support.events import decoded
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [i * i % 11 for i in range(70)], [8]]
# A working cache that is soon smaller than the text.
SMALL = {"chunk": 2, "chunks": 3, "every": 2, "sink": 2, "recent": 4}
TREE = {"widths": (3, 3, 2)}


def five_layers(**over):
    """As many as a random EAGLE-3 draft reads."""
    return tiny_model(layers=5, vocab=11, **over)


def tokens(results):
    return [r.token_ids for r in results]


def drafter(where, model, **options):
    kind = KINDS["eagle3"]
    return kind.drafter(kind.load(random_eagle3(where, model)), **TREE, **options)


def proposals(drafter, model, prompts, n=24, sampling=None):
    """Every tree that is proposed in a run."""
    watching = Watching(drafter, text_of=lambda s: (s.index, len(s.output)))
    sampling = sampling or Sampling()
    sequences = [Sequence(i, list(p), n, greedy=sampling.greedy) for i, p in enumerate(prompts)]
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    samplers = [Sampler(sampling.greedy, sampling.processors(), Draws(g)) for g in generators]
    for s, sampler in zip(sequences, samplers, strict=True):
        s.sampler = sampler
    decoded(Engine(TargetRunner(model), watching), sequences)
    return [(*place, tree) for place, tree in watching.rounds]


def shapes(found):
    return [(i, n, tree.tokens, tree.parents) for i, n, tree in found]


def close(a, b):
    return all(x.log_probs == pytest.approx(y.log_probs, abs=1e-9) for (*_, x), (*_, y) in zip(a, b, strict=True))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_a_working_cache_that_covers_the_text_proposes_what_the_draft_does_without(tmp_path, sampling):
    model = five_layers(dtype=torch.float64)
    plain = proposals(drafter(tmp_path, model), model, PROMPTS, 30, sampling)
    sizes = {"chunk": 2, "chunks": 60, "every": 2, "sink": 2, "recent": 4}
    covering = proposals(drafter(tmp_path, model, retrieval=True, **sizes), model, PROMPTS, 30, sampling)
    assert shapes(plain) == shapes(covering) and close(plain, covering)
    # And one that does not cover it says something else, or all of this would mean nothing.
    other = proposals(drafter(tmp_path, model, retrieval=True, **SMALL), model, PROMPTS, 30, sampling)
    assert shapes(plain) != shapes(other)


def test_queries_are_asked_for_by_retrieval_alone(tmp_path):
    model = five_layers()
    runner = TargetRunner(model)
    assert not drafter(tmp_path, model).query_layers(runner)
    assert drafter(tmp_path, model, retrieval=True, **SMALL).query_layers(runner)


def test_nothing_is_tapped_where_nobody_asks(tmp_path, forwards):
    model = five_layers()
    spec = Speculator("longspec", target=model, draft=random_draft(tmp_path, model), **TREE)
    spec.generate([PROMPTS[2]], max_new_tokens=9)
    assert forwards and not any(f.taps.queries for f in forwards if f.taps is not None)


def test_specpv_drafts_with_retrieval(tmp_path):
    """With a budget that covers the text, it is exact too."""
    model = five_layers(dtype=torch.float64)
    options = {"draft": random_eagle3(tmp_path, model), "drafter": "eagle3", "retrieval": True, **TREE}
    sizes = {"sink": 4, "recent": 4, "block": 4, "margin": 6, "chunk": 2, "chunks": 4, "every": 2}
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    whole = Speculator("specpv", target=model, budget=200, **options, **sizes)
    results = whole.generate(PROMPTS, max_new_tokens=24)
    assert tokens(results) == tokens(want)
    assert sum(r.drafted for r in results) > sum(r.accepted for r in results) > 0
    retrieval = whole.recipe().drafter().retrieval  # the sizes of both are one view's; the chunks are the draft's
    assert (retrieval.view.chunk, retrieval.view.chunks, retrieval.refresh.interval) == (2, 4, 2)
    # On a partial cache the text is another one, and the same one whatever is drafted between its refreshes.
    part = Speculator("specpv", target=model, budget=8, **options, **sizes)
    results = part.generate(PROMPTS, max_new_tokens=24)
    assert tokens(results) != tokens(want) and results[0].partial_rounds > 0
    assert sum(r.drafted for r in results) > sum(r.accepted for r in results) > 0


def test_the_method_retrieves_and_grows_an_opt_tree(tmp_path):
    model = five_layers()
    draft = random_eagle3(tmp_path, model)
    spec = Speculator("specextend-eagle3", target=model, draft=draft)
    made = spec.recipe().drafter()
    assert made.retrieval.view.chunks == 64 and made.retrieval.refresh.interval == 8 and made.tree.name == "opt"
    spec = Speculator("specextend-eagle3", target=model, draft=draft, widths=(2, 2), chunks=16)
    assert spec.recipe().drafter().tree.children == (2, 2)
