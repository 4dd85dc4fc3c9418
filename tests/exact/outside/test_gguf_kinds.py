"""GGUF files that are no whole model: parts are read as one, anything else is named for what it is."""

from __future__ import annotations

import pytest
import torch

import longdraft
from longdraft import Speculator
from longdraft.errors import CapabilityError, CheckpointError
from tests.support.gguf_files import write_gguf

IDS = [[4, 5, 6, 4, 5, 6, 4, 5]]


def texts(model, tokenizer) -> list[int]:
    spec = Speculator("prompt-lookup", target=model, tokenizer=tokenizer, min_n=1, plan="fixed")
    (result,) = spec.generate(IDS, max_new_tokens=12, eos_token_ids=[])
    assert result.drafted > result.accepted
    return result.token_ids


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("qwen3", {"dtype": "bfloat16"}), ("qwen3", {"arithmetic": "int8"})]
)
def test_the_parts_of_a_model_are_read_as_one(family, options, tmp_path):
    write_gguf(tmp_path / "whole.gguf", family)
    write_gguf(tmp_path / "m.gguf", family, split=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    whole = longdraft.load(tmp_path / "whole.gguf", device="cpu", **options)
    for part in (parts[0], parts[-1]):
        model, tokenizer = longdraft.load(part, device="cpu", **options)
        ids = torch.tensor(IDS)
        assert torch.equal(model(ids).logits, whole.model(ids).logits)
        assert texts(model, tokenizer) == texts(*whole)
        assert tokenizer.get_vocab() == whole.tokenizer.get_vocab()


def test_a_part_that_is_written_to_missing_or_renamed_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", split=7)
    first, second, *_, last = sorted(tmp_path.glob("m-*.gguf"))
    model, tokenizer = longdraft.load(first, device="cpu")
    with last.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=last.name):
        texts(model, tokenizer)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=second.name):
        longdraft.load(first, device="cpu")
    with pytest.raises(CheckpointError, match="llama-gguf-split"):
        longdraft.load(tmp_path / "elsewhere.gguf", device="cpu")


@pytest.mark.parametrize(
    ("kind", "word"),
    [("adapter", "LoRA"), ("mmproj", "projector"), ("imatrix", "importance matrix"), ("of tomorrow", "of tomorrow")],
)
def test_files_that_hold_no_model_are_named(kind, word, tmp_path):
    write_gguf(tmp_path / "a.gguf", numbers={"general.type": kind})
    for options in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(CheckpointError, match=rf"a\.gguf.*{word}"):
            longdraft.load(tmp_path / "a.gguf", device="cpu", **options)


@pytest.mark.parametrize(
    ("family", "field"),
    [("llama", "feed_forward_length"), ("qwen2", "attention.head_count"), ("gemma3", "attention.head_count_kv")],
)
def test_a_number_for_each_layer_is_read_if_all_are_the_same_and_named_if_not(field, family, tmp_path):
    config = write_gguf(tmp_path / "plain.gguf", family).config
    size = {"feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads}
    one = size.get(field, config.num_key_value_heads)
    for values in ([one, one], [one, 2 * one]):
        write_gguf(tmp_path / "a.gguf", family, numbers={f"{family}.{field}": values})
        for options in ({}, {"dtype": "bfloat16"}):
            if values[0] != values[1]:
                with pytest.raises(CapabilityError, match=field):
                    longdraft.load(tmp_path / "a.gguf", device="cpu", **options)
                continue
            plain = longdraft.load(tmp_path / "plain.gguf", device="cpu", **options).model
            read = longdraft.load(tmp_path / "a.gguf", device="cpu", **options).model
            assert torch.equal(read(torch.tensor(IDS)).logits, plain(torch.tensor(IDS)).logits)
