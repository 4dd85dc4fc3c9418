"""Files that are damaged at random: right work, or an error of longdraft's own that names the file.

Never a hang, a signal, an error of another package, or another text than the target's. Seeds are fixed here; any others
hold too: ``python -m tests.fuzz FIRST LAST [FORMAT...]``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import longdraft
from longdraft import LongdraftError, Speculator
from longdraft.errors import CheckpointError
from longdraft.model.gguf.files import File
from tests.fuzz.case import bounded, verdict
from tests.fuzz.formats import FORMATS, IDS, target
from tests.support.drafts import random_draft
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_folder

# Cases of a format in the fast suite: fewer of those whose work takes long.
CASES = dict.fromkeys(FORMATS, 8) | {"batch": 30, "bench.jsonl": 2, "small-lm": 5, "lm": 5, "llama.gguf": 16}


def cases(name: str, seeds: range, folder: Path) -> list[str]:
    form, whole = FORMATS[name], folder / f"a-{name.replace(' ', '-')}"
    form.make(whole)
    assert form.use(whole) == form.right()
    (folder / "damaged").mkdir()
    found = (verdict(name, form, seed, whole, folder / "damaged") for seed in seeds)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_by_name_or_used_rightly(name, tmp_path):
    assert cases(name, range(CASES[name]), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_more(name, tmp_path):
    assert cases(name, range(1_000, 1_040 if name == "bench.jsonl" else 1_400), tmp_path) == []


def refused(part: str, use, *arguments) -> None:
    with bounded(), pytest.raises(LongdraftError) as caught:
        use(*arguments)
    assert part in str(caught.value)


def load(path):
    return longdraft.load(path, device="cpu")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name", ["m.gguf", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_only_regular_files_are_opened(name, kind, tmp_path):
    folder = tmp_path / "model"
    tiny_folder(folder, layers=1, chat=False)
    draft = random_draft(tmp_path / "draft", target())
    for place in (folder, draft):
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name) if kind == "pipe" else (place / name).symlink_to("/dev/zero")
    refused(name, load, folder / name if name == "m.gguf" else folder)
    if name in ("config.json", "model.safetensors"):
        refused(name, lambda: Speculator(str(draft), target=target()))


def test_a_configuration_of_many_bytes_is_not_read(tmp_path):
    draft = random_draft(tmp_path / "draft", target())
    os.truncate(draft / "config.json", 1 << 40)
    refused("config.json", lambda: Speculator(str(draft), target=target()))


def changed(file: Path, **values) -> Path:
    """A folder, with other values in one of its configurations."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | values))
    return file.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "a-model"
    return tiny_folder(folder, layers=1, chat=False)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"head_dim": 10**6}),
        ("config.json", {"intermediate_size": 1 << 24}),
        ("config.json", {"num_hidden_layers": 10**6}),
        ("config.json", {"num_hidden_layers": 0}),
        ("config.json", {"max_position_embeddings": 1}),
        ("config.json", {"max_position_embeddings": -1}),
        ("config.json", {"eos_token_id": list(range(300_000))}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("tokenizer_config.json", {"extra_special_tokens": list(range(300_000))}),
        ("tokenizer_config.json", {"unk_token": ""}),
    ],
    ids=str,
)
def test_values_that_no_model_has(file, values, model, tmp_path):
    def used(path: Path) -> None:
        loaded = load(path)
        longdraft.Speculator("ar", loaded.model, loaded.tokenizer).generate(IDS, max_new_tokens=8)

    folder = changed(Path(shutil.copytree(model, tmp_path / "a-model")) / file, **values)
    refused(folder.name, used, folder)


@pytest.mark.parametrize("values", [{"block_size": 10**5}, {"transformer_layer_config": {"num_hidden_layers": 10**9}}])
def test_counts_of_a_published_draft(values, tmp_path):
    FORMATS["dflash"].make(tmp_path / "draft")
    folder = changed(tmp_path / "draft" / "config.json", **values)
    refused(folder.name, lambda: Speculator(str(folder), target=target()).generate(IDS, max_new_tokens=8))


