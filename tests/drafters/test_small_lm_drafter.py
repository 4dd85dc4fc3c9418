"""The drafter's rounds against the small model's own forward over what it is to see; its options and refusals."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from longdraft import Speculator
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.views import draft_cache
from tests.drafters.watching import run
from tests.support.drafts import save_model, small_lm
from tests.support.events import prefill_event
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
STREAMING = {"view": "streaming", "sink": 4, "recent": 12}
RETRIEVAL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2}
# Shorter than the working caches, about as long, several times as long.
PROMPTS = [[1, 2, 3], [t % 11 for t in range(30)], [(3 * t * t) % 11 for t in range(120)], [8]]


def rounds(spec: Speculator, new: int, prompts=PROMPTS) -> tuple[PreTrainedModel, list, list[Sequence]]:
    """The draft's model, what was drafted behind which tokens of its cache, and the sequences of a greedy run."""
    watching, sequences = run(spec, prompts, new, text_of=seen)
    model = spec.options["draft"].bind(spec.runner()).runner.model
    return model, [(tokens, tree) for tokens, remaining, tree in watching.proposed if remaining > 1], sequences


def seen(drafter: SmallLMDrafter, s: Sequence) -> list[int]:
    """The tokens in a drafter's cache, in its order, the root last."""
    cache, text = drafter.cache, s.tokens
    assert s.remaining <= 1 or drafter.fed_token_ids[s.slot] == text  # nothing is drafted for the last token
    if drafter.retrieval is None or cache.has_full_context(s.slot):
        return text
    flushed = cache.full_store.lengths[s.slot]
    return [text[r] for r in cache.retrieval.kv_indices(s.slot, flushed)] + text[flushed:]


def assert_defined(model, tokens, tree, limit=14):
    """A tree's log-probabilities are the model's own after ``tokens`` at positions 0, 1, 2, ... and each path."""
    assert tree.tokens[0] == tokens[-1]
    for node in range(1, min(tree.size, limit)):
        path = [tree.tokens[i] for i in tree.path(tree.parents[node])][1:]
        with torch.no_grad():
            logits = model(torch.tensor([tokens + path]), use_cache=False).logits[0, -1]
        expected = torch.log_softmax(logits.float(), -1)[tree.tokens[node]]
        assert tree.logprobs[node] == pytest.approx(float(expected), abs=3e-4)


@pytest.mark.parametrize(("family", "view"), [("qwen2", STREAMING), ("llama", RETRIEVAL), ("mistral", {})], ids=str)
def test_families_and_views(tmp_path, family, view):
    """With one layer, keys and values are those of token and position: what is seen is all there is to know."""
    spec = Speculator(
        "small-lm", target=tiny_model(vocab=11), draft=small_lm(tmp_path, family=family, layers=1), **view
    )
    model, found, _ = rounds(spec, 20)
    for each in found[-12:] + found[3:8]:
        assert_defined(model, *each, limit=6)
    lengths = [len(tokens) for tokens, _ in found]
    assert (max(lengths) > 100) == (not view)


@pytest.mark.parametrize("view", [STREAMING | {"recent": 256}, RETRIEVAL | {"chunks": 64}], ids=str)
def test_a_working_cache_of_the_whole_text_proposes_what_the_full_view_does(tmp_path, view):
    model, folder = tiny_model(vocab=11, dtype=torch.float64), small_lm(tmp_path, layers=3)
    found = []
    for options in ({}, view):
        spec = Speculator("small-lm", target=model, draft=folder, depth=3, top_k=3, tree="dynamic", **options)
        _, trees, sequences = rounds(spec, 24)
        found.append((trees, [s.accepted for s in sequences]))
    (full, accepted), (working, also) = found
    assert accepted == also and len(full) == len(working) > 20
    for (text, a), (tokens, b) in zip(full, working, strict=True):
        assert text == tokens and (a.tokens, a.parents) == (b.tokens, b.parents)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)


def test_the_draft_meets_trained_positions_only(tmp_path, forwards):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path, layers=1, context=48)
    for view in (STREAMING, RETRIEVAL | {"depth": 4}):
        forwards.clear()
        Speculator("small-lm", target=model, draft=folder, **view).generate(PROMPTS, max_new_tokens=50)
        assert 30 < max(f.last for f in forwards if f.context_length == 48) < 48


# --- what the engine may tell it ---


