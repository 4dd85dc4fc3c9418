"""EAGLE-1's training step against its formula, and its noise."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longdraft.drafters.eagle import EagleBlock
from longdraft.drafts.eagle_formats import EagleShape
from longdraft.model.model_parts import norm_before_head
from longdraft.model.rope import RotaryEmbedding, make_rope_parameters
from longdraft.model.runner import TargetRunner
from longdraft.training.config import EagleConfig
from longdraft.training.documents import Document
from longdraft.training.eagle import EagleTrainer
from longdraft.training.features import FeatureReader
from tests.support.tiny import tiny_model
from tests.training.helpers import masked_attention
from tests.training.trainers import filled


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model())


def make(runner: TargetRunner, **over: float) -> EagleTrainer:
    block = filled(EagleBlock(EagleShape(48, 64, 4, 2, 8, 48, runner.vocab_size, runner.shared_parts.rms_norm_eps)))
    block.borrow_target_head(runner, lambda out: out)
    return EagleTrainer(
        block,
        runner.shared_parts,
        RotaryEmbedding(8, make_rope_parameters(1000.0)),
        EagleConfig(precision="no", **over),
    )


def read(runner: TargetRunner, start: int = 9):
    document = Document(torch.randint(0, 61, (30,), generator=torch.Generator().manual_seed(1)).tolist(), start)
    return FeatureReader(runner, torch.float32, (runner.num_layers - 1,)).read(document)


def test_a_step_foresees_the_next_state_and_what_it_says(runner):
    document, trainer = read(runner), make(runner, feature_noise=0.0, classification=0.3)
    block, f = trainer.block, norm_before_head(runner.model)(document.hidden)
    seen = torch.ones(28, 28, dtype=torch.bool).tril()
    inputs = trainer.embed(document.token_ids[1:29]), f[:28]
    out = block(*inputs, *trainer.rotary(torch.arange(28)), [lambda q, k, v: masked_attention(q, k, v, seen)])
    o, following = out[8:], f[9:29]  # token 9 is learned from row 8 on, where the root is token 9
    head = runner.shared_parts.head
    said = -((following @ head.T).softmax(-1) * (o @ head.T).log_softmax(-1)).sum()
    loss = F.smooth_l1_loss(o, following, reduction="sum") / o.shape[1] + 0.3 * said
    found = trainer([document], [7])
    torch.testing.assert_close(found.loss, loss, rtol=1e-4, atol=1e-4)
    weights = list(trainer.parameters())
    for one, other in zip(*(torch.autograd.grad(x, weights) for x in (found.loss, loss)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-3)


def test_noise_depends_on_the_documents_number_alone(runner):
    document, trainer = read(runner), make(runner, feature_noise=0.1)
    alone, again = (trainer([document], [seed]).loss for seed in (5, 6))
    assert alone != again and trainer([document], [5]).loss == alone
    torch.testing.assert_close(trainer([document, document], [5, 6]).loss, alone + again)
    trainer.eval()
    assert trainer([document], [5]).loss == trainer([document], [6]).loss
