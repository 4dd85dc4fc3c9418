"""Drafting in levels, end to end: each level writes its own text, and the output is the target's."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Sampling, Speculator
from longdraft.drafters import self_drafter, small_lm_cache
from longdraft.drafters.base import NoDrafter
from longdraft.drafters.nested import NestedDrafter
from longdraft.drafters.ngram import NGramDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.self_small_lm import SparseLMDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.small_lm_draft import SmallLMDraft
from longdraft.engine import Engine
from longdraft.planning import choice
from longdraft.sequence import Sequence
from longdraft.target.runner import TargetRunner
from longdraft.verify.sampling import Picker
from tests.drafts import random_draft, random_eagle3, small_lm
from tests.test_self_exact import DEAR, DRAWN, FREE, SOME, check_distribution, chi_square, plain, tokens
from tests.tiny import FAMILIES, tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
VIEW = {"budget": 24, "chunk": 4, "sink": 4, "window": 4}
LEVEL = {f"level_{name}": size for name, size in VIEW.items()}
TRIFORCE = {**VIEW, "streamed": 30}
DRAWN_HARD = Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)
drawn_too = pytest.mark.parametrize("sampling", [Sampling(), DRAWN_HARD], ids=["greedy", "drawn"])


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(self_drafter, "FRESH", 6)
    monkeypatch.setattr(small_lm_cache, "FRESH", 8)
    monkeypatch.setattr(small_lm_cache, "PIECE", 16)


def six_layers(**over):
    return tiny_model(layers=6, vocab=11, dtype=torch.float64, **over)


# What drafts for the level: the method `nested` with these, and for some a draft.
KINDS = [
    "ar",
    "prompt-lookup",
    "longspec",
    "longspec-retrieval",
    "eagle3",
    "small-lm",
    "specextend",
    "self",
    "triforce",
]


def options_for(kind, folder, model):
    """Of the method `nested`, for a drafter of this kind."""
    if kind.startswith("longspec"):
        retrieval = {"retrieval": True, "chunk": 2, "chunks": 3, "every": 2, "sink": 2, "recent": 4}
        drafting = {"draft": random_draft(folder, model, window=16), "widths": (2, 2)}
        return drafting | (retrieval if kind.endswith("retrieval") else {})
    if kind == "eagle3":
        return {"draft": random_eagle3(folder, model), "depth": 2, "top_k": 2}
    small = {"draft": small_lm(folder)} if kind in ("small-lm", "specextend", "triforce") else {}
    sizes = {
        "small-lm": {"depth": 2, "top_k": 2},
        "specextend": {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2, "nodes": 6},
        "self": {"view": "streaming", "budget": 12, "sink": 2, "depth": 2},
        "triforce": {"drafter": "triforce", **TRIFORCE, "budget": 20, "streamed": 20, "depth": 3},
    }
    named = {} if kind in ("small-lm", "specextend", "triforce") else {"drafter": kind}
    return named | small | sizes.get(kind, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_triforce_writes_what_plain_decoding_writes(tmp_path, family):
    model = tiny_model(family, vocab=11)
    spec = Speculator("triforce", target=model, draft=small_lm(tmp_path), **TRIFORCE)
    results = spec.generate(PROMPTS, max_new_tokens=40)
    assert tokens(results) == tokens(plain(model))
    assert (results[0].method, results[0].exact) == ("triforce", True) and sum(r.accepted for r in results) > 20


@pytest.mark.parametrize("kind", KINDS)
@drawn_too
def test_whoever_drafts_the_output_is_the_targets_and_a_levels_text_its_own(tmp_path, kind, sampling):
    """So what the target accepts does not depend on who drafts for the level. Ragged batches, one by one alike."""
    model = six_layers()
    spec = Speculator("nested", target=model, **options_for(kind, tmp_path, model), **LEVEL)
    alone = Speculator("nested", target=model, drafter="ar", **LEVEL)  # the level decodes by itself
    together = spec.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    level = alone.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    assert [(r.token_ids, r.accepted, r.rounds) for r in together] == [
        (r.token_ids, r.accepted, r.rounds) for r in level
    ]
    for i, prompt in enumerate(PROMPTS):
        one = spec.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == one.token_ids
        assert together[i].token_ids == tokens(plain(model, [prompt], 30, sampling=sampling, seed=5 + i))[0]
        assert (together[i].rounds, together[i].accepted) == (one.rounds, one.accepted)


def run(drafter, model, prompts, n=30, cache=None, sampling=None, seed=0):
    sampling = sampling or Sampling()
    sequences = [Sequence(i, list(p), n, greedy=sampling.greedy) for i, p in enumerate(prompts)]
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    pickers = [Picker(sampling.greedy, sampling.processors(), g) for g in generators]
    engine = Engine(TargetRunner(model), drafter, sequences, pickers, cache=cache or PromptCache())
    list(engine.steps(engine.open()))
    return sequences


def test_fewer_forwards_of_the_level_where_its_drafter_is_good():
    """A level with a view of everything, drafted for by another one: it needs a forward for several tokens."""
    model = six_layers()
    counts = []
    for inner in (NoDrafter(), SelfDrafter(budget=100, depth=3)):
        drafter = NestedDrafter(inner, SelfDrafter(budget=400), 6)
        (s,) = run(drafter, model, [PROMPTS[0]], 43)
        assert s.output == tokens(plain(model, [PROMPTS[0]], 43))[0] and s.rounds == 6
        counts.append(drafter.forwards)
    assert counts == [36, 12]


def test_three_levels_and_a_small_model_as_one(tmp_path):
    model = six_layers()
    draft = SmallLMDraft.load(small_lm(tmp_path))
    lookup = NestedDrafter(NGramDrafter(), SparseLMDrafter(draft, budget=24, window=4), 3)
    streaming = NestedDrafter(lookup, SelfDrafter("streaming", budget=24), 4)
    drafter = NestedDrafter(streaming, SelfDrafter("chunks", **VIEW | {"budget": 40}), 6)
    sequences = run(drafter, model, PROMPTS, 40)
    assert [s.output for s in sequences] == tokens(plain(model)) and sum(s.accepted for s in sequences) > 40
    again = run(drafter, model, PROMPTS, 40)
    assert [(s.output, s.accepted) for s in again] == [(s.output, s.accepted) for s in sequences]
    # The level under the target is what counts.
    alone = run(NestedDrafter(NoDrafter(), SelfDrafter("chunks", **VIEW | {"budget": 40}), 6), model, PROMPTS, 40)
    assert [s.accepted for s in alone] == [s.accepted for s in sequences]


def test_a_level_that_is_a_small_model_of_fewer_tokens(tmp_path):
    """What it does not know it never says; drawn and picked."""
    model = six_layers()
    draft = SmallLMDraft.load(small_lm(tmp_path))
    for sampling in (Sampling(), DRAWN_HARD):
        level = SparseLMDrafter(draft, budget=24, window=4)
        bind = level.bind

        def trimmed(runner, store, level=level, bind=bind):
            bind(runner, store)
            own = level._bound
            level._bound = type(own)(own.runner, torch.arange(11), own.trained_length)

        level.bind = trimmed
        sequences = run(NestedDrafter(NGramDrafter(), level), model, PROMPTS, 20, sampling=sampling)
        want = [plain(model, [p], 20, sampling=sampling, seed=i)[0].token_ids for i, p in enumerate(PROMPTS)]
        assert [s.output for s in sequences] == want


def test_nothing_of_a_level_is_left_in_the_full_store():
    """The KV after a run is that of one forward over the text, and no row counts as shown."""
    model = six_layers()
    cache = PromptCache()
    drafter = NestedDrafter(NGramDrafter(), SelfDrafter("chunks", **VIEW))
    committed = []
    keep = SelfDrafter.keep

    def kept(self, sequence, path):
        before = list(self.full.lengths)
        keep(self, sequence, path)
        committed.append(self.full.lengths == before)

    drafter.level.keep = kept.__get__(drafter.level)
    (s,) = run(drafter, model, [PROMPTS[2]], 40, cache)
    store, runner = cache.store, TargetRunner(model)
    assert committed and all(committed) and store.provisional == [0] and s.drafted > s.accepted > 0
    n = store.lengths[0]
    other = runner.new_store(1, n)
    runner.forward([s.tokens[:n]], other, [0], logits="none")
    for own, exact in ((store.keys, other.keys), (store.values, other.values)):
        torch.testing.assert_close(own[:, 0, :, :n], exact[:, 0, :, :n], rtol=0, atol=1e-4)


def test_two_requests_equal_two_fresh_ones(tmp_path):
    model = six_layers()
    options = {"draft": small_lm(tmp_path), **TRIFORCE}
    spec = Speculator("triforce", target=model, **options)
    for prompts in (PROMPTS[:2], PROMPTS[2:], PROMPTS[:2]):
        fresh = Speculator("triforce", target=model, **options).generate(prompts, max_new_tokens=30)
        again = spec.generate(prompts, max_new_tokens=30)
        assert [(r.token_ids, r.accepted, r.rounds) for r in again] == [
            (r.token_ids, r.accepted, r.rounds) for r in fresh
        ]


def test_a_kept_cache_and_an_offloaded_one(tmp_path):
    model = six_layers()
    options = {"draft": small_lm(tmp_path), **TRIFORCE}
    spec, cache = Speculator("triforce", target=model, **options), PromptCache()
    for prompt in (PROMPTS[2], PROMPTS[2][:50], [*PROMPTS[2], 3, 4], PROMPTS[0]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0]
        assert kept.token_ids == tokens(plain(model, [prompt], 20))[0]
    there = Speculator("triforce", target=model, offload="disk", **options).generate(PROMPTS, max_new_tokens=20)
    here = spec.generate(PROMPTS, max_new_tokens=20)
    assert [(r.token_ids, r.accepted) for r in there] == [(r.token_ids, r.accepted) for r in here]


def test_it_ends_where_plain_decoding_ends(tmp_path):
    model = six_layers()
    wanted = plain(model, PROMPTS, 30)
    spec = Speculator("triforce", target=model, draft=small_lm(tmp_path), **TRIFORCE)
    for eos in sorted(set(wanted[0].token_ids))[:3]:
        for got, want in zip(spec.generate(PROMPTS, max_new_tokens=30, eos_token_ids=[eos]), wanted, strict=True):
            end = want.token_ids.index(eos) + 1 if eos in want.token_ids else 30
            assert got.token_ids == want.token_ids[:end]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_budgets_smaller_than_the_chain_is_long(tmp_path, n):
    model = six_layers()
    results = Speculator("triforce", target=model, draft=small_lm(tmp_path), **TRIFORCE).generate(
        PROMPTS, max_new_tokens=n
    )
    assert tokens(results) == tokens(plain(model, n=n))


def test_specpv_takes_it_for_a_drafter(tmp_path):
    model = six_layers()
    sizes = {"sink": 4, "recent": 4, "block": 4, "margin": 6, "budget": 24, "chunk": 4, "window": 4, "streamed": 30}
    spec = Speculator("specpv-exact", target=model, drafter="triforce", draft=small_lm(tmp_path), **sizes)
    results = spec.generate(PROMPTS, max_new_tokens=40)
    assert tokens(results) == tokens(plain(model)) and sum(r.rolled_back for r in results) > 0


@pytest.mark.parametrize("table", [FREE, SOME, DEAR], ids=["free", "some", "dear"])
@drawn_too
def test_planned_rounds(tmp_path, monkeypatch, table, sampling):
    monkeypatch.setattr(choice, "table_for", lambda runner, progress=None, seconds=None: table)
    model = six_layers()
    spec = Speculator("triforce", target=model, plan="auto", draft=small_lm(tmp_path), **TRIFORCE)
    results = spec.generate(PROMPTS, max_new_tokens=40, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        assert results[i].token_ids == tokens(plain(model, [prompt], 40, sampling=sampling, seed=5 + i))[0]
    assert (sum(r.drafted for r in results) > 0) or table is not FREE


# --- distributions ---


@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_what_is_emitted_follows_the_target(tmp_path, sampling):
    model = tiny_model(vocab=4, layers=1)
    sizes = {"budget": 6, "chunk": 1, "sink": 1, "window": 2, "streamed": 20, "depth": 3, "drafted": 2}
    spec = Speculator("triforce", target=model, draft=small_lm(tmp_path, 4, layers=1), **sizes)
    check_distribution(spec, model, sampling, [1, 2, 3, 1, 2, 0, 1] * 2)


def law(model, prompt, rows, sampling):
    """[root, one, two]: how likely the model, on these rows of the prompt's KV, says two tokens after a root."""
    runner, n, size = TargetRunner(model), len(prompt), model.config.vocab_size
    full, part = runner.new_store(1, n), runner.new_store(1, len(rows) + 2)
    runner.forward([prompt], full, [0], logits="none")
    for source, target in ((full.keys, part.keys), (full.values, part.values)):
        target[:, 0, :, : len(rows)] = source[:, 0, :, rows]
    part.lengths[0] = len(rows)

    def following(*path):
        logits = runner.forward([list(path)], part, [0], bases=[n]).logits[0, -1:]
        return torch.softmax(sampling.processors()(torch.tensor([[*prompt, *path]]), logits), -1)[0].double()

    return torch.stack(
        [torch.stack([following(r)[t] * following(r, t) for t in range(size)]) for r in range(size)]
    )  # fmt: skip


