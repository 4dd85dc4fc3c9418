"""A GGUF file as a small-LM draft: wherever a folder of transformers works, with the weights as they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longdraft import Speculator, load
from longdraft.drafts.language_model import PublishedLM, SmallLMDraft
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.quant import stored_model
from longdraft.model.quant.stored import StoredEmbedding, StoredLinear
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_model

pytest.importorskip("gguf")

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)]]
# Sizes that fit the tiny models' trained context of 512 tokens.
SMALL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4}
METHODS_WITH = [
    ("small-lm", {"view": "streaming", "sink": 4, "recent": 16}), ("specextend", SMALL),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a target, and of a model of one layer with its tokens."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "target.gguf")
    write_gguf(folder / "small.gguf", "qwen2", "Q4_0", layers=1, hidden=32, heads=2, seed=1)
    return folder / "target.gguf", folder / "small.gguf"


def logits(bound, tokens):
    return forward(bound.runner, [tokens], bound.runner.new_store(1, 64), [0]).logits[0]


def alone(model, tokens):
    """Logits of a model as a target."""
    runner = TargetRunner(model)
    return forward(runner, [tokens], runner.new_store(1, 64), [0]).logits[0]


def in_float32(model, tokens):
    """Logits by the model's own code, in float32 arithmetic from now on."""
    stored_model.set_int8(model, False)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_it_is_read_as_it_is_stored(files):
    target, small = files
    draft = SmallLMDraft.load(small)
    expected = load(small, device="cpu").model
    assert isinstance(draft, PublishedLM) and draft.folder == small and draft.trained_length == 512
    assert draft.vocabulary is None and draft.retrieval_layer is None
    written = write_gguf(small.with_name("again.gguf"), "qwen2", "Q4_0", layers=1, hidden=32, heads=2, seed=1)
    assert draft.parameters == sum(p.numel() for p in written.parameters())
    bound = draft.bind(TargetRunner(load(target, device="cpu").model))
    model = bound.runner.model
    assert bound.draft_to_target_ids is None
    assert type(model.model.layers[0].self_attn.q_proj) is type(expected.model.layers[0].self_attn.q_proj)
    torch.testing.assert_close(logits(bound, [5, 60, 7, 1]), alone(expected, [5, 60, 7, 1]))
    torch.testing.assert_close(in_float32(model, [5, 60, 7, 1]), in_float32(expected, [5, 60, 7, 1]))


@pytest.mark.parametrize(("method", "options"), METHODS_WITH, ids=str)
def test_every_method_that_takes_such_drafts_takes_it(files, method, options):
    target, small = files
    model, tokenizer = load(target, device="cpu")
    spec = Speculator(method, target=model, tokenizer=tokenizer, draft=small, **options)
    results = spec.generate(PROMPTS, max_new_tokens=20)
    expected = Speculator("ar", target=model, tokenizer=tokenizer).generate(PROMPTS, max_new_tokens=20)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert sum(r.drafted for r in results) > 0


@pytest.mark.parametrize("size", [16, 32])
def test_a_head_of_the_first_tokens_alone(files, size):
    """Logits of these tokens are those of the whole head; other tokens are written, but not proposed."""
    target, small = files
    model = load(target, device="cpu").model
    runner, draft = TargetRunner(model), SmallLMDraft.load(small)
    trimmed = draft.with_trimmed_vocab(size)
    assert (
        trimmed is draft.with_trimmed_vocab(size)
        and trimmed.vocabulary == size
        and draft.with_trimmed_vocab(64) is draft
    )
    assert torch.equal(logits(trimmed.bind(runner), [5, 60, 7]), logits(draft.bind(runner), [5, 60, 7])[:, :size])
    spec = Speculator("small-lm", target=model, draft=small, vocabulary=size)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=20)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=20)] == [r.token_ids for r in expected]


@pytest.mark.parametrize(
    ("size", "tie", "words", "dtype"),
    [
        (48, True, "F16", "auto"), (80, False, "Q8_0", "auto"), (80, True, "Q8_0", "bfloat16"),
    ],
)  # fmt: skip
def test_embeddings_that_are_padded_to_other_sizes(files, tmp_path, size, tie, words, dtype):
    """Allowed where the tokens are the same; nothing that the target does not know is proposed."""
    if dtype != "auto":
        pytest.importorskip("accelerate")
    small = tmp_path / "small.gguf"
    written = write_gguf(small, words=words, layers=1, vocab=size, tie=tie, seed=5)
    model = load(files[0], device="cpu", dtype=dtype).model
    bound = SmallLMDraft.load(small).bind(TargetRunner(model))
    own = bound.runner.model
    if dtype == "auto" and isinstance(own.model.layers[0].self_attn.q_proj, StoredLinear):
        assert isinstance(own.lm_head, StoredLinear) and isinstance(own.model.embed_tokens, StoredEmbedding)
    found = logits(bound, [3, 4, 5, 40])
    assert found.shape == (4, min(size, 64)) and bound.runner.vocab_size == min(size, 64)
    if dtype == "auto":
        torch.testing.assert_close(found, alone(load(small, device="cpu").model, [3, 4, 5, 40])[:, :64])
    assert logits(bound, [63, 3]).isfinite().all()  # an id that one of the small models never had
    results = Speculator("small-lm", target=model, draft=small).generate(PROMPTS, max_new_tokens=12)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=12)
    if dtype == "auto":
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        true = in_float32(written, [3, 4, 5, 40])[:, :64]
        torch.testing.assert_close(in_float32(own, [3, 4, 5, 40]), true, rtol=1e-3, atol=1e-3)


def test_other_tokens_are_refused_with_both_names_and_the_difference(files, tmp_path):
    """As many of them: their number says nothing."""
    other = tmp_path / "other.gguf"
    write_gguf(other, layers=1, tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "b", "a"])
    model = load(files[0], device="cpu").model
    with pytest.raises(CheckpointError) as error:
        Speculator("small-lm", target=model, draft=other).generate([[1, 2]], max_new_tokens=2)
    said = str(error.value)
    assert str(other) in said and f"from that of {files[0]}: 2 of 64 ids differ, for example 4 is 'b'" in said


def test_what_is_no_draft_is_named(files, tmp_path):
    missing = tmp_path / "missing.gguf"
    for name in ("small-lm", None):
        with pytest.raises(CheckpointError):
            Speculator(name, target=tiny_model(), draft=missing)
    missing.write_bytes(b"not a model")
    with pytest.raises(CheckpointError):
        Speculator("small-lm", target=tiny_model(), draft=missing)
    missing.write_bytes(files[1].read_bytes()[:2000])
    with pytest.raises(CheckpointError):
        Speculator("small-lm", target=tiny_model(), draft=missing)
    with pytest.raises(CheckpointError, match="small-lm"):
        Speculator("longspec", target=tiny_model(), draft=files[1])
    write_gguf(missing, rope={"scaling.type": "longrope"})
    with pytest.raises(CapabilityError):
        Speculator("small-lm", target=tiny_model(), draft=missing)
