"""Small random drafts for tiny targets, as folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from longdraft.drafters.eagle import EagleBlock
from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafters.heads import HeadsBlock, HeadsShape
from longdraft.drafters.longspec import LongSpecBlock, LongSpecShape
from longdraft.drafts import draft_folder, small_llama
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.drafts.eagle_formats import Eagle3Shape, EagleShape
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import describe_target
from tests.support.tiny import Family, tiny_model

M = TypeVar("M", bound=torch.nn.Module)
# RoPE settings in folders of EAGLE-3's kind.
ROPE = {
    "rope_theta": 1e4, "rope_factor": None, "rope_factor_trained": None, "rope_original_length": 512,
    "trained_length": 512,
}  # fmt: skip


def noise(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors: no weight is zero, no norm is one, so that a test notices if one is left out."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        numbers = torch.randn(tuple(shape), generator=generator)
        found[name] = 1 + 0.2 * numbers if "norm" in name else 0.25 * numbers
    return found


def fill_random(block: M, seed: int = 0) -> M:
    """Fills a module with the weights of :func:`noise`."""
    with torch.no_grad():
        weights = dict(block.named_parameters())
        for name, numbers in noise({name: weight.shape for name, weight in weights.items()}, seed).items():
            weights[name].copy_(numbers)
    return block


def vocab_tables(vocab_ids: list[int] | None, vocabulary: int = 0) -> dict[str, torch.Tensor]:
    """EAGLE-3's tensors of a smaller vocabulary: ``d2t`` and ``t2d``."""
    if vocab_ids is None:
        return {}
    whole = {"t2d": torch.isin(torch.arange(vocabulary), torch.tensor(vocab_ids))} if vocabulary else {}
    return {"d2t": torch.tensor(vocab_ids) - torch.arange(len(vocab_ids))} | whole


def _written(folder: Path, kind: str, model: PreTrainedModel, block: Any, kept: Any, **config: Any) -> Path:
    """A folder of longdraft's format."""
    config = asdict(block.shape) | {"draft_vocab_size": kept and len(kept)} | config
    draft_folder.save(
        folder, DraftFolder(kind, config, dict(block.state_dict()) | vocab_tables(kept), describe_target(model))
    )
    return folder


def random_block(model: PreTrainedModel, window: int = 8, seed: int = 0, final_norm: bool = False) -> LongSpecBlock:
    """A LongSpec block for this target, with random weights."""
    shape = describe_target(model)
    block = LongSpecBlock(
        LongSpecShape(
            shape["hidden_size"], 3 * shape["hidden_size"], shape["heads"], shape["kv_heads"], shape["head_dim"],
            model.config.rms_norm_eps, window, final_norm,
        )
    )  # fmt: skip
    return fill_random(block, seed)


def random_draft(
    folder: Path,
    model: PreTrainedModel,
    *,
    window: int = 8,
    kept: list[int] | None = None,
    seed: int = 0,
    final_norm: bool = False,
) -> Path:
    """A LongSpec draft folder for this target.

    Args:
        kept: target ids of a smaller vocabulary, in increasing order.
    """
    return _written(folder, "longspec", model, random_block(model, window, seed, final_norm), kept, trained_length=64)


def random_eagle3_block(
    model: PreTrainedModel, kept: list[int] | None = None, seed: int = 0, **over: Any
) -> Eagle3Block:
    """An EAGLE-3 module for this target, with random weights; its numbers of heads are not the target's."""
    shape = describe_target(model)
    hidden = shape["hidden_size"]
    sizes = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "heads": 4, "kv_heads": 2, "head_dim": 12,
        "feature_size": 3 * hidden, "vocabulary": len(kept) if kept else shape["vocab_size"],
    }  # fmt: skip
    return fill_random(Eagle3Block(Eagle3Shape(**(sizes | over))), seed)


def random_eagle3(
    folder: Path,
    model: PreTrainedModel,
    *,
    layers: tuple[int, ...] = (1, 2, 4),
    window: int | None = None,
    kept: list[int] | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    **over: Any,
) -> Path:
    """An EAGLE-3 draft folder for this target, which needs one layer more than the highest of ``layers``.

    Args:
        kept: target ids of a smaller vocabulary, in increasing order.
        settings: further entries of config.json, such as ``rope_factor``.
        over: sizes of the module.
    """
    block, reads = random_eagle3_block(model, kept, seed, **over), {"feature_layers": list(layers), "window": window}
    return _written(folder, "eagle3", model, block, kept, **reads | ROPE | (settings or {}))