@pytest.mark.parametrize("sampling", DRAWN, ids=str)
@pytest.mark.parametrize("inner", [NoDrafter, lambda: NGramDrafter(min_n=1), lambda: SelfDrafter("streaming", 2, 0, 2)])
def test_what_a_level_emits_follows_the_level(monkeypatch, sampling, inner):
    """Chi-square of the two tokens that it proposes after the target's first, against its own law on its own rows."""
    monkeypatch.setattr(self_drafter, "FRESH", 0)
    size, batch = 4, 500
    model = tiny_model(vocab=size, layers=1)
    prompt = [1, 2, 3, 1, 2, 0, 1] * 3
    counts = torch.zeros(size, size, size, dtype=torch.double)
    for turn in range(2):
        drafter = NestedDrafter(inner(), SelfDrafter("streaming", 4, 1, 3), 2)
        propose, first = drafter.propose, []

        def recorded(sequences, budget=None, propose=propose, first=first):
            trees = propose(sequences, budget)
            first.append([tree.tokens for tree in trees])
            return trees

        drafter.propose = recorded
        run(drafter, model, [prompt] * batch, 4, sampling=sampling, seed=turn * batch)
        for root, one, two in first[0]:
            counts[root, one, two] += 1
    own = law(model, prompt, [0, 18, 19, 20], sampling)
    chi_square(counts.flatten(), (own * counts.sum((1, 2), keepdim=True)).flatten())
    # The target's own is another one, or this would say nothing.
    assert (law(model, prompt, list(range(21)), sampling) - own).abs().sum((1, 2)).max() > 0.2


