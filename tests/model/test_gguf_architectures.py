"""GGUF files, a row for each architecture: the weights that they stand for, as they store them, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations import ggml

import longdraft
from longdraft import load
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.quant.stored_model import has_stored_weights
from longdraft.native import kernels
from tests.support.gguf_architectures import ARCHITECTURES, write
from tests.support.gguf_files import write_gguf
from tests.support.slow_marks import rotate_pairs, slow
from tests.support.tiny import FAMILIES

pytest.importorskip("gguf")
PROMPT = (torch.arange(40) * 7 % 61 + 1)[None]


def dense(family: str, file: Path, kind: str, hidden: int, tie: bool = True) -> PreTrainedModel:
    return write_gguf(file, family, kind, hidden=hidden, tie=tie, layers=6 if "gemma" in family else 2)


def other(architecture: str, file: Path, kind: str, hidden: int) -> PreTrainedModel:
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    return write(file, architecture, kind, hidden, **(heads if hidden == 256 and "qwen3" in architecture else {}))


FILES: dict[str, Callable[[Path, str, int], PreTrainedModel]] = {
    **{family: partial(dense, family) for family in (*FAMILIES, "gemma2", "gemma3")},
    "llama with a head of its own": partial(dense, "llama", tie=False),
    **{architecture: partial(other, architecture) for architecture in ARCHITECTURES},
}
CASES = [*rotate_pairs(FILES, ["Q8_0", "Q4_1", "F16", "F32"]), ("gpt_oss", "MXFP4"), slow("qwen3moe", "Q6_K")]
CASES += [slow(name, "Q4_K") for name in FILES]
# Older versions of transformers (5.17) read no tokenizer of gpt-oss from a GGUF file.
CONVERTERS = getattr(ggml, "GGUF_TO_FAST_CONVERTERS", ["gpt_oss"])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_file_is_its_model_and_drafts_write_what_plain_decoding_writes(name, kind, tmp_path):
    """Stored and unpacked; in float32 the text is that of the model's own ``generate``, and int8 is the default of
    files in 8 bits or fewer."""
    if name == "gpt_oss" and "gpt_oss" not in CONVERTERS:
        pytest.skip("needs a newer transformers")
    file = tmp_path / "a.gguf"
    written = FILES[name](file, kind, 256 if kind.endswith("_K") else 64)
    with torch.no_grad():
        expected, logits, models = written.state_dict(), written(PROMPT).logits, {}
        for weights in ("stored", "float32"):
            models[weights] = model = load(file, device="cpu", weights=weights, arithmetic="float32").model
            assert type(model) is type(written) and has_stored_weights(model) == (weights == "stored")
            found = model.state_dict()
            assert found.keys() == expected.keys()
            for key, weight in expected.items():  # a file has 1 + the weight of a norm, and minus exp of A_log
                torch.testing.assert_close(found[key], weight, rtol=1e-6, atol=1e-6)
            close = 1e-3 * float(logits.abs().max())
            torch.testing.assert_close(model(PROMPT).logits, logits, rtol=1e-3, atol=close)
    own = written.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert decoded(models["stored"]) == ("float32", own[0, PROMPT.shape[1] :].tolist())
    if kind not in ("F16", "F32") and kernels() is not None:
        model, tokenizer = load(file, device="cpu")
        assert tokenizer("the head")["input_ids"]
        drafted = decoded(model)
        assert drafted == decoded(model, "ar") and drafted[0] == "int8"


def decoded(model: PreTrainedModel, method: str = "prompt-lookup") -> tuple[str, list[int]]:
    """The arithmetic and the tokens."""
    spec = longdraft.Speculator(method, target=model)
    (result,) = spec.generate(PROMPT.tolist(), max_new_tokens=12, eos_token_ids=[])
    return result.arithmetic, result.token_ids


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
    assert model.dtype is torch.bfloat16 and not has_stored_weights(model) and "Unpacking" in said[-1]


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
    write(tmp_path / "f.gguf", "qwen3moe", fields={"expert_feed_forward_length": 32})
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.gate"):  # of another size
        load(tmp_path / "f.gguf", device="cpu")


@torch.no_grad()
def test_without_kernels_stored_experts_are_unpacked_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    written = write(tmp_path / "a.gguf", "qwen3moe", "MXFP4")
    model = load(tmp_path / "a.gguf", device="cpu", weights="stored").model
    assert has_stored_weights(model)
    torch.testing.assert_close(model(PROMPT).logits, written(PROMPT).logits, rtol=1e-3, atol=1e-2)
