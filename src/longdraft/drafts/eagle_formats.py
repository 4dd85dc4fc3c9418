"""Reads the layouts of EAGLE drafts into one: ours, the published ones, and that of `speculators`.

Names of a published EAGLE-3 draft are those of our module; `speculators`, EAGLE-1 and EAGLE-2 call the layer
``layers.0.`` instead of ``midlayer.``. All may carry the target's embedding, which is dropped. EAGLE-3's count hidden
states as transformers does: ``hidden_states[i]`` is what enters decoder layer i, so the output of layer i - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import OFFSETS, DraftFolder
from longdraft.errors import CheckpointError
from longdraft.model.rotary import yarn

KIND = "eagle3"
EAGLE = "eagle"  # of EAGLE-1 and EAGLE-2
MEMBERS = "t2d"
THETA = 10000.0
# Flags of `speculators` whose norms the module does not have.
_FOREIGN_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# Where a tensor's own name begins; what stands before is the name of the model around it.
_BEGINNINGS = {"fc", "midlayer", "layers", "norm", "lm_head", "embed_tokens", OFFSETS, MEMBERS}


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of the module. Head counts and sizes are its own: its keys live in its own cache.

    Attributes:
        feature_size: size of one token's hidden states side by side, usually three times the target's hidden size.
        vocabulary: rows of the draft's head.
        norm_before_residual: the residual stream starts from the normed g instead of g (a flag of `speculators`).
        attention_bias: whether q, k and v have biases.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int
    vocabulary: int
    rms_norm_eps: float = 1e-6
    norm_before_residual: bool = False
    attention_bias: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EagleShape(Eagle3Shape):
    """Sizes of the module.

    Attributes:
        feature_size, vocabulary: the target's hidden size and vocabulary.
        fc_bias: whether fc has a bias.
    """

    fc_bias: bool = False


def usual_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 reads of a target with ``layers``: hidden_states[2], [L // 2] and [L - 3]."""
    return 1, layers // 2 - 1, layers - 4


def read(
    folder: Path | str,
    rope_theta: float | None = None,
    head_dim: int | None = None,
    rope_factor: float | None = None,
    kind: str = KIND,
) -> tuple[DraftFolder, dict[str, Any]]:
    """Contents of a folder of any layout, in ours. The config names the original ``layout`` of others.

    Args:
        rope_theta, head_dim, rope_factor: replace the values of config.json (or missing ones).
        kind: the expected kind of draft. Only EAGLE's kinds come in other layouts.

    Returns:
        The contents, and RoPE's parameters as transformers names them.

    Raises:
        CheckpointError: unreadable, another kind of draft, or settings that cannot be right.
    """
    config = draft_folder.read_config(folder)
    held = draft_folder.kind(folder)
    if held != kind:
        raise CheckpointError(f"{folder} holds a draft for {held or 'another method'}, not for {kind}.")
    if kind not in (KIND, EAGLE) and "longdraft_format" not in config:
        raise CheckpointError(f"{folder} was not written by longdraft: drafts for {kind} come in its own layout alone.")
    given = {"head_dim": head_dim} if head_dim else {}
    try:
        tensors = draft_folder.read_tensors(config, folder)
        if "longdraft_format" in config:
            found, rope = _ours(config | given, tensors, folder, kind)
        else:
            found, rope = _foreign(config, given, _named_as_ours(tensors, folder), folder, kind)
        return found, stretched(rope, found.config.get("trained_length"), rope_theta, rope_factor, folder)
    except (TypeError, ValueError, AttributeError, IndexError) as error:  # words where numbers belong, and the like
        raise CheckpointError(
            f"config.json of {folder} has a value that cannot be right ({error}): correct it, or copy the draft again."
        ) from error


def _ours(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path | str, kind: str
) -> tuple[DraftFolder, dict[str, Any]]:
    layers = config.get("feature_layers")
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise CheckpointError(f"config.json of {folder} lacks feature_layers, the target's layers that it reads.")
    length = config.get("rope_original_length") or config.get("trained_length")
    # RoPE that a published draft brought into training, stretched otherwise than ours are.
    rope = config.get("rope_parameters")
    rope = dict(rope) if rope else yarn(config.get("rope_theta") or THETA, config.get("rope_factor"), length)
    tensors.pop(MEMBERS, None)
    own = {name: x for name, x in config.items() if name not in ("drafter", "target")}
    own["draft_vocab_size"] = config.get("vocabulary") if OFFSETS in tensors else None
    return DraftFolder(kind, own, tensors, dict(config.get("target") or {})), rope