def test_a_level_draws_with_the_draws_to_come():
    """Where it sees what the target sees, all that it drew is drawn."""
    model = six_layers()
    drafter = NestedDrafter(NGramDrafter(), SelfDrafter(budget=400), 5)
    (s,) = run(drafter, model, [PROMPTS[0]], 37, sampling=DRAWN_HARD)
    assert s.rounds == 6 and s.accepted == 30


# --- what makes no sense ---


def test_nestings_that_make_no_sense(tmp_path):
    model = six_layers()
    level = SelfDrafter("chunks", **VIEW)
    with pytest.raises(ValueError, match="NGramDrafter cannot verify what another one drafts"):
        NestedDrafter(level, NGramDrafter())
    with pytest.raises(ValueError, match="SmallLMDrafter cannot verify"):
        NestedDrafter(NGramDrafter(), SmallLMDrafter(SmallLMDraft.load(small_lm(tmp_path))))
    with pytest.raises(ValueError, match="acceptance=residual has no meaning under a level"):
        NestedDrafter(SelfDrafter(acceptance="residual"), level)
    with pytest.raises(ValueError, match="acceptance=residual"):
        Speculator("nested", target=model, draft=tmp_path, acceptance="residual", **LEVEL)
    for under in (SelfDrafter(budget=64), NestedDrafter(NGramDrafter(), SelfDrafter(budget=64))):
        with pytest.raises(ValueError, match="give it a budget above 64 rows, not 24"):
            NestedDrafter(under, level)
    with pytest.raises(ValueError, match="depth must be a whole number of at least 1"):
        NestedDrafter(NGramDrafter(), level, 0)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("triforce", {"budget": 40}, r"at least sink \+ window"),
        ("triforce", {"depth": 0}, "depth must be"),
        ("triforce", {"drafted": 0}, "drafted must be"),
        ("triforce", {"streamed": 16}, "streamed must be a whole number of at least 17"),
        ("triforce", {"streamed": 510}, "was trained for|were trained|than the 512 tokens"),
        ("triforce", {"view": "chunks"}, "no option view"),
        ("nested", {"level_budget": 40}, r"at least sink \+ window"),
        ("nested", {"level_view": "some"}, "view must be"),
        ("nested", {"level_depth": 0}, "depth must be"),
        ("nested", {"drafter": "nested"}, "drafter must be one of"),
        ("nested", {"drafter": "self"}, "the draft is for small-lm, not for self"),
        ("nested", {"level_depths": 3}, "no option level_depths"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(tmp_path, method, options, says):
    with pytest.raises(ValueError, match=says):
        Speculator(method, target=six_layers(), draft=small_lm(tmp_path), **options)
