"""Small language models that draft: our folders, transformers' folders, GGUF files; what is wrong with one is said."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator, load
from longdraft.drafts.language_model import PublishedLM, SmallLMDraft, TrainedLM
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.quant import stored_model
from longdraft.model.quant.stored import StoredEmbedding, StoredLinear
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from tests.support.drafts import random_lm
from tests.support.forwards import forward
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("gguf")
KEPT = [0, 3, 7, 20, 41, 60]
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)]]
OTHER_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "b", "a"]


def logits(bound, tokens):
    """Logits of a bound draft, or of a model as a target."""
    runner = bound.runner if hasattr(bound, "runner") else TargetRunner(bound)
    return forward(runner, [tokens], runner.new_store(1, 64), [0]).logits[0]


def by_transformers(model, tokens, dtype=torch.float32):
    """Logits by the model's own code, in float32 arithmetic from now on if it has stored weights."""
    stored_model.set_int8(model, False)
    with torch.no_grad():
        return model.to(dtype)(torch.tensor([tokens])).logits[0].float()


@pytest.fixture(scope="module")
def gguf_target(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "target.gguf"
    write_gguf(file)
    return file


def published(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kept", [None, KEPT])
def test_ours_is_a_llama_around_the_targets_parts(tmp_path, kept):
    model = tiny_model()
    runner = TargetRunner(model)
    draft = SmallLMDraft.load(random_lm(tmp_path / "draft", model, kept=kept))
    assert isinstance(draft, TrainedLM) and (draft.kind, draft.trained_length) == ("small-lm", 64)
    assert draft.vocabulary == (kept and len(kept))
    bound = draft.bind(runner)
    inner = bound.runner.model
    assert draft.bind(runner) is bound
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
def test_forwards_in_one_call_are_those_of_the_hosted_model(tmp_path, make):
    """Two sequences: chains behind what was read, a level of each one's tree, and a level behind it."""
    bound = TrainedLM.load(random_lm(tmp_path, tiny_model())).bind(TargetRunner(tiny_model()))
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


def test_a_model_of_transformers(tmp_path):
    small = tiny_model("qwen3", layers=1, hidden=32, heads=2, context=128, seed=3)
    draft = SmallLMDraft.load(published(tmp_path / "small", small))
    assert isinstance(draft, PublishedLM) and draft.vocabulary is None and draft.trained_length == 128
    assert draft.parameters == sum(p.numel() for p in small.parameters())
    bound = draft.bind(TargetRunner(tiny_model(dtype=torch.float64)))
    assert bound.draft_to_target_ids is None and bound.runner.kv_shape.dtype == torch.float64
    expected = by_transformers(small, [5, 60, 7, 1], torch.float64)
    torch.testing.assert_close(logits(bound, [5, 60, 7, 1]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [None, 32])
def test_a_gguf_file_is_read_as_it_is_stored(gguf_target, tmp_path, size):
    """Also with a head of the first tokens alone: other tokens are written, but not proposed."""
    written = write_gguf(tmp_path / "small.gguf", "qwen2", "Q4_0", layers=1, hidden=32, heads=2, seed=1)
    draft, expected = SmallLMDraft.load(tmp_path / "small.gguf"), load(tmp_path / "small.gguf", device="cpu").model
    assert isinstance(draft, PublishedLM) and draft.trained_length == 512 and draft.vocabulary is None
    assert draft.parameters == sum(p.numel() for p in written.parameters())
    if size is not None:
        assert draft.with_trimmed_vocab(64) is draft
        draft = draft.with_trimmed_vocab(size)
        assert draft.vocabulary == size
    model = load(gguf_target, device="cpu").model
    bound = draft.bind(TargetRunner(model))
    own = bound.runner.model
    assert type(own.model.layers[0].self_attn.q_proj) is type(expected.model.layers[0].self_attn.q_proj)
    torch.testing.assert_close(logits(bound, [5, 60, 7, 1]), logits(expected, [5, 60, 7, 1])[:, :size])
    spec = Speculator("small-lm", target=model, draft=tmp_path / "small.gguf", vocabulary=size, plan="fixed")
    found, plain = (s.generate(PROMPTS, max_new_tokens=20) for s in (spec, Speculator("ar", target=model)))
    assert [r.token_ids for r in found] == [r.token_ids for r in plain] and sum(r.drafted for r in found) > 0


def test_another_vocabulary_needs_both_tokenizers(gguf_target, tmp_path):
    """Also tokens of the same number may be others; tests/exact/outside/test_other_vocabularies.py has more."""
    with pytest.raises(CheckpointError, match="small"):
        SmallLMDraft.load(published(tmp_path / "small", tiny_model(layers=1, vocab=70))).bind(
            TargetRunner(tiny_model())
        )
    other = tmp_path / "other.gguf"
    write_gguf(other, layers=1, tokens=OTHER_TOKENS)
    bound = SmallLMDraft.load(other).bind(TargetRunner(load(gguf_target, device="cpu").model))
    ids = bound.input_ids[bound.draft_to_target_ids].tolist()
    assert ids == sorted(ids) and bound.draft_to_target_ids.tolist() != ids and len(ids) > 60
    expected = logits(load(other, device="cpu").model, [5, 60, 7, 1])
    torch.testing.assert_close(logits(bound, [5, 60, 7, 1]), expected[:, ids])


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
    torch.testing.assert_close(found, by_transformers(small, [3, 4, 5, 60])[:, :72], rtol=1e-3, atol=1e-4)
    assert logits(bound, [71, 3]).isfinite().all()  # an id that the small model never had
    with pytest.raises(CheckpointError):  # a target whose origin is not known
        draft.check(TargetRunner(model))


@pytest.mark.parametrize(("size", "tie", "words"), [(48, True, "F16"), (80, False, "Q8_0")])
def test_embeddings_of_files_that_are_padded_to_other_sizes(gguf_target, tmp_path, size, tie, words):
    small = tmp_path / "small.gguf"
    written = write_gguf(small, words=words, layers=1, vocab=size, tie=tie, seed=5)
    model = load(gguf_target, device="cpu").model
    bound = SmallLMDraft.load(small).bind(TargetRunner(model))
    own = bound.runner.model
    if isinstance(own.model.layers[0].self_attn.q_proj, StoredLinear):
        assert isinstance(own.lm_head, StoredLinear) and isinstance(own.model.embed_tokens, StoredEmbedding)
    found = logits(bound, [3, 4, 5, 40])
    assert found.shape == (4, min(size, 64)) and bound.runner.vocab_size == min(size, 64)
    torch.testing.assert_close(found, logits(load(small, device="cpu").model, [3, 4, 5, 40])[:, :64])
    assert logits(bound, [63, 3]).isfinite().all()  # an id that one of the small models never had
    results = Speculator("small-lm", target=model, draft=small).generate(PROMPTS, max_new_tokens=12)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=12)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    true = by_transformers(written, [3, 4, 5, 40])[:, :64]
    torch.testing.assert_close(by_transformers(own, [3, 4, 5, 40]), true, rtol=1e-3, atol=1e-3)


def test_what_is_no_draft_is_named(tmp_path):
    file, sound = tmp_path / "missing.gguf", tmp_path / "small.gguf"
    write_gguf(sound, layers=1)
    for content in (None, b"not a model", sound.read_bytes()[:2000]):
        if content is not None:
            file.write_bytes(content)
        for name in ("small-lm", None):
            with pytest.raises(CheckpointError):
                Speculator(name, target=tiny_model(), draft=file)
    with pytest.raises(CheckpointError, match="small-lm"):
        Speculator("longspec", target=tiny_model(), draft=sound)
    write_gguf(file, rope={"scaling.type": "longrope"})
    with pytest.raises(CapabilityError):
        Speculator("small-lm", target=tiny_model(), draft=file)
