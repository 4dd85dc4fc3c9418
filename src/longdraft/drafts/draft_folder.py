"""Draft folders: reads and writes ``config.json`` and ``model.safetensors``, and checks the target they are for."""

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

from longdraft.drafts import hub, packing, tensor_files
from longdraft.drafts.tensor_files import WEIGHTS
from longdraft.errors import CheckpointError
from longdraft.files import atomic_write, check_numbers, read_json
from longdraft.folders import is_gguf

FORMAT = 1
CONFIG = "config.json"
# The table of a draft's own vocabulary: target id - draft id, for each draft id.
D2T = "d2t"
# How configurations of transformers name what ours name otherwise.
HF_NAMES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size"}
# Kinds of `speculators` that are variants of one of ours.
KIND_ALIASES = {"dspark": "dflash"}
# Kind -> pattern of a tensor's name that tells it, where the configuration is that of a whole Llama; the first counts.
KIND_BY_TENSOR = {
    "peagle": r"(.*\.)?mask_hidden",
    "dflash": r"(model\.)?hidden_norm\.weight",
    "eagle3": r".*(\.0|midlayer)\.hidden_norm\..*",
    "heads": r".*\.medusa_layers\..*",
    "longspec": r".*cross_attn.*",
    # A layer of its own before the decoder's, and EAGLE-3's norm is missing.
    "eagle": r"(?!(.*\.)?mtp\.)(.*\.)?fc\.weight",
}
VLLM_MASK_TOKENS = ("ptd_token_id", "pard_token")  # how vLLM alone calls the mask token of P-EAGLE
# Kinds that are published and not read, by what a config.json calls itself.
UNSUPPORTED_KINDS = r"medusa|hydra|domino|dflash2|dflare|mlp_?speculator|lstm_?speculator|redrafter"
# The kind of any language model.
SMALL_LM = "small-lm"
# Names that an error spells out before it only counts.
_SHOWN = 6

logger = logging.getLogger("longdraft")
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class DraftFolder:
    """Contents of a draft folder.

    Attributes:
        kind: the drafter that reads it, e.g. "longspec".
        config: sizes and settings, JSON.
        tensors: name -> tensor, on the CPU.
        target: what the draft was made for, from :func:`longdraft.model.shared_parts.describe`; empty if unknown.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    target: dict[str, Any] = field(default_factory=dict)


def from_training(
    kind: str,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    draft_to_target_ids: torch.Tensor | None,
    target: Mapping[str, Any],
) -> DraftFolder:
    """Contents of the folder of a newly trained draft: weights in bfloat16, with the table of its vocabulary.

    Args:
        kept: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.
        target: the target's description.
    """
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.items()}
    if draft_to_target_ids is not None:
        tensors[D2T] = draft_to_target_ids - torch.arange(len(draft_to_target_ids), device="cpu")
    described = {"draft_vocab_size": None if draft_to_target_ids is None else len(draft_to_target_ids), **config}
    return DraftFolder(kind, described, tensors, dict(target))


def save(folder: Path | str, draft: DraftFolder, bits: int | None = None) -> None:
    """Writes a draft folder, with a card if it has none; each file appears whole or not at all.

    Args:
        bits: 8 or 4 packs matrices (:mod:`longdraft.drafts.packing`); None: as they are.

    Raises:
        CheckpointError: when it cannot be written (no space, no permission).
        ValueError: other bits.
    """
    config = {"longdraft_format": FORMAT, "drafter": draft.kind, "target": draft.target} | draft.config
    write(folder, config, draft.tensors if bits is None else packing.pack(draft.tensors, bits))
    hub.write_card(folder, draft.kind, config)


def write(folder: Path | str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes config.json and model.safetensors, in any layout; each file appears whole or not at all.

    Raises:
        CheckpointError: when they cannot be written (no space, no permission).
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with atomic_write(Path(folder) / CONFIG) as described, atomic_write(Path(folder) / WEIGHTS) as weights:
        described.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors lets the owner alone read what it writes; a draft is as readable as any file of the folder.
        weights.chmod(described.stat().st_mode)


def is_draft_folder(path: Path | str) -> bool:
    """True for a folder with a config.json."""
    return (Path(path) / CONFIG).is_file()


def detect_kind(folder: Path | str) -> str:
    """The kind of a draft folder, or of a language model that drafts as it is; empty if nothing tells.

    Raises:
        CheckpointError: no such folder, no or broken config.json; missing or truncated weights, where needed.
    """
    return SMALL_LM if is_gguf(folder) else _kind(read_config(folder), folder)


def _kind(config: Mapping[str, Any], folder: Path | str) -> str:
    """The kind by config.json; for published folders of others, by the names of their tensors."""
    if "drafter" in config or config.get("speculators_model_type"):
        named = str(config.get("drafter") or config["speculators_model_type"])
        return KIND_ALIASES.get(named, named)
    if "longdraft_format" in config:
        return ""
    said = [config.get(name) for name in ("architectures", "model_type", "dflash_config")]
    if not (said[1] and tensor_files.has_safetensors(folder)):  # a whole model may hold heads as well
        said.append(list(config))
    if (unread := re.search(UNSUPPORTED_KINDS, str(said).lower())) is not None:
        return unread[0]
    if any(config.get(name) for name in ("dflash_config", "dspark_config", "markov_rank")):
        return "dflash"
    if "eagle3" in str(config.get("architectures")).lower():
        parallel = any(config.get(name) is not None for name in VLLM_MASK_TOKENS)
        return "peagle" if parallel else "eagle3"
    names = list(tensor_files.names(folder))
    told = (kind for kind, pattern in KIND_BY_TENSOR.items() if any(re.fullmatch(pattern, name) for name in names))
    return next(told, SMALL_LM if config.get("model_type") or config.get("architectures") else "")


def read_config(folder: Path | str) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        CheckpointError: no such folder, no or broken config.json.
    """
    folder = Path(folder)
    if is_gguf(folder) and folder.is_file():
        raise CheckpointError(
            f"{folder} is a GGUF file: a language model of its own, which drafts with small-lm and the methods that "
            "take such drafts (`longdraft methods`)."
        )
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: a draft is the folder that it lies in, {folder.parent}.")
    if not folder.is_dir():
        raise CheckpointError(f"There is no draft folder {folder}.")
    try:
        return read_json(folder / CONFIG)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}: {_of_a_run(folder) or 'is it a draft folder?'}") from None