@pytest.mark.parametrize("place", ["../other/model.safetensors", "/dev/zero", "gone.safetensors", ".", "", 5, None, {}])
def test_an_index_names_files_of_its_folder(place, model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    folder = Path(shutil.copytree(model, tmp_path / "a-model"))
    names = dict.fromkeys(safe_open(folder / "model.safetensors", "pt").keys(), place)
    (folder / "model.safetensors").unlink()
    changed(folder / "model.safetensors.index.json", weight_map=names)
    refused(folder.name, load, folder)
    for method in ("heads", "mtp"):
        refused(folder.name, lambda name: Speculator(name, target=target(), draft=str(folder)), method)


@pytest.mark.parametrize("number", [1, 3, 100_000, 2**31])
def test_layers_are_as_many_as_the_file_has(number, tmp_path):
    write_gguf(tmp_path / "m.gguf", numbers={"llama.block_count": number})
    refused("m.gguf", load, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.bias", "blk.2.attn_q.weight", "rope_freqz.weight"])
def test_a_tensor_that_nothing_uses_is_named(name, tmp_path):
    import gguf

    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    there, other = b"output_norm.weight", name.encode().ljust(18, b"x")[:18]
    (tmp_path / "m.gguf").write_bytes(data.replace(there, other))
    assert gguf.GGUFReader(tmp_path / "m.gguf").tensors
    refused("m.gguf", load, tmp_path / "m.gguf")


def test_metadata_that_nothing_uses_takes_no_memory(tmp_path):
    import tracemalloc

    import gguf

    more = {"general.words": "x" * (4 << 20), "general.long": ["y"] * 20_000, "llama.numbers": [7] * 20_000}
    write_gguf(tmp_path / "m.gguf", numbers=more)
    assert {*more} <= {*gguf.GGUFReader(tmp_path / "m.gguf").fields}
    load(tmp_path / "m.gguf")
    tracemalloc.start()
    try:
        File(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_pickled_drafts_hold_plain_tensors_by_name(tmp_path):
    for number, tensors in enumerate((
        {3: torch.zeros(2)}, {"fc.weight": torch.zeros(2, 2).to_sparse()}, {"fc.weight": torch.zeros(2, device="meta")},
        {"fc.weight": {}}, [torch.zeros(1)],
    )):  # fmt: skip
        folder = FORMATS["eagle"].make(tmp_path / f"draft{number}")
        torch.save(tensors, folder / "pytorch_model.bin")
        refused(folder.name, lambda at: Speculator(str(at), target=target()), folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.float32, torch.bool])
def test_a_draft_whose_table_holds_no_ids(dtype, tmp_path):
    draft = random_draft(tmp_path / "draft", target(), kept=[1, 4, 5])
    from safetensors.torch import load_file

    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"].to(dtype)}, draft / "model.safetensors")
    with pytest.raises(CheckpointError, match="draft"):
        Speculator(str(draft), target=target()).generate(IDS, max_new_tokens=2)


@pytest.mark.slow
def test_the_kernels_read_damaged_files_within_bounds(tmp_path):
    """In a process whose kernels are compiled with sanitizers: a report of theirs ends it."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    if runtime.returncode or not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("no sanitizers here")
    compiler = tmp_path / "compiler"  # which is quick without optimisation alone, and needs no sanitizer itself
    flags = "-O0 -fsanitize=address,undefined -fno-sanitize-recover=all"
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec g++ "$@" {flags}\n')
    compiler.chmod(0o755)
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:verify_asan_link_order=0",
        "CXX": str(compiler),
        "LONGDRAFT_CACHE": str(tmp_path),
    }
    command = [sys.executable, "-m", "tests.fuzz", "0", "20", "llama.gguf", "qwen3.gguf"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert list(tmp_path.glob("native/kernels-*.so"))
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