def _foreign(
    config: dict[str, Any], given: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path | str, kind: str
) -> tuple[DraftFolder, dict[str, Any]]:
    speculators = "speculators_model_type" in config
    if speculators and kind == EAGLE:
        raise CheckpointError(
            f"{folder} holds an EAGLE-1 draft as `speculators` writes it: get the folder that it was converted from."
        )
    sizes: dict[str, Any] = dict(config.get("transformer_layer_config") or {}) if speculators else dict(config)
    sizes |= given
    if flags := [name for name in _FOREIGN_NORMS if config.get(name) or _nested(config).get(name)]:
        raise CheckpointError(
            f"{folder} sets {', '.join(flags)}: longdraft's EAGLE-3 has no such norm. Use a draft whose config.json "
            "has them false, as drafts of EAGLE's own code do."
        )
    if sizes.get("hidden_act") not in (None, "silu"):
        raise CheckpointError(f"{folder} has hidden_act {sizes['hidden_act']}: longdraft's EAGLE knows silu alone.")
    sizes = draft_folder.filled_in(sizes)
    members = tensors.pop(MEMBERS, None)
    sizes["attention_bias"] = "midlayer.self_attn.q_proj.bias" in tensors
    shape = (_eagle_shape if kind == EAGLE else _eagle3_shape)(config, sizes, tensors, folder)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or _nested(config).get("eagle_aux_hidden_state_layer_ids")
    vocabulary = sizes.get("vocab_size") or (None if members is None else len(members))
    target = {"hidden_size": shape.hidden_size} | ({"vocab_size": vocabulary} if vocabulary else {})
    ours = shape.as_dict() | {
        "layout": "speculators" if speculators else "published",
        "feature_layers": [int(i) - 1 for i in ids] if ids else None,
        "trained_length": sizes.get("max_position_embeddings"),
        "window": sizes.get("sliding_window") if "sliding_attention" in (sizes.get("layer_types") or ()) else None,
        "draft_vocab_size": shape.vocabulary if OFFSETS in tensors and kind == KIND else None,
    }
    return DraftFolder(kind, ours, tensors, target), _foreign_rope(sizes)


def _eagle3_shape(
    config: Mapping[str, Any], sizes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], folder: Path | str
) -> Eagle3Shape:
    fc = tensors.get("fc.weight")
    known = {
        **sizes,
        "feature_size": 3 * sizes.get("hidden_size", 0) if fc is None else fc.shape[1],
        "vocabulary": config.get("draft_vocab_size") or sizes.get("vocab_size"),
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }
    return draft_folder.shape_of(Eagle3Shape, known, folder, "EAGLE-3", draft_folder.PUBLISHED)


def _eagle_shape(
    config: Mapping[str, Any], sizes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], folder: Path | str
) -> EagleShape:
    """Sizes of EAGLE-1 and -2: one layer is read, and the head is the target's."""
    known = {**sizes, "norm_before_residual": False, "fc_bias": "fc.bias" in tensors}
    names = draft_folder.PUBLISHED | {"feature_size": "hidden_size", "vocabulary": "vocab_size"}
    return draft_folder.shape_of(EagleShape, known, folder, "EAGLE", names)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry ``eagle_config``, in which some published configurations nest EAGLE's settings."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _foreign_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters from a configuration of transformers, old or new."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    theta = stated.get("rope_theta") or config.get("rope_theta") or THETA
    rest = {name: value for name, value in stated.items() if name != "type" and value is not None}
    return rest | {"rope_type": kind, "rope_theta": float(theta)}


def stretched(
    rope: dict[str, Any], trained: int | None, theta: float | None, factor: float | None, folder: Path | str
) -> dict[str, Any]:
    """RoPE's parameters with the requested changes, and the length that YaRN stretches.

    Args:
        rope: the draft's own parameters.
        trained: the length it was trained for, which is stretched unless ``rope`` names another.
        theta, factor: replace its base and its stretching; None leaves them.
    """
    rope = rope if theta is None else rope | {"rope_theta": float(theta)}
    length = rope.get("original_max_position_embeddings") or trained
    if factor is not None:
        rope = yarn(rope["rope_theta"], factor, length)
    elif rope["rope_type"] == "yarn":
        rope = rope | {"original_max_position_embeddings": length}
    if rope["rope_type"] == "yarn" and not length:
        raise CheckpointError(
            f"config.json of {folder} stretches the context but does not say which: add the trained length "
            "(rope_original_length)."
        )
    return rope


def _named_as_ours(tensors: Mapping[str, torch.Tensor], folder: Path | str) -> dict[str, torch.Tensor]:
    """Tensors by our module's names: without prefixes of a surrounding model, embedding and RoPE frequencies."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        start = next((i for i, part in enumerate(parts) if part in _BEGINNINGS), 0)
        own = ".".join(parts[start:])
        if own.startswith("layers.0."):
            own = "midlayer." + own.removeprefix("layers.0.")
        if own in found:
            raise CheckpointError(f"{folder} holds {own} twice, once as {name}: is it one draft?")
        # Old transformers saved the frequencies of RoPE too.
        if parts[start] != "embed_tokens" and parts[-1] != "inv_freq":
            found[own] = tensor
    return found
