"""Small language models that draft: our folders, transformers' folders, and what is wrong with one is said."""

from __future__ import annotations

import json

import pytest
import torch

from longdraft import load
from longdraft.drafts.language_model import PublishedLM, SmallLMDraft, TrainedLM
from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from tests.support.drafts import random_lm
from tests.support.forwards import forward
from tests.support.tiny import tiny_model, tiny_tokenizer

KEPT = [0, 3, 7, 20, 41, 60]


@pytest.fixture
def folder(tmp_path):
    return random_lm(tmp_path / "draft", tiny_model())


def logits(bound, tokens):
    store = bound.runner.new_store(1, 64)
    return forward(bound.runner, [tokens], store, [0]).logits[0]


@pytest.mark.parametrize("kept", [None, KEPT])
def test_ours_is_a_llama_around_the_targets_parts(tmp_path, kept):
    model = tiny_model()
    runner = TargetRunner(model)
    draft = SmallLMDraft.load(random_lm(tmp_path / "draft", model, kept=kept))
    assert isinstance(draft, TrainedLM) and (draft.kind, draft.trained_length) == ("small-lm", 64)
    assert draft.vocabulary == (kept and len(kept))
    bound = draft.bind(runner)
    assert draft.bind(runner) is bound
    inner = bound.runner.model
    assert inner.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert all(weight.requires_grad for weight in model.parameters()) and not inner.lm_head.weight.requires_grad
    own = {n: p for n, p in inner.named_parameters() if "embed" not in n and "lm_head" not in n}
    assert draft.parameters == sum(p.numel() for p in own.values())
    if kept is None:
        assert inner.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr() and bound.draft_to_target_ids is None
    else:
        assert bound.draft_to_target_ids.tolist() == kept
    assert bound.runner.vocab_size == len(kept or range(61)) and bound.runner.context_length == 64
    with torch.no_grad():
        expected = inner(torch.tensor([[5, 60, 7, 1]])).logits[0]
    # In eight bits, where kernels serve.
    assert (logits(bound, [5, 60, 7, 1]) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
@pytest.mark.parametrize("make", [lambda runner: runner.new_store(3, 40), lambda runner: packed_store(runner)])
def test_forwards_in_one_call_are_those_of_the_hosted_model(folder, make):
    """Two sequences: chains behind what was read, a level of each one's tree, and a level behind it."""
    bound = TrainedLM.load(folder).bind(TargetRunner(tiny_model()))
    whole, runner, slots = bound.fused_lm, bound.runner, [2, 0]
    stores = [make(runner) for _ in range(2)]
    for store in stores:
        for slot, text in zip(slots, ([1, 2, 3, 4, 5, 6], [7, 8]), strict=True):
            runner.forward(store.make_forward_batch([slot], [text]), store, logits="none")
            store.commit(slot, range(len(text)))

    def compare(found, logits):
        wanted = torch.log_softmax(logits, -1).topk(3, dim=-1)
        torch.testing.assert_close(found[0], wanted.values, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[1], wanted.indices)

    assert whole.supports(stores[1], 8) and not whole.supports(stores[1], 10_000)
    chains = [[3, 9], [5, 1]]
    hosted = runner.forward(stores[0].make_forward_batch(slots, chains), stores[0], logits="last").logits
    compare(whole.topk(stores[1].make_forward_batch(slots, chains), stores[1], 3, last_only=True), hosted)
    for store in stores:
        for slot in slots:
            store.commit(slot, range(2))
    first = torch.eye(3, dtype=torch.bool).expand(2, -1, -1)
    second = torch.cat([first[:, [2, 0]], torch.eye(2, dtype=torch.bool).expand(2, -1, -1)], dim=2)
    for depth, (tokens, seen) in enumerate((([[4, 5, 6], [7, 8, 9]], first), ([[1, 2], [3, 10]], second)), start=1):
        sizes = {
            "depths": [[depth] * len(row) for row in tokens],
            "mask": seen,
            "tree_offset": seen.shape[2] - len(tokens[0]),
        }
        blocks = [
            store.make_forward_batch(slots, torch.tensor(tokens), root_positions=[7, 3], **sizes) for store in stores
        ]
        hosted = runner.forward(blocks[0], stores[0]).logits
        compare(whole.topk(blocks[1], stores[1], 3), hosted)


def packed_store(runner):
    return runner.new_store(3, 40, resident=True, dtype=torch.bfloat16)


def published(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def shifted_tokenizer():
    """The same characters, numbered otherwise."""
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    words = list(vocabulary)
    state["model"]["vocab"] = dict(zip(words, [*range(5), *range(6, 61), 5], strict=True))
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return tokenizer


def test_a_model_of_transformers(tmp_path):
    small = tiny_model("qwen3", layers=1, hidden=32, heads=2, context=128, seed=3)
    draft = SmallLMDraft.load(published(tmp_path / "small", small))
    assert isinstance(draft, PublishedLM) and draft.vocabulary is None and draft.trained_length == 128
    assert draft.parameters == sum(p.numel() for p in small.parameters())
    runner = TargetRunner(tiny_model(dtype=torch.float64))
    bound = draft.bind(runner)
    assert draft.bind(runner) is bound and bound.draft_to_target_ids is None
    assert bound.runner.kv_shape.dtype == torch.float64
    with torch.no_grad():
        expected = small.double()(torch.tensor([[5, 60, 7, 1]])).logits[0].float()
    torch.testing.assert_close(logits(bound, [5, 60, 7, 1]), expected, rtol=1e-3, atol=1e-4)


def test_another_vocabulary_is_refused(tmp_path):
    small = published(tmp_path / "small", tiny_model(layers=1, vocab=70))
    with pytest.raises(CheckpointError):
        SmallLMDraft.load(small).bind(TargetRunner(tiny_model()))
    target = load(published(tmp_path / "target", tiny_model(), tiny_tokenizer())).model
    other = published(tmp_path / "other", tiny_model(layers=1), shifted_tokenizer())
    with pytest.raises(CheckpointError, match="tokenizer"):
        SmallLMDraft.load(other).check(TargetRunner(target))


@pytest.mark.parametrize("size", [64, 80])
def test_heads_that_are_padded_to_other_sizes(tmp_path, size):
    """Allowed where the tokenizers are the same; nothing that the target does not know is proposed."""
    model = tiny_model(vocab=72)
    target = load(published(tmp_path / "target", model, tiny_tokenizer())).model
    small = tiny_model(layers=1, vocab=size, tie=size == 80, seed=5)
    draft = SmallLMDraft.load(published(tmp_path / "small", small, tiny_tokenizer()))
    bound = draft.bind(TargetRunner(target))
    found = logits(bound, [3, 4, 5, 60])
    assert found.shape == (4, min(size, 72)) and bound.runner.vocab_size == min(size, 72)
    with torch.no_grad():
        expected = small(torch.tensor([[3, 4, 5, 60]])).logits[0, :, :72]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert logits(bound, [71, 3]).isfinite().all()  # an id that the small model never had
    with pytest.raises(CheckpointError):  # a target whose origin is not known
        draft.check(TargetRunner(model))
