"""Drafting in levels: what each level writes, what is left of it. That the output is the target's: tests/exact."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Sampling, Speculator
from longdraft.drafters import self_drafter
from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.nested import NestedDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.draws import Draws
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import TrueCache
from tests import chi_square
from tests.drafters.watching import Watching
from tests.drafts import small_lm
from tests.events import decoded
from tests.forwards import forward
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
VIEW = {"budget": 24, "chunk": 4, "sink": 4, "window": 4}
LEVEL = {f"level_{name}": size for name, size in VIEW.items()}
DRAWN_HARD = Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)


def three_layers():
    return tiny_model(vocab=11, dtype=torch.float64)


def tokens(results):
    return [r.token_ids for r in results]


def plain(model, prompts=PROMPTS, n=40, **settings):
    return Speculator("ar", target=model).generate(prompts, max_new_tokens=n, **settings)


def run(drafter, model, prompts, n=30, cache=None, sampling=None, seed=0):
    sampling = sampling or Sampling()
    sequences = [Sequence(i, list(p), n, greedy=sampling.greedy) for i, p in enumerate(prompts)]
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    samplers = [Sampler(sampling.greedy, sampling.processors(), Draws(g)) for g in generators]
    for s, sampler in zip(sequences, samplers, strict=True):
        s.sampler = sampler
    decoded(Engine(TargetRunner(model), drafter, cache=cache or PromptCache()), sequences)
    return sequences


def test_fewer_forwards_of_the_level_where_its_drafter_is_good():
    """A level with a view of everything, drafted for by another one: it needs a forward for several tokens."""
    model = three_layers()
    counts = []
    for inner in (NoDrafter(), SelfDrafter(budget=100, depth=3)):
        drafter = NestedDrafter(inner, SelfDrafter(budget=400), 6)
        (s,) = run(drafter, model, [PROMPTS[0]], 43)
        assert s.output == tokens(plain(model, [PROMPTS[0]], 43))[0] and s.rounds == 6
        counts.append(drafter.forwards)
    assert counts == [36, 12]


def test_three_levels():
    model = three_layers()
    streaming = NestedDrafter(SuffixDrafter(), SelfDrafter(view="streaming", budget=24), 4)
    drafter = NestedDrafter(streaming, SelfDrafter(view="chunks", **VIEW | {"budget": 40}), 6)
    sequences = run(drafter, model, PROMPTS, 14)
    assert [s.output for s in sequences] == tokens(plain(model, n=14)) and sum(s.accepted for s in sequences) > 10
    # The level under the target is what counts.
    alone = run(NestedDrafter(NoDrafter(), SelfDrafter(view="chunks", **VIEW | {"budget": 40}), 6), model, PROMPTS, 14)
    assert [s.accepted for s in alone] == [s.accepted for s in sequences]


def test_nothing_of_a_level_is_left_in_the_full_store(monkeypatch):
    """The KV after a run is that of one forward over the text, and no row counts as shown."""
    model = three_layers()
    cache = PromptCache()
    drafter = NestedDrafter(SuffixDrafter(), SelfDrafter(view="chunks", **VIEW))
    unchanged, keep = [], TrueCache.keep

    def kept(self, slot, path):
        before = list(self.full.lengths)
        keep(self, slot, path)
        unchanged.append(self.full.lengths == before)

    monkeypatch.setattr(TrueCache, "keep", kept)
    (s,) = run(drafter, model, [PROMPTS[2]], 40, cache)
    store, runner = cache.store, TargetRunner(model)
    assert unchanged and all(unchanged)
    assert (
        len(s.tokens) - 1 <= store.lengths[0] <= len(s.tokens)
        and store.unverified == [0]
        and s.drafted > s.accepted > 0
    )
    n = store.lengths[0]
    other = runner.new_store(1, n)
    forward(runner, [s.tokens[:n]], other, [0], logits="none")
    for own, exact in ((store.keys, other.keys), (store.values, other.values)):
        torch.testing.assert_close(own[:, 0, :, :n], exact[:, 0, :, :n], rtol=0, atol=1e-4)


def law(model, prompt, rows, sampling):
    """[root, one, two]: how likely the model, on these rows of the prompt's KV, says two tokens after a root."""
    runner, n, size = TargetRunner(model), len(prompt), model.config.vocab_size
    full, part = runner.new_store(1, n), runner.new_store(1, len(rows) + 2)
    forward(runner, [prompt], full, [0], logits="none")
    for source, target in ((full.keys, part.keys), (full.values, part.values)):
        target[:, 0, :, : len(rows)] = source[:, 0, :, rows]
    part.lengths[0] = len(rows)

    def following(*path):
        logits = forward(runner, [list(path)], part, [0], bases=[n]).logits[0, -1:]
        return torch.softmax(sampling.processors()(torch.tensor([[*prompt, *path]]), logits), -1)[0].double()

    return torch.stack(
        [torch.stack([following(r)[t] * following(r, t) for t in range(size)]) for r in range(size)]
    )  # fmt: skip


