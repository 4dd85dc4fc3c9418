"""Draft folders: reads and writes ``config.json`` and ``model.safetensors``, and checks a draft against a target."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from longdraft.drafts import gguf_drafts, hub, packing, tensor_files
from longdraft.drafts.tensor_files import WEIGHTS
from longdraft.errors import CheckpointError
from longdraft.files import atomic_write, check_numbers, read_json
from longdraft.folders import is_gguf
from longdraft.options import Option

FORMAT = 1  # version of our layout
CONFIG = "config.json"
# Name of the tensor for a draft vocabulary that is smaller than the target's: target id - draft id, for each draft id.
D2T = "d2t"
# Our name of a size -> the name in configurations of transformers, where they differ.
HF_NAMES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size"}
# Kinds of `speculators` that are variants of one of our kinds, and an earlier name of ours.
KIND_ALIASES = {"dflash2": "dflash", "dspark": "dflash", "heads": "tokenswift"}
# Kind -> pattern of a tensor name that only this kind has. Used if config.json looks like that of a plain Llama. If
# several patterns match, the first one counts.
KIND_BY_TENSOR = {
    "peagle": r"(.*\.)?mask_hidden",
    "dflash": r"(model\.)?hidden_norm\.weight",
    "eagle3": r".*(\.0|midlayer)\.hidden_norm\..*",
    "tokenswift": r".*\.medusa_layers\..*",
    "longspec": r".*cross_attn.*",
    # EAGLE-1 and 2 also have fc before the decoder layer, but no hidden_norm.
    "eagle": r"(?!(.*\.)?mtp\.)(.*\.)?fc\.weight",
}
VLLM_MASK_TOKENS = ("ptd_token_id", "pard_token")  # vLLM's names of P-EAGLE's mask token
# Pattern of words in config.json that name published kinds which longdraft does not read.
UNSUPPORTED_KINDS = r"medusa|hydra|domino|dflare|mlp_?speculator|lstm_?speculator|redrafter"
# Kind of a plain language model.
SMALL_LM = "small-lm"
# Most tensor names that an error lists.
_MAX_LISTED = 6

logger = logging.getLogger("longdraft")
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class DraftFolder:
    """Contents of a draft folder."""

    kind: str  # the kind of draft, e.g. "longspec".
    config: dict[str, Any]  # sizes and settings, JSON
    tensors: dict[str, torch.Tensor]  # name -> tensor, on the CPU
    target: dict[str, Any] = field(default_factory=dict)  # the target's description; empty if unknown


def from_training(
    kind: str, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], draft_to_target_ids: torch.Tensor | None,
    target: Mapping[str, Any],
) -> DraftFolder:  # fmt: skip
    """Returns the folder contents of a newly trained draft, with weights in bfloat16.
    ``draft_to_target_ids``: (draft vocabulary,) target id of each draft id; None: the target's full vocabulary."""
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.items()}
    if draft_to_target_ids is not None:
        tensors[D2T] = draft_to_target_ids - torch.arange(len(draft_to_target_ids), device="cpu")
    vocab_size = None if draft_to_target_ids is None else len(draft_to_target_ids)
    return DraftFolder(kind, {"draft_vocab_size": vocab_size, **config}, tensors, dict(target))


def save(folder: Path | str, draft: DraftFolder, bits: int | None = None) -> None:
    """Writes a draft folder, and a card if it has none. Each file appears complete or not at all.

    Args:
        bits: 8 or 4 packs matrices (:mod:`longdraft.drafts.packing`); None keeps the matrices' dtype.

    Raises:
        CheckpointError: the folder cannot be written (no space, no permission).
        ValueError: other bits.
    """
    config = {"longdraft_format": FORMAT, "drafter": draft.kind, "target": draft.target} | draft.config
    write(folder, config, draft.tensors if bits is None else packing.pack(draft.tensors, bits))
    hub.write_card(folder, draft.kind, config)


