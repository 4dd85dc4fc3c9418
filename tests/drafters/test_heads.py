"""Chained heads: their folder, what they say, their trees, and where their states come from; the phrases of a text."""

from __future__ import annotations

from collections import Counter
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Sampling
from longdraft.drafters.heads import HeadsDraft, HeadsDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.tokenswift import PhraseTable, ReuseDrafter
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from tests.drafters.watching import Watching
from tests.support import definitions
from tests.support.drafts import random_heads
from tests.support.events import prefill_event, run_to_end
from tests.support.tiny import tiny_model

PROMPT = [3, 9, 4, 7, 2, 5, 1]


@pytest.fixture
def model():
    return tiny_model(vocab=11, dtype=torch.float64)


@pytest.fixture
def draft(tmp_path, model):
    return HeadsDraft.load(random_heads(tmp_path / "draft", model))


def proposals(model, drafter, n=12, limit=None, prompts=(PROMPT,)):
    """(text up to the root, tree) of every round of a greedy run."""
    watching = Watching(drafter, limit)
    sequences = [Sequence(i, list(p), n, sampler=Sampler(True, Sampling().processors())) for i, p in enumerate(prompts)]
    run_to_end(Engine(TargetRunner(model), watching), sequences)
    return watching.rounds


def plain(model, draft, text, heads=3):
    """(heads, vocabulary) log-probabilities of the tokens behind the last one of ``text``, from the definition."""
    says = definitions.heads(model, draft.weights)
    return torch.stack([says(text, [0] * i) for i in range(heads)])


# --- states from elsewhere ---


@pytest.mark.parametrize("kept", [None, [0, 2, 3, 5, 7, 10]])
def test_states_of_the_roots_themselves(tmp_path, model, kept):
    """The first level is then what the target says, one token of it, and the heads follow (the paper's tree)."""
    draft = HeadsDraft.load(random_heads(tmp_path, model, kept=kept))
    level = SelfDrafter(view="tokens", depth=1)  # of texts that its view holds
    drafter = HeadsDrafter(draft, _self_drafter=level)
    assert drafter.max_nodes == 1 + 3 + 9 + 27
    rounds = proposals(model, drafter, prompts=(PROMPT, [4, 4]))
    right = 0
    for text, tree in rounds:
        if tree.num_draft_tokens < 40:
            continue
        with torch.no_grad():
            first = int(model(torch.tensor([text])).logits[0, -1].argmax())
        right += tree.tokens[1] == first
        logprobs = plain(model, draft, [*text, 0])
        ids = torch.arange(11) if kept is None else torch.tensor(kept)
        best = ids[logprobs[0, ids].topk(3).indices]
        assert {tree.tokens[i] for i in range(tree.size) if tree.depths[i] == 2} == set(best.tolist())
    assert right == sum(t.num_draft_tokens == 40 for _, t in rounds) if kept is None else right > 0
    assert drafter.forwards == level.forwards > 0


# --- phrases ---

texts = st.lists(st.integers(0, 3), max_size=60)


@given(texts, st.integers(2, 4), st.integers(1, 5))
def test_phrases_come_by_frequency_and_then_the_latest_first(text, n, k):
    phrases = PhraseTable(n, k)
    for token in text:  # in pieces of any size: one by one is the hardest
        phrases.extend([token])
    every = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    counts, last = Counter(every), {phrase: i for i, phrase in enumerate(every)}
    for first in range(4):
        ranked = sorted((p for p in counts if p[0] == first), key=lambda p: (-counts[p], -last[p]))
        assert phrases.continuations(first) == [p[1:] for p in ranked[:k]]
        for phrase in ranked[:k]:
            seen = [sum(p[:i] == phrase[:i] for p in every) for i in range(1, n + 1)]
            wanted = [seen[i + 1] / (seen[i] + 1) for i in range(n - 1)]
            assert [exp(x) for x in phrases.logprobs(first, phrase[1:])] == pytest.approx(wanted)


def test_what_repeats_in_the_output_is_proposed():
    drafter = ReuseDrafter(n=3, k=2)
    s = Sequence(0, [1, 2, 9, 9], 40)
    drafter.observe(prefill_event(s))
    for token in [5]:
        s.append(token)
    assert drafter.propose([s])[0].num_draft_tokens == 0  # the prompt does not count
    for token in [6, 7, 5, 6, 8, 5, 6, 8, 5, 1, 1, 5]:
        s.append(token)
    (tree,) = drafter.propose([s])
    paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(tree.size)]
    assert paths == [[5], [5, 6], [5, 6, 8], [5, 1], [5, 1, 1]]  # 5 6 8 twice; of 5 6 7 and 5 1 1 the later one
    chance = sum(exp(p) for p, depth in zip(tree.logprobs, tree.depths, strict=True) if depth == 1)
    assert chance == pytest.approx(4 / 5)  # 5 came four times with two tokens behind it, and one is a doubt
    drafter.release(s)
