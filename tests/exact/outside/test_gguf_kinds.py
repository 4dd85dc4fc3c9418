"""GGUF files that are no whole model: parts are read as one, anything else is named for what it is. And files with
blocks that no kernel reads: they alone become Q8_0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import longdraft
from longdraft import Speculator
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.native import kernels
from tests.support.gguf_architectures import write
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


# --- blocks that no kernel reads ---

FOREIGN = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4")
SIZES = {"hidden": 256, "intermediate_size": 512}


def mixture(foreign: str, *places: str) -> Callable[[str], str]:
    """Types by tensors' names: ``foreign`` at ``places``, others that people's files mix elsewhere."""
    stored = {"attn_q": "Q4_K", "attn_k": "Q5_K", "ffn_up": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_gate": "IQ4_XS"}

    def kind(name: str) -> str:
        part = name.removesuffix(".weight").split(".")[-1]
        return foreign if part in places else "F16" if part == "token_embd" else stored.get(part, "Q8_0")

    return kind


def stored_bytes(model: torch.nn.Module) -> dict[str, int]:
    """The bytes of each stored matrix, by the module's name."""
    return {name: m.data.numel() for name, m in model.named_modules() if hasattr(m, "format")}


def written_tokens(model: torch.nn.Module, method: str) -> tuple[str, list[int]]:
    (result,) = Speculator(method, target=model).generate(IDS, max_new_tokens=24, eos_token_ids=[])
    assert method == "ar" or result.drafted > result.accepted > 0
    return result.arithmetic, result.token_ids


@pytest.mark.parametrize("kind", FOREIGN)
@torch.no_grad()
def test_only_matrices_in_blocks_that_no_kernel_reads_become_q8_0(kind: str, tmp_path: Path) -> None:
    file, said = tmp_path / "a.gguf", list[str]()
    expected = write_gguf(file, kind=mixture(kind, "ffn_down", "attn_v"), **SIZES).state_dict()
    stored = longdraft.load(file, device="cpu", arithmetic="float32", weights="stored", progress=said.append).model
    assert any(kind in line and "Q8_0" in line for line in said)
    for name, weight in stored.state_dict().items():
        if name.endswith(("down_proj.weight", "v_proj.weight")):
            step = expected[name].unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
            assert ((weight - expected[name]).abs() <= 0.6 * step).all()  # half a step, and what a float16 scale rounds
            error, size = (weight - expected[name]).square().mean(), expected[name].square().mean()
            assert 0 <= error < 1e-4 * size  # 1 % of the weights' root mean square
        else:
            assert torch.equal(weight, expected[name])
    sizes = stored_bytes(stored)
    assert sizes["model.layers.0.mlp.down_proj"] == 256 * 512 * 34 // 32
    assert sizes["model.layers.1.mlp.up_proj"] == 256 * 512 * 144 // 256  # as in the file
    assert sizes["model.embed_tokens"] == 64 * 256 * 2
    unpacked = longdraft.load(file, device="cpu", weights="float32").model
    assert not stored_bytes(unpacked)
    assert all(torch.equal(weight, expected[name]) for name, weight in unpacked.state_dict().items())
    logits, exact = stored(torch.tensor(IDS)).logits, unpacked(torch.tensor(IDS)).logits
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("kind", ["IQ2_XS", "IQ3_S", "NVFP4"])
@pytest.mark.parametrize("options", [{}, {"arithmetic": "float32"}])
def test_a_file_with_such_blocks_decodes_as_plainly_as_any(kind: str, options: dict[str, str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", kind=mixture(kind, "ffn_down"), **SIZES)
    model = longdraft.load(tmp_path / "a.gguf", device="cpu", **options).model
    arithmetic, tokens = written_tokens(model, "prompt-lookup")
    assert (arithmetic, tokens) == written_tokens(model, "ar")
    assert arithmetic == ("int8" if kernels() is not None and not options else "float32")


@torch.no_grad()
def test_experts_in_such_blocks_stay_in_eight_bits(tmp_path: Path) -> None:
    kinds = mixture("IQ2_XXS", "ffn_gate_exps", "ffn_down_exps")
    written = write(tmp_path / "a.gguf", "qwen3moe", hidden=256, kinds=kinds, moe_intermediate_size=256)
    model = longdraft.load(tmp_path / "a.gguf", device="cpu", arithmetic="float32").model
    sizes = {name.rpartition(".")[2]: size for name, size in stored_bytes(model).items() if "experts" in name}
    weights = 4 * 256 * 256
    assert sizes == {"gate": weights * 34 // 32, "up": weights * 144 // 256, "down": weights * 34 // 32}
    logits, exact = model(torch.tensor(IDS)).logits, written(torch.tensor(IDS)).logits
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()
    assert written_tokens(model, "prompt-lookup") == written_tokens(model, "ar")


@torch.no_grad()
def test_nvfp4_has_a_scale_beside_each_matrix(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: ``scale`` multiplies the weights, ``input_scale`` is for rounded inputs."""
    beside = {"blk.0.ffn_down.scale": [0.5], "blk.0.ffn_down.input_scale": [3.0]}
    expected = write_gguf(tmp_path / "a.gguf", kind=mixture("NVFP4", "ffn_down"), beside=beside, **SIZES)
    expected.model.layers[0].mlp.down_proj.weight *= 0.5
    exact = expected(torch.tensor(IDS)).logits
    for weights, error in ((None, 0.05), ("float32", 1e-4)):
        model = longdraft.load(tmp_path / "a.gguf", device="cpu", weights=weights, arithmetic=None).model
        assert (model(torch.tensor(IDS)).logits - exact).abs().max() < error * exact.abs().max()