def random_mtp(folder: Path, model: PreTrainedModel, seed: int = 0) -> Path:
    """A folder with an MTP layer for this target, of the class of the target's layers."""
    size = model.config.hidden_size
    shapes = {f"layers.0.{name}": tuple(t.shape) for name, t in model.model.layers[0].state_dict().items()}
    shapes |= {f"{name}.weight": (size,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["fc.weight"] = (size, 2 * size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model.config.model_type}))
    save_file({f"mtp.{name}": t for name, t in noise(shapes, seed).items()}, folder / "model.safetensors")
    return folder


def published_eagle3(folder: Path, model: PreTrainedModel, kept: list[int] | None = None, **over: Any) -> Path:
    """A random EAGLE-3 draft in its authors' layout; of a target of 8 layers it reads 1, 3 and 4.

    Args:
        over: entries of config.json; None leaves an entry out.
    """
    block = random_eagle3_block(model, kept)
    tensors = {n: t.clone() for n, t in block.state_dict().items()}
    vocabulary = describe_target(model)["vocab_size"]
    tensors |= vocab_tables(kept, vocabulary)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 48,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048, "vocab_size": vocabulary,
        "draft_vocab_size": block.shape.vocabulary,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({k: x for k, x in (config | over).items() if x is not None}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def published_eagle(folder: Path, model: PreTrainedModel) -> Path:
    """A random EAGLE-1 draft in its authors' layout; its numbers of heads are not the target's."""
    shape = describe_target(model)
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    block = EagleBlock(EagleShape(hidden, 2 * hidden, 4, 2, 24, hidden, vocabulary))
    tensors = {"embed_tokens.weight": torch.zeros(vocabulary, hidden)}
    tensors |= {n.replace("midlayer", "layers.0"): t for n, t in fill_random(block).state_dict().items()}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "hidden_act": "silu", "max_position_embeddings": 2048, "vocab_size": vocabulary,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """Saves a model as transformers does."""
    model.save_pretrained(folder)
    return folder


def small_lm(folder: Path, vocab: int = 11, family: Family = "llama", **over: Any) -> Path:
    """A small random language model with a target's vocabulary, as transformers saves it.

    Args:
        over: arguments of :func:`tests.support.tiny.tiny_model`.
    """
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "seed": 1}
    tiny_model(family, vocab=vocab, **(sizes | over)).save_pretrained(folder)
    return folder


def random_heads(
    folder: Path, model: PreTrainedModel, *, heads: int = 3, kept: list[int] | None = None, seed: int = 0
) -> Path:
    """A draft folder of random chained heads for this target.

    Args:
        kept: target ids of a smaller vocabulary, in increasing order.
    """
    shape = describe_target(model)
    block = fill_random(HeadsBlock(HeadsShape(shape["hidden_size"], heads, model.config.rms_norm_eps)), seed)
    return _written(folder, "tokenswift", model, block, kept, trained_length=64)


def random_lm(folder: Path, model: PreTrainedModel, *, kept: list[int] | None = None, length: int = 64) -> Path:
    """A draft folder of longdraft's format with a random language model for this target."""
    runner = TargetRunner(model)
    sizes = small_llama.small_llama_config(runner, 2, 80, 1e4, length)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(t.shape, generator=generator) * 0.2 + (t.ndim == 1)
        for name, t in small_llama.build_decoder(sizes).state_dict().items()
    }
    tensors |= vocab_tables(kept)
    config = {"model": sizes, "draft_vocab_size": kept and len(kept), "trained_length": length}
    draft_folder.save(folder, DraftFolder("small-lm", config, tensors, runner.shared_parts.description))
    return folder


def edit(
    folder: Path, tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None, **config: Any
) -> Path:
    """Changes a draft folder: its tensors, and entries of config.json; the value "drop" removes an entry."""
    found = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: x for k, x in found.items() if x != "drop"}))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder
