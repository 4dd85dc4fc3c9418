"""Local folders and files: what loads, and what each way of being bad is answered with."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils.logging import is_progress_bar_enabled

from longdraft import load
from longdraft.errors import CapabilityError, CheckpointError, ContextError
from longdraft.model.load.loading import resolve_dtype
from tests.support.tiny import tiny_model, tiny_tokenizer

CONTEXT = 64
IDS = torch.arange(5, 25)[None]


def save(folder: Path, model: PreTrainedModel | None = None, **options: object) -> PreTrainedModel:
    """A complete checkpoint folder of a random model; returns that model."""
    model = model or tiny_model(layers=2, context=CONTEXT, **options)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
@pytest.mark.parametrize("tie", [False, True])
def test_folder_loads_as_saved_and_frozen(tmp_path, tie):
    saved = save(tmp_path, tie=tie)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tie

    model, tokenizer = load(tmp_path, device="cpu")

    torch.testing.assert_close(model(IDS).logits, saved(IDS).logits, rtol=0, atol=0)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu(tmp_path):
    save(tmp_path, dtype=torch.bfloat16)
    assert load(tmp_path, device="cpu").model.dtype is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == "auto"
    assert resolve_dtype("float16", torch.device("cuda")) is torch.float16


# What is loaded (None: a good folder) and how, the class of the error, and what it names.
REFUSED = [
    *((None, {"dtype": dtype}, CapabilityError, "give auto") for dtype in ("int8", torch.int32)),
    *((None, {"device": device}, CapabilityError, "give (cpu|device='cpu')") for device in ("gpu", "cuda:99")),
    *((None, {"rope_factor": x}, ContextError, "rope_factor") for x in (1.0, 0, -2.0, math.nan, math.inf)),
    ("notes.txt", {}, CheckpointError, "notes.txt is not a GGUF file"),
    ("bad.gguf", {}, CheckpointError, "bad.gguf"),
    *((name, {}, CheckpointError, "empty") for name in ("", "  ")),  # which is not the working folder
    # Not taken for hub ids:
    *((x, {}, CheckpointError, Path(x).name) for x in ("no/such/folder", "./nothing", "/nothing", "gone.gguf")),
    ("~/nothing-here", {}, CheckpointError, "nothing-here"),
]


@pytest.mark.parametrize(("name", "options", "error", "named"), REFUSED)
def test_what_cannot_be_loaded_is_refused(name, options, error, named, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for other in ("notes.txt", "bad.gguf"):
        (folder / other).write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(error, match=named):
        load(folder if name is None else name, **options)


@torch.no_grad()
def test_rope_factor_runs_past_the_trained_length(folder):
    """The slowest frequency is interpolated by the full factor, the fastest is left alone."""
    plain, model = (load(folder, device="cpu", **options).model for options in ({}, {"rope_factor": 2}))
    rope, own = model.config.rope_parameters, plain.config.rope_parameters["rope_theta"]
    named = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT, "rope_theta": own}
    assert {name: rope[name] for name in named} == named and model.config.max_position_embeddings == 2 * CONTEXT
    scaled, unscaled = model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq
    torch.testing.assert_close(scaled[[0, -1]], unscaled[[0, -1]] / torch.tensor([1, 2]))
    assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(2) + 1)
    long = torch.randint(5, 60, (1, CONTEXT + 30))
    assert model(long).logits.isfinite().all()
    assert not torch.allclose(model(long).logits, plain(long).logits)


def test_rope_factor_is_refused_on_top_of_another_scaling(folder):
    edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(CapabilityError, match="'linear'"):
        load(folder, rope_factor=2.0)


Harm = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def write(name: str, content: bytes) -> Harm:
    return lambda folder: (folder / name).write_bytes(content)


def remove(pattern: str) -> Harm:
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def configured(**changes: object) -> Harm:
    return lambda folder: edit_config(folder, **changes)


def without(key: str) -> Harm:
    def drop(folder: Path) -> None:
        kept = load_file(folder / WEIGHTS)
        del kept[key]
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})

    return drop


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


SHARD = b'{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}'
REMOTE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
HARMS: dict[str, tuple[list[Harm], str]] = {
    "truncated": ([truncate], r"model\.safetensors cannot be read.*fetch that file again"),
    "corrupt": ([write(WEIGHTS, b"\xff" * 4096)], r"model\.safetensors cannot be read.*fetch that file again"),
    "empty weights": ([write(WEIGHTS, b"")], r"model\.safetensors cannot be read.*fetch that file again"),
    "no weights": ([remove(WEIGHTS)], r"model\.safetensors is missing. Fetch it again"),
    "no config": ([remove("config.json")], r"has no config\.json.*save_pretrained"),
    "only a GGUF file": (
        [remove("config.json"), write("weights.gguf", b"GGUF")],
        r"has no config\.json.*Give the file itself: .*weights\.gguf",
    ),
    "a broken config": ([write("config.json", b'{"model_type": ')], r"config\.json.*not a valid JSON"),
    "an unknown architecture": ([configured(model_type="no-such-model")], "no-such-model"),
    "code of its own": (
        [write("own.py", b"raise SystemExit('remote code ran')"), configured(**REMOTE)],
        r"cannot be read: .*",
    ),
    "no tokenizer": ([remove("tokenizer*")], r"tokenizer in .* cannot be read: .*tokenizer\.json"),
    "a missing weight": (
        [without("model.layers.1.mlp.up_proj.weight")],
        r"model\.layers\.1\.mlp\.up_proj\.weight \(not there\).*incomplete",
    ),
    "no untied head": ([without("lm_head.weight")], r"lm_head\.weight \(not there\)"),
    "a weight of another size": ([configured(vocab_size=70)], r"lm_head\.weight \(\(61, 48\), not \(70, 48\)\)"),
    "a lost shard": (
        [remove(WEIGHTS), write(f"{WEIGHTS}.index.json", SHARD)],
        r"model-00001-of-00001\.safetensors cannot be read.*fetch that file",
    ),
    "a broken index": ([remove(WEIGHTS), write(f"{WEIGHTS}.index.json", b"[]")], r"index\.json is not a valid"),
}


@pytest.mark.parametrize(("harms", "says"), HARMS.values(), ids=HARMS)
def test_bad_folder_is_refused_with_file_and_remedy(folder, harms, says, capfd):
    for harm in harms:
        harm(folder)
    with pytest.raises(CheckpointError, match=says) as refused:
        load(folder, device="cpu")
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")  # transformers' own report would come on top


@pytest.mark.parametrize("name", ["nobody/nothing-of-the-kind", "not an id"])
def test_unreachable_hub_id_says_what_to_check(name, capfd):
    said: list[str] = []
    with pytest.raises(CheckpointError, match=f"'{name}' is not a folder here.*hub failed.*Check that https://"):
        load(name, progress=said.append)
    assert "hub" in said[0]
    assert capfd.readouterr() == ("", "")


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_pickled_weights_load_but_pickled_code_never_runs(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    remove(WEIGHTS)(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    loaded = load(folder, device="cpu").model.state_dict()
    torch.testing.assert_close(loaded["lm_head.weight"], weights["lm_head.weight"])

    torch.save(weights | {"trap": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load(folder, device="cpu")
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the trap was armed


def test_loading_says_its_steps_and_restores_the_switches(folder, capfd):
    logger, said = logging.getLogger("transformers"), list[str]()
    before = logger.level, is_progress_bar_enabled()
    load(folder, device="cpu", progress=said.append)
    assert said == [f"Loading the weights in {folder}"] and capfd.readouterr() == ("", "")
    without("model.layers.1.mlp.up_proj.weight")(folder)
    with pytest.raises(CheckpointError):
        load(folder, device="cpu")
    assert (logger.level, is_progress_bar_enabled()) == before
