"""GGUF files of architectures that transformers does not read: the weights that they stand for, as they store them."""

from __future__ import annotations

import pytest
import torch

import longdraft
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.loading import load
from longdraft.model.stored import is_stored
from longdraft.native import kernels
from tests.gguf_architectures import ARCHITECTURES, write
from tests.quick import few, in_turn

pytest.importorskip("gguf")
PROMPT = (torch.arange(40) * 7 % 61 + 1)[None]


@pytest.mark.parametrize(("architecture", "kind"), in_turn(ARCHITECTURES, ["Q8_0", "Q4_K", "F16", "F32"]))
@torch.no_grad()
def test_the_weights_are_those_that_the_file_stands_for(architecture, kind, tmp_path):
    hidden = 256 if kind == "Q4_K" else 64
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    over = heads if kind == "Q4_K" and "qwen" in architecture else {}
    written = write(tmp_path / "a.gguf", architecture, kind, hidden, **over)
    expected, logits = written.state_dict(), written(PROMPT).logits
    for weights in ("stored", "float32"):
        model = load(tmp_path / "a.gguf", device="cpu", weights=weights, arithmetic="float32").model
        assert type(model) is type(written) and is_stored(model) == (weights == "stored")
        found = model.state_dict()
        assert found.keys() == expected.keys()
        for name, weight in expected.items():  # a file has 1 + the weight of a norm, and minus exp of A_log
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)
        own = model(PROMPT).logits
        torch.testing.assert_close(own, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))


@pytest.mark.parametrize("architecture", few(ARCHITECTURES, list(ARCHITECTURES)[::3]))
def test_drafts_write_what_plain_decoding_writes(architecture, tmp_path):
    written = write(tmp_path / "a.gguf", architecture)
    for arithmetic in ("float32", "int8") if kernels() is not None else ("float32",):
        model, tokenizer = load(tmp_path / "a.gguf", device="cpu", arithmetic=arithmetic)
        plain, drafted = (
            longdraft.Speculator(method, target=model, tokenizer=tokenizer)
            .generate([PROMPT[0].tolist()], max_new_tokens=12, eos_token_ids=[])[0]
            .token_ids
            for method in ("ar", "prompt-lookup")
        )
        assert plain == drafted
        if arithmetic == "float32":
            own = written.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert plain == own[0, PROMPT.shape[1] :].tolist()


def test_rows_that_two_tensors_of_other_types_hold_stay_as_they_are_stored(tmp_path):
    """Qwen3-Next has queries, keys, values and gates in one matrix, of which llama.cpp makes two."""
    kinds = {"attn_gate": "Q8_0"}
    written = write(
        tmp_path / "a.gguf", "qwen3next", hidden=64, kinds=lambda name: kinds.get(name.split(".")[-2], "Q4_0")
    )
    model = load(tmp_path / "a.gguf", device="cpu", arithmetic="float32").model
    mixed = model.model.layers[0].linear_attn.in_proj_qkvz
    assert [part.format for part in mixed.parts] == ["Q4_0", "Q8_0"]
    with torch.no_grad():
        torch.testing.assert_close(model(PROMPT).logits, written(PROMPT).logits, rtol=1e-3, atol=1e-2)


def test_in_other_dtypes_weights_are_unpacked(tmp_path):
    write(tmp_path / "a.gguf", "qwen35")
    said = list[str]()
    model = load(tmp_path / "a.gguf", device="cpu", dtype="bfloat16", progress=said.append).model
    assert model.dtype is torch.bfloat16 and not is_stored(model) and "Unpacking" in said[-1]


def test_words_are_split_as_the_file_says(tmp_path):
    write(tmp_path / "a.gguf", "qwen35")
    tokenizer = load(tmp_path / "a.gguf", device="cpu").tokenizer
    assert tokenizer.tokenize("the the<|im_end|>he\n") == ["the", "Ġ", "the", "<|im_end|>", "he", "Ċ"]
    assert tokenizer.decode(tokenizer("the he").input_ids) == "the he" and tokenizer.eos_token == "<|im_end|>"


def test_gemmas_words_are_merged_from_letters(tmp_path):
    write(tmp_path / "a.gguf", "gemma4", split="gemma4")
    tokenizer = load(tmp_path / "a.gguf", device="cpu").tokenizer
    assert tokenizer.tokenize("the he") == ["the", "▁", "he"] and tokenizer.eos_token == "<eos>"


def test_what_is_not_read_is_refused(tmp_path):
    write(tmp_path / "a.gguf", "olmo2")
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "b.gguf").write_bytes(data.replace(b"olmo2", b"olmo9"))
    with pytest.raises(CheckpointError, match=r"b\.gguf"):
        load(tmp_path / "b.gguf", device="cpu")
    write(tmp_path / "d.gguf", "olmo2", fields={"attention.sliding_window": 8})
    with pytest.raises(CapabilityError, match="OLMo 3"):
        load(tmp_path / "d.gguf", device="cpu")
    write(tmp_path / "e.gguf", "qwen35", split="an unknown one")
    with pytest.raises(CapabilityError, match="an unknown one"):
        load(tmp_path / "e.gguf", device="cpu")
