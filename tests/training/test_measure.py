"""Simulated acceptance against decoding: greedily and by hand, and with the engine."""

from __future__ import annotations

import pytest
import torch

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, Features
from longdraft.training.longspec import LongSpecTrainee
from longdraft.training.measure import simulate
from tests.drafts import random_block
from tests.tiny import tiny_model
from tests.training.helpers import masked_attention

WINDOW, LEVELS, PROMPT, ANSWER = 9, 5, 12, 60


@pytest.fixture(scope="module")
def model():
    return tiny_model(context=512)


@pytest.fixture(scope="module")
def answered(model) -> list[list[int]]:
    """Prompts with the target's greedy answers."""
    g = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 61, (3, PROMPT), generator=g).tolist()
    results = Speculator("ar", target=model).generate(prompts, max_new_tokens=ANSWER)
    return [p + r.token_ids for p, r in zip(prompts, results, strict=True)]


@pytest.fixture(scope="module")
def trainee(model, answered):
    """A draft that has seen the answers often enough to be right now and then."""
    runner = TargetRunner(model)
    block = random_block(model, WINDOW)
    block.initialise()
    trainee = LongSpecTrainee(block, runner.parts)
    features = read(runner, answered)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    for step in range(50):
        trainee(features, [1 + (step + i) % LEVELS for i in range(3)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # as a folder holds it
        for weight in block.parameters():
            weight.copy_(weight.bfloat16())
    return trainee.eval()


def read(runner: TargetRunner, texts: list[list[int]]) -> list[Features]:
    reader = FeatureReader(runner, 4, torch.float32)
    return [reader.read(Document(t, PROMPT)) for t in texts]


@torch.no_grad()
def chain(trainee: LongSpecTrainee, parts, text: Features, root: int) -> list[int]:
    """What the draft proposes after a root, token by token, with masks over the whole text."""
    tokens = text.tokens[: root + 1].tolist()
    for _ in range(LEVELS):
        at = torch.arange(len(tokens))
        behind = at[:, None] - at
        known = torch.arange(root)  # the target's keys: of all tokens before the root
        cos, sin = parts.rotary(at)
        hidden = trainee.block(
            parts.embedding(torch.tensor(tokens)), cos, sin,
            lambda q, k, v, behind=behind: masked_attention(q, k, v, (behind >= 0) & (behind < WINDOW)),
            lambda q, at=at, known=known: masked_attention(
                q, text.keys[:, :root], text.values[:, :root], (known < root) & (at[:, None] >= known)
            ),
        )  # fmt: skip
        tokens.append(int((hidden[-1] @ parts.head.T).argmax()))
    return tokens[root + 1 :]


def test_a_chain_decoded_by_hand(model, trainee, answered):
    parts = TargetRunner(model).parts
    texts = read(TargetRunner(model), answered)
    emitted = rounds = 0
    for text in texts:
        root, last = PROMPT, len(text.tokens) - 1
        while root < last:
            accepted = 0
            for proposed in chain(trainee, parts, text, root):
                if root + accepted + 1 > last or proposed != int(text.tokens[root + accepted + 1]):
                    break
                accepted += 1
            new = min(accepted + 1, last - root)
            emitted, rounds, root = emitted + new, rounds + 1, root + new
    found = simulate(trainee, texts)
    assert found.chain == pytest.approx(emitted / rounds)
    assert found.chain > 1.5, "a draft that is never right tests nothing"
    assert found.tree >= found.chain
    assert len(found.agreement) == LEVELS


def test_a_chain_decoded_by_the_engine(model, trainee, answered, tmp_path):
    config = trainee.block.shape.as_dict() | {"draft_vocab_size": None}
    description = TargetRunner(model).parts.description
    draft_folder.save(tmp_path, DraftFolder("longspec", config, trainee.block.state_dict(), description))
    spec = Speculator("longspec", target=model, draft=tmp_path, widths=(1,) * LEVELS)
    results = [spec.generate(t[:PROMPT], max_new_tokens=ANSWER)[0] for t in answered]
    assert [t[PROMPT:] for t in answered] == [r.token_ids for r in results]
    decoded = sum(r.new_tokens - 1 for r in results) / sum(r.rounds for r in results)
    assert simulate(trainee, read(TargetRunner(model), answered)).chain == pytest.approx(decoded)


def test_nothing_to_measure():
    found = simulate(lambda documents, shifts: None, [])
    assert (found.chain, found.tree, found.agreement) == (0.0, 0.0, (0.0,) * LEVELS)
