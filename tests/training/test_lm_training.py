"""The training forward of a small language model against transformers' own, and a pack against its documents."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from longdraft.errors import CheckpointError, ConfigError
from longdraft.model import small_models
from longdraft.model.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from longdraft.training.lm import LmTrainee
from longdraft.training.measure import by_text, simulate
from tests.tiny import tiny_model

KEPT = torch.arange(0, 61, 2)


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model(context=512))


@pytest.fixture(scope="module")
def documents(runner):
    """Features of texts that are learned from their beginning and of others from further on."""
    reader = FeatureReader(runner, 4, torch.float32, None)
    g = torch.Generator().manual_seed(0)
    made = [(30, 1), (19, 8), (25, 20), (2, 1), (40, 39)]
    return [reader.read(Document(torch.randint(0, 61, (n,), generator=g).tolist(), s)) for n, s in made]


def fresh(runner, **over):
    """A decoder in which every part matters: no norm is one."""
    sizes = small_models.sizes_for(runner, 2, 64, 1e4, 64) | over
    decoder = small_models.decoder(sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in decoder.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.25 * noise)
    return decoder, sizes


def plain(runner, decoder, sizes, head):
    """The same model as transformers runs it."""
    model = small_models.around(sizes, decoder.state_dict(), runner.parts.embedding, head)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("distill", [0.0, 0.7])
def test_the_loss_is_that_of_a_plain_forward(runner, documents, kept, distill):
    decoder, sizes = fresh(runner)
    trainee = LmTrainee(decoder, runner.parts, kept, distill)
    head = runner.parts.head if kept is None else runner.parts.head[kept]
    model = plain(runner, decoder, sizes, head)
    ids = torch.arange(61) if kept is None else kept
    for document in documents:
        with torch.no_grad():
            logits = model(document.tokens[None]).logits[0, document.start - 1 : -1]
        log_p, truth = torch.full((len(logits), 61), -torch.inf), document.tokens[document.start :]
        log_p[:, ids] = logits.log_softmax(-1)
        inside = torch.isin(truth, ids)
        hard = -log_p.gather(1, truth[:, None])[:, 0][inside].sum() * (1 - distill)
        weights = document.top_log_probs.exp() * torch.isin(document.top_ids, ids)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
        soft = -(weights * log_p.gather(1, document.top_ids).clamp_min(-1e9)).sum() * distill
        out = trainee([document])
        torch.testing.assert_close(out.loss, hard + soft, rtol=1e-4, atol=1e-4)
        ranks = (log_p > log_p.gather(1, truth[:, None])).sum(-1)
        assert torch.equal(out.ranks[inside], ranks[inside])
        assert (out.ranks[~inside] == len(ids)).all()
        assert out.depths.tolist() == [1] * len(truth)


def test_transformers_names_the_same_loss(runner, documents):
    decoder, sizes = fresh(runner)
    text = documents[0]
    model = plain(runner, decoder, sizes, runner.parts.head)
    model.config.vocab_size = 61
    theirs = model(text.tokens[None], labels=text.tokens[None]).loss
    torch.testing.assert_close(LmTrainee(decoder, runner.parts, None, 0.0)([text]).loss / 29, theirs)


@pytest.mark.parametrize("distill", [0.0, 0.6])
def test_a_pack_is_its_documents_one_by_one(runner, documents, distill):
    found = []
    for groups in ([documents], [[d] for d in documents]):
        trainee = LmTrainee(fresh(runner)[0], runner.parts, KEPT, distill)
        loss = sum(trainee(group).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainee.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_no_document_of_a_pack_sees_another(runner, documents):
    trainee = LmTrainee(fresh(runner)[0], runner.parts)
    before = trainee([documents[0], documents[1]]).ranks
    other = trainee([documents[4], documents[1]]).ranks
    assert torch.equal(before[-11:], other[-11:])


def test_only_the_decoder_is_trained_and_saved(runner):
    trainee = LmTrainee(fresh(runner)[0], runner.parts)
    assert set(trainee.state_dict()) == {f"decoder.{name}" for name in trainee.decoder.state_dict()}
    assert not any("embed" in name or "lm_head" in name for name in trainee.state_dict())


def test_starting_from_the_targets_own_layers(runner, documents):
    """All of them, with the target's rotary base, are the target."""
    theta = runner.model.config.rope_parameters["rope_theta"]
    sizes = small_models.sizes_for(runner, 3, None, theta, 512)
    decoder = small_models.decoder(sizes)
    small_models.take_layers(decoder, runner, (0, 1, 2))
    out = LmTrainee(decoder, runner.parts, None, 1.0)([documents[0]])
    with torch.no_grad():
        logits = runner.model(documents[0].tokens[None]).logits[0, :-1]
    truth = documents[0].tokens[1:]
    assert torch.equal(out.ranks, (logits > logits.gather(1, truth[:, None])).sum(-1))
    small_models.take_layers(decoder, runner, (2, 2, 0))
    assert torch.equal(decoder.layers[0].mlp.up_proj.weight, runner.model.model.layers[2].mlp.up_proj.weight)


def test_layers_that_cannot_be_taken(runner):
    with pytest.raises(ConfigError, match="names 2 layers for a draft of 3"):
        small_models.take_layers(small_models.decoder(small_models.sizes_for(runner, 3, None, 1e4, 64)), runner, (0, 1))
    with pytest.raises(ConfigError, match="layers 0 to 2"):
        small_models.take_layers(fresh(runner)[0], runner, (0, 3))
    with pytest.raises(ConfigError, match="other parts or sizes"):
        small_models.take_layers(fresh(runner)[0], runner, (0, 2))
    bias = TargetRunner(tiny_model("qwen2"))
    decoder = small_models.decoder(small_models.sizes_for(bias, 1, None, 1e4, 64))
    with pytest.raises(ConfigError, match="other parts or sizes"):
        small_models.take_layers(decoder, bias, (0,))


def test_sizes_that_make_no_model(runner):
    sizes = small_models.sizes_for(runner, 1, None, 1e4, 64)
    for wrong in ({"model_type": "gpt2"}, {"hidden_size": "many"}, {"num_hidden_layers": -1.5}):
        with pytest.raises(CheckpointError, match="No small language model can be built"):
            small_models.decoder(sizes | wrong)


def test_a_fresh_draft_is_unsure(runner, documents):
    decoder = small_models.decoder(small_models.sizes_for(runner, 2, None, 1e4, 64))
    small_models.initialise(decoder, 0, runner.parts.head)
    loss = LmTrainee(decoder, runner.parts, None, 0.0)([documents[0]]).loss.item() / 29
    assert loss < 1.2 * math.log(61)
    first = decoder.state_dict()
    again = small_models.decoder(small_models.sizes_for(runner, 2, None, 1e4, 64))
    small_models.initialise(again, 0, runner.parts.head)
    assert all(torch.equal(t, first[n]) for n, t in again.state_dict().items())


def test_simulated_acceptance_is_a_walk_over_ranks(runner):
    text = FeatureReader(runner, 4, torch.float32, None).read(Document([1, 2, 3, *range(4, 20)], 4))
    trainee = LmTrainee(fresh(runner)[0], runner.parts)
    ranks = by_text(trainee, text, 5)
    assert ranks.shape == (5, 18) and (ranks[:, :3] > 61).all() and (ranks == ranks[0]).all()
    assert torch.equal(ranks[0, 3:], trainee([text]).ranks)
    found = simulate(trainee, [text], ranks_of=by_text)
    assert found.tree >= found.chain >= 1 and F.softmax(torch.tensor(found.agreement), 0).unique().numel() == 1
