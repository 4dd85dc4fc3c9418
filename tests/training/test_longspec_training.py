"""The training forward against the block over a whole text, and a pack against its documents one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longdraft.model.runner import TargetRunner
from longdraft.training import liger
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from longdraft.training.longspec import LongSpecTrainee
from tests.drafts import random_block
from tests.tiny import tiny_model
from tests.training.helpers import plain_logits

WINDOW = 7


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model(context=512))


@pytest.fixture(scope="module")
def documents(runner):
    """Features of texts that are learned from their beginning and of others from further on."""
    reader = FeatureReader(runner, 4, torch.float32)
    g = torch.Generator().manual_seed(0)
    made = [(30, 1, 0), (19, 8, 0), (25, 20, 90), (9, 1, 7), (40, 33, 0)]
    return [reader.read(Document(torch.randint(0, 61, (n,), generator=g).tolist(), s), offset) for n, s, offset in made]


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
@pytest.mark.parametrize("kept", [None, list(range(0, 61, 2))])
def test_the_training_forward_is_the_blocks(runner, documents, shift, kept):
    block = random_block(runner.model, WINDOW)
    ids = None if kept is None else torch.tensor(kept)
    trainee = LongSpecTrainee(block, runner.parts, ids)
    head = runner.parts.head if ids is None else runner.parts.head[ids]
    for document in documents:
        logits = plain_logits(block, runner.parts, document, shift, head)
        first, end = max(document.start - 1, shift), len(document.tokens) - 1
        truth = document.tokens[first + 1 :]
        if kept is not None:
            inside = torch.isin(truth, ids)
            truth = torch.where(inside, torch.searchsorted(ids, truth), -100)
        out = trainee([document], [shift])
        torch.testing.assert_close(
            out.loss, F.cross_entropy(logits[first:end], truth, reduction="sum"), rtol=1e-4, atol=1e-4
        )
        good = truth >= 0
        chosen = logits[first:end].gather(1, truth.clamp_min(0)[:, None])
        ranks = (logits[first:end] > chosen).sum(-1)
        assert torch.equal(out.ranks[good], ranks[good])
        assert (out.ranks[~good] == len(head)).all()
        assert out.depths.tolist() == [shift] * (end - first)


@pytest.mark.parametrize("distill", [0.0, 0.6])
def test_a_pack_is_its_documents_one_by_one(runner, documents, distill):
    shifts = [2, 1, 3, 5, 4]
    found = []
    for together in (True, False):
        trainee = LongSpecTrainee(random_block(runner.model, WINDOW), runner.parts, None, distill)
        groups = [(documents, shifts)] if together else [([d], [j]) for d, j in zip(documents, shifts, strict=True)]
        loss = sum(trainee(*group).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainee.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_only_the_block_is_trained_and_saved(runner):
    trainee = LongSpecTrainee(random_block(runner.model), runner.parts)
    assert set(trainee.state_dict()) == {f"block.{name}" for name in trainee.block.state_dict()}


def test_a_document_without_a_row_for_the_shift(runner, documents):
    with pytest.raises(ValueError, match="none to learn at shift 9"):
        LongSpecTrainee(random_block(runner.model), runner.parts)([documents[3]], [9])


def test_the_loss_of_a_kernel_that_tells_no_ranks(runner, documents, monkeypatch):
    trainee = LongSpecTrainee(random_block(runner.model), runner.parts, torch.arange(40))
    expected = trainee([documents[0]], [1]).loss

    def fused(hidden, head, tokens):
        return F.cross_entropy(hidden @ head.T, tokens, reduction="sum", ignore_index=-1)

    monkeypatch.setattr(liger, "cross_entropy", lambda device: fused)
    out = trainee([documents[0]], [1])
    assert out.ranks is None
    torch.testing.assert_close(out.loss, expected)
    assert trainee.eval()([documents[0]], [1]).ranks is not None
