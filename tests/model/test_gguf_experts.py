"""GGUF files of mixtures of experts: their matrices are read as they are stored."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import ggml

import longdraft
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.model.stored_experts import StoredExperts
from longdraft.native import kernels
from tests.gguf_experts import ARCHITECTURES, write_moe_gguf
from tests.gguf_files import ids
from tests.tree_rows import plain_and_tree, text

pytest.importorskip("gguf")
# Older versions of transformers (5.17) read no tokenizer of gpt-oss from a GGUF file.
CONVERTERS = getattr(ggml, "GGUF_TO_FAST_CONVERTERS", None)
TYPES = [name for name in ARCHITECTURES if name != "gpt_oss" or CONVERTERS is None or "gpt_oss" in CONVERTERS]
# The hidden size is a multiple of the weights of a block.
FORMATS = {"Q8_0": 64, "Q4_K": 256, "Q6_K": 256, "MXFP4": 64, "F32": 64}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_the_weights_are_those_that_the_file_stands_for(model_type, kind, tmp_path):
    written = write_moe_gguf(tmp_path / "a.gguf", model_type, kind, FORMATS[kind])
    expected, logits = written.state_dict(), written(ids()).logits
    for weights in ("stored", "float32"):
        model = load(tmp_path / "a.gguf", device="cpu", weights=weights, arithmetic="float32").model
        stays = weights == "stored" and kind != "F32"
        assert isinstance(model.model.layers[0].mlp.experts, StoredExperts) == stays
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        torch.testing.assert_close(model(ids()).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model_type", TYPES)
def test_int8_rows_of_a_tree_have_the_bits_of_plain_decoding(model_type, tmp_path):
    if kernels() is None:
        pytest.skip("int8 arithmetic needs kernels")
    write_moe_gguf(tmp_path / "a.gguf", model_type, "MXFP4" if model_type == "gpt_oss" else "Q8_0")
    loaded = load(tmp_path / "a.gguf", device="cpu")
    runner = TargetRunner(loaded.model)
    assert loaded.model.model.layers[0].mlp.experts.down.int8
    assert torch.equal(*plain_and_tree(runner, text(40), text(12, 3)))
    plain, drafted = (
        longdraft.Speculator(method, target=loaded.model, tokenizer=loaded.tokenizer).generate(
            [text(20)], max_new_tokens=16
        )[0]
        for method in ("ar", "prompt-lookup")
    )
    assert plain.token_ids == drafted.token_ids


@torch.no_grad()
def test_without_kernels_stored_experts_are_unpacked_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    written = write_moe_gguf(tmp_path / "a.gguf", TYPES[-1], "MXFP4")
    model = load(tmp_path / "a.gguf", device="cpu", weights="stored").model
    assert isinstance(model.model.layers[0].mlp.experts, StoredExperts)
    torch.testing.assert_close(model(ids()).logits, written(ids()).logits, rtol=1e-3, atol=1e-3)


def test_experts_of_another_size_are_named(tmp_path):
    write_moe_gguf(tmp_path / "a.gguf", "qwen3_moe", said=32)
    with pytest.raises(longdraft.errors.CheckpointError, match=r"mlp\.experts\.gate"):
        load(tmp_path / "a.gguf", device="cpu")