def _of_a_run(folder: Path) -> str:
    """Advice if the folder is a training run or one of its checkpoints. Otherwise empty."""
    runs = (run for run in (folder, *folder.absolute().parents[:2]) if (run / "checkpoints").is_dir())
    return next((f"the draft of the training run {run} is in {run / 'best'} or {run / 'last'}." for run in runs), "")


def load(folder: Path | str, kind: str | None = None) -> DraftFolder:
    """Reads a draft folder.

    Args:
        kind: the expected kind of draft.

    Raises:
        CheckpointError: no such folder, no or broken config.json, missing or truncated weights; another kind.
    """
    config = read_config(folder)
    found = _kind(config, folder)
    if kind not in (None, found):
        raise CheckpointError(f"{folder} holds a draft for {found or 'another method'}, not for {kind}.")
    tensors = read_tensors(config, folder)
    config.pop("drafter", None)
    return DraftFolder(found, config, tensors, dict(config.pop("target", None) or {}))


def read_tensors(config: Mapping[str, Any], folder: Path | str) -> dict[str, torch.Tensor]:
    """A folder's tensors by name, on the CPU; packed matrices of our layout as float32.

    Raises:
        CheckpointError: missing, truncated or damaged; a number of the configuration is outside of its range.
    """
    tensors = tensor_files.read(folder)
    check_numbers(config, Path(folder) / CONFIG)
    return packing.unpack(tensors, folder) if "longdraft_format" in config else tensors


def read_shape(
    shape_type: type[Shape],
    config: Mapping[str, Any],
    folder: Path | str,
    label: str,
    names: Mapping[str, str] | None = None,
) -> Shape:
    """A module's sizes, a dataclass of positive numbers and flags, from a config.json.

    Args:
        label: the kind of draft in messages: "LongSpec".
        names: our name -> the name in config.json, where they differ.

    Raises:
        CheckpointError: names missing entries, or entries with impossible values.
    """
    given = {f: (names or {}).get(f.name, f.name) for f in fields(shape_type)}  # type: ignore[arg-type]
    known = {f: config[name] for f, name in given.items() if config.get(name) is not None}
    if missing := [name for f, name in given.items() if f not in known and f.default is MISSING]:
        raise CheckpointError(f"{CONFIG} of {folder} lacks {', '.join(missing)}: is it a draft of the kind {label}?")
    flags = {f: bool(x) for f, x in known.items() if f.type in ("bool", bool)}
    wrong = [
        given[f]
        for f, x in known.items()
        if f not in flags and (not isinstance(x, int | float) or x <= 0 or (f.type in ("int", int) and x % 1))
    ]
    if wrong:
        raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for {', '.join(wrong)}.")
    return shape_type(**{f.name: x for f, x in {**known, **flags}.items()})


def optional_int(config: Mapping[str, Any], name: str, folder: Path | str, minimum: int = 1) -> int | None:
    """A whole number that may be left out of a config.json. Raises CheckpointError for anything else."""
    found = config.get(name)
    if found is not None and (type(found) is not int or found < minimum):
        raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for {name}.")
    return found


def with_derived_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published configuration, completed with the sizes that transformers derives."""
    found, heads = dict(config), config.get("num_attention_heads")
    if heads and not found.get("num_key_value_heads"):
        found["num_key_value_heads"] = heads
    if heads and not found.get("head_dim") and found.get("hidden_size"):
        found["head_dim"] = found["hidden_size"] // heads
    return found


def check_tensors(
    tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, torch.Size], folder: Path | str, kind: str
) -> None:
    """Checks a draft's tensors against its sizes.

    Args:
        kind: the kind of draft in the message: "LongSpec".

    Raises:
        CheckpointError: naming what is missing, unexpected or of a wrong shape.
    """
    wrong = [
        f"{name} {tuple(tensors[name].shape)} where config.json asks for {tuple(size)}"
        for name, size in sizes.items()
        if name in tensors and tensors[name].shape != size
    ]
    kinds = {
        "missing": [name for name in sizes if name not in tensors],
        "unexpected": [name for name in tensors if name not in sizes],
        "of a wrong shape": wrong,
    }
    found = [f"{problem}: {_named(names)}" for problem, names in kinds.items() if names]
    if found:
        raise CheckpointError(f"{folder} is no {kind} draft as its config.json describes it. " + "; ".join(found) + ".")


def _named(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_target(required_target: Mapping[str, Any], target: Mapping[str, Any], folder: Path | str) -> None:
    """Refuses a draft that was made for another target.

    A target of the same shape and vocabulary with other weights (another fine-tune, another quantisation) is
    allowed: output stays exact whatever a draft proposes. A warning says that acceptance may suffer.

    Raises:
        CheckpointError: saying what differs.
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
