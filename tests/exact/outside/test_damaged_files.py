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
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import longdraft
from longdraft import LongdraftError, Speculator
from longdraft.model.gguf.loading import GGUFFile
from tests.fuzz.case import limited, verdict
from tests.fuzz.formats import FORMATS, target
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_folder

# Cases of a format in the fast suite: fewer of those whose work takes long.
CASES = dict.fromkeys(FORMATS, 8) | {"batch": 30, "bench.jsonl": 2, "small-lm": 5, "lm": 5}
CASES |= dict.fromkeys(("llama.gguf", "snapshot", "recurrent snapshot"), 16)


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
    with limited(), pytest.raises(LongdraftError) as caught:
        use(*arguments)
    assert part in str(caught.value)


Change = Callable[[Path], object]


def load(path):
    return longdraft.load(path, device="cpu")


def changed(file: Path, **values) -> None:
    """Other values in a configuration."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | values))


def with_values(**values) -> Change:
    return lambda file: changed(file, **values)


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def table_of(dtype: torch.dtype) -> Change:
    """The ids of a smaller vocabulary as another dtype."""

    def change(file: Path) -> None:
        tensors = load_file(file)
        save_file(tensors | {"d2t": tensors["d2t"].to(dtype)}, file)

    return change


def pickled(tensors: object) -> Change:
    return lambda file: torch.save(tensors, file)


# Format, file of it, and what is wrong: only regular files are opened, and values are such as a model can have.
FAULTS: list[tuple[str, str, Change]] = [
    *((form, file, kind) for kind in (pipe, device) for form, file in (
        ("llama.gguf", ""), ("model", "config.json"), ("model", "model.safetensors"), ("model", "tokenizer.json"),
        ("model", "chat_template.jinja"), ("longspec", "config.json"), ("longspec", "model.safetensors"),
    )),
    *(("model", "config.json", with_values(**values)) for values in (
        {"head_dim": 10**6}, {"intermediate_size": 1 << 24}, {"num_hidden_layers": 10**6}, {"num_hidden_layers": 0},
        {"max_position_embeddings": 1}, {"max_position_embeddings": -1}, {"eos_token_id": list(range(300_000))},
    )),
    ("model", "generation_config.json", with_values(eos_token_id="x")),
    *(("model", "tokenizer_config.json", with_values(**values)) for values in (
        {"extra_special_tokens": list(range(300_000))}, {"unk_token": ""},
    )),
    *(("dflash", "config.json", with_values(**values)) for values in (
        {"block_size": 10**5}, {"transformer_layer_config": {"num_hidden_layers": 10**9}},
    )),
    ("longspec", "config.json", lambda file: os.truncate(file, 1 << 40)),  # it is not read
    *(("longspec", "model.safetensors", table_of(dtype)) for dtype in (
        torch.float8_e4m3fn, torch.complex64, torch.float32, torch.bool,
    )),
    *(("eagle", "pytorch_model.bin", pickled(tensors)) for tensors in (
        {3: torch.zeros(2)}, {"fc.weight": torch.zeros(2, 2).to_sparse()}, {"fc.weight": {}}, [torch.zeros(1)],
        {"fc.weight": torch.zeros(2, device="meta")},
    )),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_is_refused_by_the_files_name(number, tmp_path):
    name, file, change = FAULTS[number]
    FORMATS[name].make(tmp_path / "a-model")
    path = tmp_path / "a-model" / file
    if change in (pipe, device):
        path.unlink(missing_ok=True)
    change(path)
    refused("a-model", FORMATS[name].use, tmp_path / "a-model")


def test_an_index_names_files_of_its_folder(tmp_path):
    tiny_folder(tmp_path / "other", layers=1, chat=False)
    folder = Path(shutil.copytree(tmp_path / "other", tmp_path / "a-model"))
    names = [*safe_open(folder / "model.safetensors", "pt").keys()]
    (folder / "model.safetensors").unlink()
    for place in ("../other/model.safetensors", "/dev/zero", "gone.safetensors", ".", "", 5, None, {}):
        changed(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(names, place))
        refused(folder.name, load, folder)
        for method in ("tokenswift", "mtp"):
            refused(folder.name, lambda name: Speculator(name, target=target(), draft=str(folder)), method)


def test_layers_and_tensors_of_a_file_are_those_of_the_model(tmp_path):
    for number in (1, 3, 100_000, 2**31):
        write_gguf(tmp_path / "m.gguf", numbers={"llama.block_count": number})
        refused("m.gguf", load, tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    # A tensor that nothing uses is named.
    for name in ("output.weight", "blk.0.attn_q.bias", "blk.2.attn_q.weight", "rope_freqz.weight"):
        there, other = b"output_norm.weight", name.encode().ljust(18, b"x")[:18]
        (tmp_path / "m.gguf").write_bytes(data.replace(there, other))
        assert gguf.GGUFReader(tmp_path / "m.gguf").tensors
        refused("m.gguf", load, tmp_path / "m.gguf")


def test_metadata_that_nothing_uses_takes_no_memory(tmp_path):
    more = {"general.words": "x" * (4 << 20), "general.long": ["y"] * 20_000, "llama.numbers": [7] * 20_000}
    write_gguf(tmp_path / "m.gguf", numbers=more)
    assert {*more} <= {*gguf.GGUFReader(tmp_path / "m.gguf").fields}
    load(tmp_path / "m.gguf")
    tracemalloc.start()
    try:
        GGUFFile(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


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