def write(folder: Path | str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes config.json and model.safetensors of any layout, each atomically. Raises the errors of :func:`save`."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with atomic_write(Path(folder) / CONFIG) as config_file, atomic_write(Path(folder) / WEIGHTS) as weights:
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors makes its files readable for the owner alone; the weights get the mode of config.json.
        weights.chmod(config_file.stat().st_mode)


def is_draft_folder(path: Path | str) -> bool:
    """True if ``path`` is a folder with a config.json, or a draft in a GGUF file."""
    return (Path(path) / CONFIG).is_file() or (is_gguf(path) and gguf_drafts.is_draft(Path(path)))


def detect_kind(folder: Path | str) -> str:
    """Returns the kind of a draft folder or GGUF file, "small-lm" for a language model, or "" if the kind is unknown.
    Raises CheckpointError if the folder, its config.json or its weights cannot be read."""
    if is_gguf(folder) and not gguf_drafts.is_draft(Path(folder)):
        return SMALL_LM
    return _kind(read_config(folder), folder)


def _kind(config: Mapping[str, Any], folder: Path | str) -> str:
    """Returns the kind from config.json. In other projects' folders, several entries and the tensors' names show it."""
    if "drafter" in config or config.get("speculators_model_type"):
        name = str(config.get("drafter") or config["speculators_model_type"])
        return KIND_ALIASES.get(name, name)
    if "longdraft_format" in config:
        return ""
    if is_assistant(config):
        return "mtp"
    hints = [config.get(name) for name in ("architectures", "model_type", "dflash_config")]
    # The keys of a full model's config.json may mention drafts.
    if not (config.get("model_type") and tensor_files.has_safetensors(folder)):
        hints.append(list(config))
    if (unsupported := re.search(UNSUPPORTED_KINDS, str(hints).lower())) is not None:
        return unsupported[0]
    if any(config.get(name) for name in ("dflash_config", "dspark_config", "markov_rank")):
        return "dflash"
    if "eagle3" in str(config.get("architectures")).lower():
        is_parallel = any(config.get(name) is not None for name in VLLM_MASK_TOKENS)
        return "peagle" if is_parallel else "eagle3"
    names = list(tensor_files.names(folder))
    kinds = (kind for kind, pattern in KIND_BY_TENSOR.items() if any(re.fullmatch(pattern, name) for name in names))
    return next(kinds, SMALL_LM if config.get("model_type") or config.get("architectures") else "")


def is_assistant(config: Mapping[str, Any]) -> bool:
    """True for the configuration of an assistant of Gemma 4."""
    return re.fullmatch(r"gemma4(_unified)?_assistant", str(config.get("model_type"))) is not None


def read_config(folder: Path | str) -> dict[str, Any]:
    """Reads a folder's config.json, or the settings of a draft in a GGUF file.
    Raises CheckpointError if there is no such folder or no valid config.json."""
    folder = Path(folder)
    if is_gguf(folder) and gguf_drafts.is_draft(folder):
        return gguf_drafts.read_config(folder)
    if is_gguf(folder) and folder.is_file():
        raise CheckpointError(
            f"{folder} is a GGUF file, a language model: use it with small-lm, or another method that drafts with a "
            "language model (`longdraft methods`)."
        )
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: name the folder that holds it, {folder.parent}.")
    if not folder.is_dir():
        raise CheckpointError(f"There is no draft folder {folder}.")
    try:
        return read_json(folder / CONFIG)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}: {_run_advice(folder) or 'is it a draft folder?'}") from None


def _run_advice(folder: Path) -> str:
    """Returns advice if the folder is a training run or one of its checkpoints, otherwise ""."""
    runs = (run for run in (folder, *folder.absolute().parents[:2]) if (run / "checkpoints").is_dir())
    return next((f"the draft of the training run {run} is in {run / 'best'} or {run / 'last'}." for run in runs), "")


def load(folder: Path | str, kind: str | None = None) -> DraftFolder:
    """Reads a draft folder or GGUF file, with tensors on the CPU; packed matrices of our layout become float32.
    ``kind``: the expected kind; None: any.

    Raises CheckpointError if the folder cannot be read, lacks weights, has damaged weights or a number outside its
    range, or holds another kind of draft.
    """
    config = read_config(folder)
    actual_kind = _kind(config, folder)
    if kind not in (None, actual_kind):
        raise CheckpointError(f"{folder} holds a draft for {actual_kind or 'another method'}, not for {kind}.")
    tensors = gguf_drafts.read_tensors(Path(folder)) if is_gguf(folder) else tensor_files.read(folder)
    check_numbers(config, Path(folder) / CONFIG)
    if "longdraft_format" in config:
        tensors = packing.unpack(tensors, folder)
    config.pop("drafter", None)
    return DraftFolder(actual_kind, config, tensors, dict(config.pop("target", None) or {}))