class Decoding:
    """A drafter and a sequence, driven by hand; the target's store is only as long as it has to be."""

    def __init__(self, folder, text: list[int], prompt: int, **options) -> None:
        self.runner = TargetRunner(tiny_model(vocab=11))
        draft = SmallLMDraft.load(folder)
        self.model = draft.bind(self.runner).runner.model
        self.drafter = SmallLMDrafter(draft, depth=3, top_k=3, **options)
        self.drafter.bind(self.runner, self.runner.new_store(1, len(text) + 60))
        self.s = Sequence(0, text[:prompt], 80)
        self.emit(text[prompt : prompt + 1])
        self.drafter.observe(prefill_event(self.s))
        self.emit(text[prompt + 1 :])

    def emit(self, tokens):
        for token in tokens:
            self.s.append(token)

    def check(self):
        (tree,) = self.drafter.propose([self.s])
        assert_defined(self.model, seen(self.drafter, self.s), tree)


@pytest.fixture(params=[{}, STREAMING, RETRIEVAL | {"tree": "dynamic"}], ids=str)
def decoding(request, tmp_path):
    return Decoding(small_lm(tmp_path, layers=1), [i % 11 for i in range(0, 130, 2)], 40, **request.param)


def test_many_tokens_at_once(decoding):
    decoding.check()
    decoding.emit([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 7, 7, 1])
    decoding.check()


# --- options, refusals ---


def test_defaults_are_the_papers_or_as_much_as_was_trained_for(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_cache, "MIN_NEW_ENTRIES", 64)
    long = SmallLMDraft.load(small_lm(tmp_path / "long", context=2048))
    short = SmallLMDraft.load(small_lm(tmp_path / "short", context=512))
    for draft, chunks, recent in ((long, 32, 1024), (short, 7, 408)):
        drafter = SmallLMDrafter(draft, view="retrieval")
        view = drafter.retrieval.view
        assert (view.scorer, view.chunk_size, view.num_chunks, drafter.retrieval.timer.interval) == (
            "attention",
            32,
            chunks,
            4,
        )
        assert (drafter.max_nodes, drafter.tree.depth) == (50, 10)  # OPT-Tree
        assert SmallLMDrafter(draft, view="streaming").retrieval.view.window == recent
    assert SmallLMDrafter(long).max_nodes == 59  # a dynamic tree
    # A schedule's sizes of the same names mean nothing in full view.
    assert SmallLMDrafter(long, sink=5, recent=3).retrieval is None


def test_texts_beyond_the_trained_length_are_mentioned_once(tmp_path, caplog):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path, context=40)
    with caplog.at_level(logging.WARNING, "longdraft"):
        Speculator(folder, target=model).generate([[1, 2, 3]], max_new_tokens=37)
        Speculator("small-lm", target=model, draft=folder, **STREAMING, depth=2).generate(
            [[1, 2, 3]], max_new_tokens=50
        )
        assert caplog.text == ""
        spec = Speculator("small-lm", target=model, draft=folder, view="full")
        spec.generate([[1, 2, 3], [4] * 5], max_new_tokens=38)
    assert caplog.text.count("was trained for texts of 40 tokens; this one has up to 41") == 1


@pytest.mark.parametrize(("context", "length", "seen"), [(200, 60, None), (120, 60, None), (120, 121, 77)])
def test_a_text_that_outgrows_the_draft_is_seen_in_part(tmp_path, context, length, seen):
    """Without a view: all of it as far as the draft was trained, else its first and last tokens."""
    runner = TargetRunner(tiny_model(vocab=11))
    drafter = SmallLMDrafter(SmallLMDraft.load(small_lm(tmp_path, context=context)), widths=(2, 2, 2))
    drafter.bind(runner, runner.new_store(1, length))
    window = None if drafter.retrieval is None else drafter.retrieval.view.window
    assert window == seen


@pytest.fixture
def gpt2(tmp_path):
    """A draft with a table of 40 positions."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 11, "n_positions": 40}
    return save_model(tmp_path / "gpt2", GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)))


def test_learned_positions_draft_as_far_as_they_go(gpt2):
    model = tiny_model(vocab=11)
    spec = Speculator(gpt2, target=model, widths=(2, 2))
    prompts = [[1, 2, 3], [4] * 10]
    expected = Speculator("ar", target=model).generate(prompts, max_new_tokens=30)
    assert [r.token_ids for r in spec.generate(prompts, max_new_tokens=30)] == [r.token_ids for r in expected]


def test_padding_has_no_position_beyond_the_last(gpt2):
    draft = SmallLMDraft.load(gpt2)
    drafter = SmallLMDrafter(draft, widths=(2,))
    runner = TargetRunner(tiny_model(vocab=11))
    drafter.bind(runner, runner.new_store(2, 60))
    sequences = [Sequence(0, [5] * 37, 3), Sequence(1, [1, 2], 30)]
    for s, new in zip(sequences, (1, 8), strict=True):
        drafter.observe(prefill_event(s))
        for token in range(new):
            s.append(token)
    for s, tree in zip(sequences, drafter.propose(sequences), strict=True):
        assert_defined(draft.bind(runner).runner.model, s.tokens, tree)


# --- as a method ---