def first_proposals(model, inner, prompt, batch, sampling):
    """Root and the two tokens that a level proposes behind it, sequence by sequence; ``inner`` drafts for it."""
    watching = Watching(NestedDrafter(inner, SelfDrafter(view="streaming", budget=4, sink=1, window=3), 2))
    run(watching, model, [prompt] * batch, 4, sampling=sampling)
    return [tuple(tree.tokens) for _, tree in watching.rounds[:batch]]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.2, top_p=0.9)], ids=str)
@pytest.mark.slow
def test_what_a_level_emits_follows_the_level(monkeypatch, sampling):
    """Chi-square of the two tokens that it proposes after the target's first, against its own law on its own rows.

    Whoever drafts for it: the same seeds give the same tokens.
    """
    monkeypatch.setattr(self_drafter, "FRESH", 0)
    model, prompt, counts = tiny_model(vocab=4, layers=1), [1, 2, 3, 1, 2, 0, 1] * 3, torch.zeros(4, 4, 4)
    found = first_proposals(model, NoDrafter(), prompt, 1000, sampling)
    for root, one, two in found:
        counts[root, one, two] += 1
    own = law(model, prompt, [0, 18, 19, 20], sampling)
    assert chi_square.p_value(counts, own * counts.sum((1, 2), keepdim=True)) > 0.01
    # The target's own is another one, or this would say nothing.
    theirs = law(model, prompt, list(range(21)), sampling)
    assert chi_square.p_value(counts, theirs * counts.sum((1, 2), keepdim=True)) < 1e-6
    for inner in (SuffixDrafter(min_n=1), SelfDrafter(view="streaming", budget=2, sink=0, window=2)):
        assert first_proposals(model, inner, prompt, 100, sampling) == found[:100]


def test_a_level_draws_with_the_draws_to_come():
    """Where it sees what the target sees, all that it drew is drawn."""
    model = three_layers()
    drafter = NestedDrafter(SuffixDrafter(), SelfDrafter(budget=400), 5)
    (s,) = run(drafter, model, [PROMPTS[0]], 37, sampling=DRAWN_HARD)
    assert s.rounds == 6 and s.accepted == 30


def test_nestings_that_make_no_sense(tmp_path):
    level = SelfDrafter(view="chunks", **VIEW)
    with pytest.raises(ValueError, match="SuffixDrafter"):
        NestedDrafter(level, SuffixDrafter())
    with pytest.raises(ValueError, match="SmallLMDrafter"):
        NestedDrafter(SuffixDrafter(), SmallLMDrafter(SmallLMDraft.load(small_lm(tmp_path))))
    for under in (SelfDrafter(budget=64), NestedDrafter(SuffixDrafter(), SelfDrafter(budget=64))):
        with pytest.raises(ValueError, match="budget"):
            NestedDrafter(under, level)
    with pytest.raises(ValueError, match="depth"):
        NestedDrafter(SuffixDrafter(), level, 0)