def read_shape(
    shape: type[Shape], config: Mapping[str, Any], folder: Path | str, label: str,
    names: Mapping[str, str] | None = None,
) -> Shape:  # fmt: skip
    """Reads a module's sizes from a config.json.

    Raises CheckpointError, which names the entries, if entries are missing or impossible.

    Args:
        shape: dataclass of the sizes, whose fields are positive numbers and flags.
        label: the kind of draft in messages, e.g. "LongSpec".
        names: name of a field -> name of the entry in config.json, where the two differ.
    """
    settings = f"{_settings(folder)} of {folder}"
    keys = {size: (names or {}).get(size.name, size.name) for size in fields(shape)}  # type: ignore[arg-type]
    values = {size: config[key] for size, key in keys.items() if config.get(key) is not None}
    if missing := [key for size, key in keys.items() if size not in values and size.default is MISSING]:
        raise CheckpointError(f"{settings} lacks {', '.join(missing)}: is it a draft of the kind {label}?")
    flags = {size: bool(value) for size, value in values.items() if size.type in ("bool", bool)}
    limits = {size: Option(size.name, int if size.type in ("int", int) else float, above=0) for size in values}
    invalid = [keys[size] for size, value in values.items() if size not in flags and not limits[size].allows(value)]
    if invalid:
        raise CheckpointError(f"{settings} has an impossible value for {', '.join(invalid)}: correct it.")
    return shape(**{size.name: value for size, value in {**values, **flags}.items()})


def optional_int(config: Mapping[str, Any], name: str, folder: Path | str, minimum: int = 1) -> int | None:
    """Reads an optional whole number of a config.json. Raises CheckpointError for any other value."""
    value = config.get(name)
    if value is not None and not Option(name, int, least=minimum).allows(value):
        raise CheckpointError(f"{CONFIG} of {folder} has an impossible value for {name}: correct it.")
    return value


def with_derived_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a published configuration together with the sizes that transformers derives from other sizes."""
    complete, heads = dict(config), config.get("num_attention_heads")
    if heads and not complete.get("num_key_value_heads"):
        complete["num_key_value_heads"] = heads
    if heads and not complete.get("head_dim") and complete.get("hidden_size"):
        complete["head_dim"] = complete["hidden_size"] // heads
    return complete


def _settings(folder: Path | str) -> str:
    """Returns how messages call a draft's settings."""
    return "metadata" if is_gguf(folder) else CONFIG


def check_tensors(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], folder: Path | str, kind: str
) -> None:
    """Raises CheckpointError, which names the tensors, if tensors are missing, unexpected or misshapen.

    Args:
        shapes: name of a tensor -> its shape according to config.json.
        kind: the kind of draft in the message, e.g. "LongSpec".
    """
    settings = _settings(folder)
    misshapen = [
        f"{name} {tuple(tensors[name].shape)} where {settings} asks for {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in tensors if name not in shapes],
        "of a wrong shape": misshapen,
    }
    if clauses := [f"{problem}: {_list_names(names)}" for problem, names in problems.items() if names]:
        raise CheckpointError(f"{folder} is no {kind} draft as its {settings} describes it. {'; '.join(clauses)}.")


def _list_names(names: list[str]) -> str:
    unlisted = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {unlisted} more" if unlisted > 0 else "")


def check_target(required_target: Mapping[str, Any], target: Mapping[str, Any], folder: Path | str) -> None:
    """Raises CheckpointError if a draft was made for another target; the message says in what the targets differ.

    A target that differs in its weights alone (another fine-tune, another quantisation) gets a warning: output stays
    exact, but acceptance may be lower.
    """
    differing = [
        f"{key} {required_target[key]} (this target: {target.get(key)})"
        for key in required_target
        if key != "weights" and required_target[key] != target.get(key)
    ]
    if differing:
        raise CheckpointError(
            f"The draft in {folder} was made for another target: {', '.join(differing)}. "
            "Load the target it was trained with, or train one for this target: longdraft train."
        )
    if "weights" in required_target and required_target["weights"] != target.get("weights"):
        logger.warning(
            "The draft in %s was trained with other weights of this architecture: output stays exact, acceptance may "
            "be lower.",
            folder,
        )
