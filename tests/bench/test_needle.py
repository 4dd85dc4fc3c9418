"""Predictions of needles by each view, on tiny models."""

from __future__ import annotations

import math

import pytest
import torch

from longdraft import LoadedModel
from longdraft.bench.needle import NeedleBench, make_haystacks, perplexity
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.longspec import LongSpecDraft
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine import prefill
from longdraft.errors import ContextError, PromptError
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model, tiny_tokenizer

RETRIEVED = "self", {"view": "chunks", "budget": 48, "sink": 8, "window": 8, "chunk": 8}


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(layers=6, dtype=torch.float64), tiny_tokenizer(chat=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hay.txt"
    path.write_text("the cat sat on the mat. " * 60)
    return path


@pytest.fixture(scope="module")
def drafts(loaded, tmp_path_factory):
    made = tmp_path_factory.mktemp("drafts")
    random_draft(made / "longspec", loaded.model)
    random_eagle3(made / "eagle3", loaded.model, kept=list(range(5, 40)))
    return {"longspec": LongSpecDraft.load(made / "longspec"), "eagle3": Eagle3Draft.load(made / "eagle3")}


def hay(loaded, text, depth=0.4, context=300):
    (found,) = make_haystacks(text, context, loaded.tokenizer, 1, (depth,))
    return found


def measured(loaded, text, views, drafts=None):
    asking = NeedleBench(loaded, views, drafts or {})
    return asking.needle_tokens(one := hay(loaded, text)), asking.measure(one)


def test_haystacks(loaded, text):
    tokenizer = loaded.tokenizer
    found = make_haystacks(text, 300, tokenizer, 2, (0.1, 0.8))
    assert [each.sample.needles[0][0] for each in found] == [0.8, 0.1, 0.8, 0.1]  # its beginning serves the next
    assert len({each.sample.answers for each in found}) == 4
    for each in found:
        (depth, _), (code,) = each.sample.needles[0], each.sample.answers
        shown = tokenizer.decode(each.token_ids)
        # Its share of the document: the question and the marks of the chat come behind.
        assert 270 <= len(each.token_ids) <= 300 and abs(shown.index(code) / shown.index("what is") - depth) < 0.2
        assert shown.rstrip().endswith("door?<eos><assistant>")
    (told,) = make_haystacks(text, 300, tokenizer, 1, (0.5,), system="the dog is red.")
    assert len(told.token_ids) <= 300 and tokenizer.decode(told.token_ids).count("the dog is red.") == 1
    for path, context, error in ((text, 5000, PromptError), (text, 20, ContextError), (text / "no", 300, PromptError)):
        with pytest.raises(error):
            make_haystacks(path, context, tokenizer)


def test_the_bar_moves_while_a_haystack_is_read(loaded, text, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 64)
    seen = []
    NeedleBench(loaded, {"chunks": RETRIEVED}, {}).measure(hay(loaded, text), lambda *words: seen.append(words))
    assert seen[:3] == [("chunks",), ("chunks", 64), ("chunks", 128)]


def small_lm(view, **options):
    return "small-lm", {"view": view, **options}


def test_the_views_of_a_small_language_model(loaded, text, tmp_path):
    """The draft is the target itself: with the full context in view its logprobs are those of transformers' forward."""
    loaded.model.save_pretrained(tmp_path)
    sizes = {"sink": 8, "recent": 16, "chunk": 8}
    views = {
        "full": small_lm("full"), "wide": small_lm("streaming", sink=8, recent=350),
        "most": small_lm("retrieval", **sizes, chunks=40), "own": (RETRIEVED[0], {**RETRIEVED[1], "budget": 512}),
        "narrow": small_lm("streaming", sink=8, recent=40), "few": small_lm("retrieval", **sizes, chunks=4, every=1),
        "own few": RETRIEVED,
    }  # fmt: skip
    answer, found = measured(loaded, text, views, {"small-lm": SmallLMDraft.load(tmp_path)})
    prompt = hay(loaded, text).token_ids
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer[1:])[:, None])[:, 0].tolist()
    rows = {name: [token.logprob for token in predictions] for name, predictions in found.items()}
    for name in ("full", "wide", "most", "own"):
        assert rows[name] == pytest.approx(expected, abs=1e-5)
        assert [token.is_top1 for token in found[name]] == (logits.argmax(-1) == torch.tensor(answer[1:])).tolist()
    for name in ("narrow", "few", "own few"):
        assert rows[name] != pytest.approx(expected, abs=1e-2)
    assert rows["narrow"] != rows["few"]


def test_all_views_share_one_reading_of_the_prompt(loaded, text, drafts, forwards):
    views = {"longspec": ("longspec", {}), "eagle3": ("eagle3", {}), "own": RETRIEVED}
    answer, found = measured(loaded, text, views, drafts)
    sizes = [f.rows for f in forwards]
    assert sum(size > 100 for size in sizes) == 1 and all(size == 1 for size in sizes[1:])
    # The tiny EAGLE draft's vocabulary ends before some of the digits.
    known = [token in range(5, 40) for token in answer[1:]]
    assert [t.logprob is not None for t in found["eagle3"]] == known and not all(known)
    mean = sum(t.logprob or 0.0 for t in found["eagle3"]) / sum(known)
    assert perplexity(found["eagle3"]) == pytest.approx(math.exp(-mean))
