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
from longdraft.drafters.suffix import SuffixDrafter
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
from tests.support.drafts import random_draft, random_eagle3
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
    "specpv": lambda: SpecPV(sizes()),
    "eager": eager,
}
MODES = {name: {"full"} if name == "full" else {"refresh", "partial"} for name in VERIFIERS}


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


# --- all schedules ---


@pytest.mark.parametrize(
    ("name", "drafted"),
    [
        ("full", ("mistral", "longspec")),
        ("eager", ("llama", "ngram")),
        ("eager", ("qwen3", "none")),
        ("eager", ("gemma3", "ngram")),  # whose windows see what waits
    ],
    ids=str,
)
def test_exact_verifiers_give_the_tokens_of_plain_decoding(tmp_path, name, drafted):
    family, kind = drafted
    model = model_of(family)
    for n, eos in ((28, ()), (28, (3,)), (28, (10,)), (1, ()), (2, ()), (7, ())):
        want, _, _ = run(model, Verifier(), n=n, eos=eos)
        got, steps, _ = run(model, VERIFIERS[name](), drafter(kind, model, tmp_path), n=n, eos=eos)
        assert outputs(got) == outputs(want)
        assert [s.finish_reason for s in got] == [s.finish_reason for s in want]
        assert n < 28 or eos or {step.mode for step in steps} >= MODES[name]


@pytest.mark.parametrize("name", VERIFIERS)
def test_after_a_run_the_cache_has_exact_kv_only(name):
    model = model_of()
    got, _, engine = run(model, VERIFIERS[name](), SuffixDrafter(), PROMPTS[:1], 13)
    store = engine.cache_manager.cache.store
    n = store.lengths[0]
    assert store.num_unverified[0] == 0 and n <= len(got[0].tokens) - 1
    exact = computed(model, got[0].tokens[:n])
    torch.testing.assert_close(store.keys[:, :1, :, :n], exact.keys, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(store.values[:, :1, :, :n], exact.values, atol=1e-4, rtol=1e-3)


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


@pytest.mark.parametrize("name", VERIFIERS)
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


@pytest.mark.parametrize("kind", ["longspec", "ngram"])
def test_a_budget_that_covers_the_context_gives_full_verification(tmp_path, kind):
    model = model_of()
    want, _, _ = run(model, Verifier(), drafter(kind, model, tmp_path))
    got, steps, _ = run(model, SpecPV(sizes(200)), drafter(kind, model, tmp_path))
    assert outputs(got) == outputs(want) and {s.mode for s in steps} == {"prefill", "full"}


@pytest.mark.parametrize(("kind", "transposed"), [("longspec", False), ("ngram", True), ("none", False)])
def test_partial_verification_on_a_cache_that_holds_everything_is_full_verification(tmp_path, kind, transposed):
    """Catches a rejected node whose KV survives, a gap before the window and a gather from a wrong offset."""
    model = model_of(dtype=torch.float32 if transposed else torch.float64)
    want, _, _ = run(model, Verifier(), drafter(kind, model, tmp_path))
    got, steps, _ = run(model, eager(), drafter(kind, model, tmp_path))
    assert outputs(got) == outputs(want)
    assert sum(s.mode == "partial" for s in steps) > 20


def test_specpv_emits_from_partial_rounds_and_is_approximate():
    model = model_of()
    want, _, _ = run(model, Verifier())
    got, steps, _ = run(model, SpecPV(sizes()))
    assert any(s.token_ids for s in steps if s.mode == "partial")
    assert outputs(got) != outputs(want)  # random models attend everywhere
    assert outputs(got)[2][:8] == outputs(want)[2][:8]  # a short text is verified in full


def test_refreshes_come_when_the_buffer_exceeds_the_margin():
    _, steps, _ = run(model_of(), SpecPV(sizes(margin=6)), prompts=PROMPTS[:1])
    modes = [s.mode for s in steps if s.mode != "prefill"]
    assert {s.mode for s in steps} == {"prefill", "refresh", "partial"}
    assert modes[:9] == ["refresh", *["partial"] * 7, "refresh"]


def test_a_sequence_of_a_batch_refreshes_as_it_would_alone():
    got, steps, _ = run(model_of(), SpecPV(sizes(margin=6)))
    for i, prompt in enumerate(PROMPTS):
        alone, own, _ = run(model_of(), SpecPV(sizes(margin=6)), prompts=[prompt])
        assert [s.mode for s in steps if s.sequence == i] == [s.mode for s in own]
        assert got[i].output == alone[0].output


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
    store, n = engine.cache_manager.cache.store, engine.cache_manager.cache.store.lengths[0]
    exact = computed(model, got[0].tokens[:n], store.feature_layers)
    torch.testing.assert_close(store.features[0, :n], exact.features[0, :n], atol=1e-4, rtol=1e-3)
