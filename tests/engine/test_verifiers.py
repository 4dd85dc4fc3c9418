"""Verifiers on tiny models: properties of all of them, and SpecPV's partial verification and refreshes."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from longdraft import Sampling
from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.eagle3 import Eagle3Draft, Eagle3Drafter
from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.triforce import TriForceDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.drafter import Drafter, DraftNeeds
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import SampleNoise, Sampler
from longdraft.engine.sequence import Sequence
from longdraft.engine.session import eos_rule
from longdraft.engine.specpv import SpecPV, SpecPVOptions
from longdraft.engine.verifier import Verifier
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.views.view import View
from tests.support.drafts import random_draft, random_eagle3, small_lm
from tests.support.events import prefill_event, run_to_end
from tests.support.forwards import forward
from tests.support.tiny import tiny_model

SMALL = {"sink": 4, "recent": 4, "block": 4, "margin": 6}
PROMPTS = [[(7 * i * i + 3 * i) % 11 for i in range(n)] for n in (70, 33, 8)]


def sizes(budget: int = 8, **over) -> View:
    return SpecPVOptions(budget, **SMALL | over).view()


def eager() -> SpecPV:
    """Verifies on a partial cache from the first token on, which holds the full context."""
    return SpecPV(sizes(200), min_context=0)


VERIFIERS = {
    "full": Verifier,
    "covered": lambda: SpecPV(sizes(200)),  # never verifies partially, as the budget covers the context
    "specpv": lambda: SpecPV(sizes()),
    "eager": eager,
}
MODES = {name: {"full"} if name in ("full", "covered") else {"refresh", "partial"} for name in VERIFIERS}
each_verifier = pytest.mark.parametrize("name", ["full", "specpv", "eager"])


def run(model, verifier, drafter=None, prompts=PROMPTS, n=28, sampling=None, eos=()):
    """Decodes with a verifier. Returns the sequences with their round counts, the steps, and the engine."""
    sampling = sampling or Sampling()
    sequences = []
    for i, prompt in enumerate(prompts):
        sampler = Sampler(sampling.greedy, sampling.processors(), SampleNoise(torch.Generator().manual_seed(i)))
        sequences.append(Sequence(i, list(prompt), n, sampler=sampler, stop_rules=[eos_rule(frozenset(eos))]))
    engine = Engine(TargetRunner(model), drafter or NoDrafter(), verifier)
    return sequences, run_to_end(engine, sequences), engine


def outputs(sequences) -> list[list[int]]:
    return [s.output for s in sequences]


def drafter(kind: str, model, folder) -> Drafter:
    if kind == "longspec":
        return LongSpecDrafter(LongSpecDraft.load(random_draft(folder, model)), widths=(3, 4, 2))
    return SuffixDrafter() if kind == "ngram" else NoDrafter()


def model_of(family: str = "llama", **shape):
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if family == "gemma3" else {}
    return tiny_model(family, **{"vocab": 11, "dtype": torch.float64} | kinds | shape)


# --- all verifiers ---


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("covered", "llama", "longspec"), ("eager", "llama", "longspec"), ("eager", "qwen3", "none"),
        ("eager", "gemma3", "ngram"),  # whose windows see what waits
    ],
)  # fmt: skip
def test_a_partial_cache_that_holds_everything_gives_the_tokens_of_plain_decoding(tmp_path, name, family, kind):
    """Catches a rejected node whose KV survives, a gap before the window and a gather from a wrong offset."""
    model = model_of(family)
    want, _, _ = run(model, Verifier())
    for n, eos in ((28, ()), (28, (3,)), (1, ())):
        got, steps, _ = run(model, VERIFIERS[name](), drafter(kind, model, tmp_path), n=n, eos=eos)
        plain = [text[: text.index(eos[0]) + 1] if eos and eos[0] in text else text[:n] for text in outputs(want)]
        assert outputs(got) == plain
        assert n < 28 or eos or {step.mode for step in steps} >= MODES[name]
        if n == 28 and not eos:
            drafted, accepted = (sum(getattr(s, what) for s in got) for what in ("drafted", "accepted"))
            assert drafted > accepted > 0 or kind == "none"


VIEWS = (
    {"view": "streaming", "budget": 24, "sink": 4}, {"view": "snapkv", "budget": 24, "window": 4},
    {"view": "tokens", "sink": 2, "refresh": 3, "budget": 24, "window": 4},
    {"view": "chunks", "chunk": 4, "sink": 4, "refresh": 2, "budget": 24, "window": 4},
)  # fmt: skip


def triforce(folder) -> TriForceDrafter:
    small = SmallLMDrafter(SmallLMDraft.load(small_lm(folder)), tree="chain", view="streaming", depth=2)
    return TriForceDrafter(small, SelfDrafter(**VIEWS[3]))


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(
    ("name", "drafting"),
    [
        *((name, lambda folder: SuffixDrafter()) for name in ("full", "specpv", "eager")),
        *(("full", lambda folder, view=view: SelfDrafter(**view)) for view in VIEWS),
        ("full", triforce),
    ],
)  # fmt: skip
def test_after_a_run_the_cache_has_exact_kv_only(tmp_path, name, drafting):
    """Whatever was drafted and verified in part, on which view: the KV is that of one forward over the text."""
    model = model_of()
    (s,), _, engine = run(model, VERIFIERS[name](), drafting(tmp_path), PROMPTS[:1], 30)
    store, n = engine.cache_manager.cache.store, engine.cache_manager.cache.store.lengths[0]
    assert store.num_unverified[0] == 0 and 70 < n <= len(s.tokens) and s.drafted > s.accepted > 0
    exact = computed(model, s.tokens[:n])
    for found, expected in ((store.keys, exact.keys), (store.values, exact.values)):
        torch.testing.assert_close(found[:, :1, :, :n], expected, atol=1e-4, rtol=1e-3)


def test_a_run_that_is_over_frees_its_kv_at_once():
    """Without a collection of cycles: CUDA graphs wait for the buffers of the run before."""
    gc.disable()
    try:
        _, _, engine = run(model_of(), Verifier(), SuffixDrafter(), PROMPTS[:1], 5)
        store = ref(engine.cache_manager.cache.store)
        del engine
        assert store() is None
    finally:
        gc.enable()


def computed(model, tokens, *layers):
    """A store with the KV of a context, computed in one forward."""
    runner = TargetRunner(model)
    store = runner.new_store(1, len(tokens), *layers)
    forward(runner, [tokens], store, [0], logits="none")
    return store


class Listening(Drafter):
    """Drafts the right tokens on one branch, and compares the queries of results with those of a plain forward."""

    max_nodes = 4

    def __init__(self, answers) -> None:
        self.answers, self.heard = answers, 0

    def needs(self, runner):
        return DraftNeeds(query_layers=(1, runner.kv_shape.layers - 1))

    def bind(self, runner, store):
        self.runner, self.store = runner, store

    def propose(self, sequences, limit=None):
        trees = []
        for s in sequences:
            right = self.answers[s.index][len(s.output) : len(s.output) + 1 + s.index]
            parents = (-1, 0, *([0] if right else []), *range(2, 1 + len(right)))
            trees.append(TokenTree((s.output[-1], (s.output[-1] + 1) % 11, *right), parents))
        return trees

    def observe(self, result):
        sequence, queries = result.sequence, {layer: q[:, -1] for layer, q in result.queries.items()}
        if self.store.num_unverified[sequence.slot]:
            return  # the queries of a partial verification can be compared with nothing
        text = sequence.tokens[: self.store.readable_len(sequence.slot)]
        assert len(text) == len(sequence.tokens) - 1
        plain = self.runner.new_store(1, len(text))
        out = forward(
            self.runner, [text], plain, [0], logits="none", taps=Taps(queries=self.needs(self.runner).query_layers)
        )
        assert set(queries) == set(out.queries)
        for layer, query in queries.items():
            torch.testing.assert_close(query, out.queries[layer][0, :, -1], atol=1e-4, rtol=1e-3)
        self.heard += 1


@each_verifier
def test_drafters_get_the_queries_of_the_deepest_accepted_node(name):
    """In every mode, also if buffered tokens precede the tree."""
    model = model_of()
    want, _, _ = run(model, Verifier())
    listening = Listening(outputs(want))
    got, steps, _ = run(model, VERIFIERS[name](), listening)
    assert outputs(got) == outputs(want) or name == "specpv"
    assert {s.mode for s in steps} >= MODES[name]
    assert listening.heard > 10 and sum(s.accepted for s in steps) > 10


# --- partial verification ---


def test_specpv_is_approximate_and_refreshes_when_its_buffer_exceeds_the_margin():
    """In a batch as it would alone."""
    model = model_of()
    want, _, _ = run(model, Verifier())
    got, steps, _ = run(model, SpecPV(sizes(margin=6)))
    assert any(s.token_ids for s in steps if s.mode == "partial")
    assert outputs(got) != outputs(want)  # random models attend everywhere
    assert outputs(got)[2][:8] == outputs(want)[2][:8]  # a short text is verified in full
    modes = [[s.mode for s in steps if s.sequence == i and s.mode != "prefill"] for i in range(3)]
    assert modes[0][:9] == ["refresh", *["partial"] * 7, "refresh"]
    for i, prompt in enumerate(PROMPTS):
        (alone,), own, _ = run(model, SpecPV(sizes(margin=6)), prompts=[prompt])
        assert [s.mode for s in own if s.mode != "prefill"] == modes[i] and got[i].output == alone.output


class Checked(Eagle3Drafter):
    """After each refresh, checks that its drafts equal those of a new drafter that has read the context again."""

    checked, fresh = 0, False

    def observe(self, result):
        super().observe(result)
        self.fresh = self.fresh or result.kv_rewritten_from is not None

    def propose(self, sequences, limit=None):
        found = super().propose(sequences, limit)
        if self.fresh:
            twin = Eagle3Drafter(self.draft, widths=(2, 3))
            twin.bind(self.runner, self.store)
            for s in sequences:
                twin.observe(prefill_event(s))
            again = twin.propose(sequences)
            assert [t.tokens for t in again] == [t.tokens for t in found]
            for own, other in zip(found, again, strict=True):
                assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            self.checked += 1
            self.fresh = False
        return found


@pytest.mark.parametrize("window", [None, 12])
def test_a_refresh_replaces_drifted_features_and_draft_kv(tmp_path, window):
    model = model_of(layers=6)
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, window=window))
    eagle = Checked(draft, widths=(2, 3))
    got, _, engine = run(model, SpecPV(sizes()), eagle, PROMPTS[:1])
    assert eagle.checked >= 2
    keeping = Checked(draft, widths=(2, 3))  # the paper's draft keeps what partial passes gave
    _, steps, _ = run(model, SpecPV(sizes(), reread=False), keeping, PROMPTS[:1])
    assert keeping.checked == 0 and sum(s.mode == "refresh" for s in steps) >= 2
    store, n = engine.cache_manager.cache.store, engine.cache_manager.cache.store.lengths[0]
    exact = computed(model, got[0].tokens[:n], store.feature_layers)
    torch.testing.assert_close(store.features[0, :n], exact.features[0, :n], atol=1e-4, rtol=1e-3)
