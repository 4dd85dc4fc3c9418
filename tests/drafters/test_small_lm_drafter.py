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


@pytest.mark.parametrize(("family", "view"), [("qwen2", STREAMING), ("llama", RETRIEVAL)], ids=str)
def test_rounds_are_the_models_own_forward_over_what_a_view_shows(tmp_path, family, view):
    """With one layer, keys and values are those of token and position: what is seen is all there is to know."""
    spec = Speculator(
        "small-lm", target=tiny_model(vocab=11), draft=small_lm(tmp_path, family=family, layers=1), **view
    )
    model, found, _ = rounds(spec, 20)
    for each in found[-12:] + found[3:8]:
        assert_defined(model, *each, limit=6)
    assert max(len(tokens) for tokens, _ in found) < 100  # of texts of up to 140


def test_the_draft_meets_trained_positions_only(tmp_path, forwards):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path, layers=1, context=48)
    for view in (STREAMING, RETRIEVAL | {"depth": 4}):
        forwards.clear()
        Speculator("small-lm", target=model, draft=folder, **view).generate(PROMPTS[1:3], max_new_tokens=30)
        assert 30 < max(f.last for f in forwards if f.context_length == 48) < 48


@pytest.mark.parametrize("view", [STREAMING, RETRIEVAL | {"depth": 4}], ids=["streaming", "retrieval"])
def test_a_prompt_that_is_read_whole_is_seen_whole(tmp_path, forwards, view):
    """The last piece of the prompt attends to all of it; afterwards the view is as large as ever."""
    model, folder = tiny_model(vocab=11), small_lm(tmp_path, layers=2, context=48)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=30)
    last = {}
    for prefill in ("window", "full"):
        forwards.clear()
        spec = Speculator("small-lm", target=model, draft=folder, **view, prefill=prefill)
        results = spec.generate(PROMPTS, max_new_tokens=30)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert sum(r.drafted for r in results) > sum(r.accepted for r in results) > 0
        last[prefill] = max(f.last for f in forwards if f.context_length == 48 and f.prompt)
    assert last["window"] < 48 and last["full"] == len(PROMPTS[2]) - 1


# --- options, refusals ---


def test_defaults_are_the_papers_or_as_much_as_was_trained_for(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_cache, "MIN_NEW_ENTRIES", 64)
    for context, chunks, recent in ((2048, 32, 1024), (512, 7, 408)):
        draft = SmallLMDraft.load(small_lm(tmp_path / f"{context}", context=context))
        drafter = SmallLMDrafter(draft, view="retrieval")
        view = drafter.retrieval.view
        assert (view.scorer, view.chunk_size, view.num_chunks) == ("attention", 32, chunks)
        assert (drafter.max_nodes, drafter.tree.depth) == (50, 10)  # OPT-Tree
        assert SmallLMDrafter(draft, view="streaming").retrieval.view.window == recent


def test_texts_beyond_the_trained_length_are_mentioned_once(tmp_path, caplog):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path, context=40)
    with caplog.at_level(logging.WARNING, "longdraft"):
        Speculator(folder, target=model).generate([[1, 2, 3]], max_new_tokens=37)
        Speculator("small-lm", target=model, draft=folder, **STREAMING, depth=2).generate(
            [[1, 2, 3]], max_new_tokens=50
        )
        assert caplog.text == ""
        larger = RETRIEVAL | {"chunks": 12, "recent": 12, "depth": 2}
        Speculator("small-lm", target=model, draft=folder, **larger).generate([PROMPTS[2]], max_new_tokens=4)
        assert caplog.text.count("its view has up to") == 1
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


def test_learned_positions_draft_as_far_as_they_go_and_padding_has_none_beyond_the_last(tmp_path):
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 11, "n_positions": 40}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    draft = SmallLMDraft.load(save_model(tmp_path, model))
    drafter, runner = SmallLMDrafter(draft, widths=(2,)), TargetRunner(tiny_model(vocab=11))
    drafter.bind(runner, runner.new_store(2, 60))
    sequences = [Sequence(0, [5] * 37, 3), Sequence(1, [1, 2], 30)]
    for s, new in zip(sequences, (1, 8), strict=True):
        drafter.observe(prefill_event(s))
        for token in range(new):
            s.append(token)
    for s, tree in zip(sequences, drafter.propose(sequences), strict=True):
        assert_defined(draft.bind(runner).runner.model, s.tokens, tree)
