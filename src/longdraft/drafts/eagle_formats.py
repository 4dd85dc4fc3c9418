"""Reads the layouts of EAGLE drafts into one: ours, the published ones, and that of `speculators`.

Names of a published EAGLE-3 draft are those of our module; `speculators`, EAGLE-1 and EAGLE-2 call the layer
``layers.0.`` instead of ``midlayer.``. All may carry the target's embedding, which is dropped unless the draft was
trained with one of its own. EAGLE-3's count hidden states as transformers does: ``hidden_states[i]`` is what enters
decoder layer i, so the output of layer i - 1.
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
from longdraft.model.layer_config import completed
from longdraft.model.rotary import yarn

KIND = "eagle3"
EAGLE = "eagle"  # of EAGLE-1 and EAGLE-2
PEAGLE = "peagle"
MEMBERS = "t2d"
THETA = 10000.0
MODEL_TYPE = "speculators_model_type"
EMBEDDING = "embed_tokens.weight"
# Flags of EAGLE-3.1, at the top of config.json or in eagle_config.
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# Where a tensor's own name begins; what stands before is the name of the model around it.
_BEGINNINGS = {
    "fc", "midlayer", "layers", "norm", "lm_head", "embed_tokens", "input_norm", "fc_norm", "mask_hidden", OFFSETS,
    MEMBERS,
}  # fmt: skip
# How `speculators` called parts of EAGLE-1 in its first versions.
_OLD_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
# Copies of the target's that training left.
LEFT = ("verifier_norm.", "verifier_lm_head.")
# How config.json calls the token that stands for one not known yet, in parallel drafting.
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of the module. Head counts and sizes are its own: its keys live in its own cache.

    Attributes:
        feature_size: size of one token's hidden states side by side, usually three times the target's hidden size.
        vocabulary: rows of the draft's head.
        norm_before_residual: the residual stream starts from the normed g instead of g (a flag of `speculators`).
        attention_bias, output_bias: whether q, k and v have biases, and o.
        qk_norm: each head of q and k is normed before RoPE, as in Qwen3's layers.
        norm_before_fc: one norm before fc, over all hidden states side by side.
        fc_norm: number of norms before fc, one for each hidden state; None: no such norms.
        norm_output: the normed output is the next step's g, instead of the output itself (EAGLE-3.1).
        embedding: rows of its own embedding; None: it uses the target's.
        decoder_layers: layers; those behind the first are usual ones.
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
    output_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: int | None = None
    norm_output: bool = False
    embedding: int | None = None
    decoder_layers: int = 1

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
    draft_folder.check_kind(draft_folder.kind(folder), kind, folder)
    if kind not in (KIND, EAGLE, PEAGLE) and "longdraft_format" not in config:
        raise CheckpointError(f"{folder} was not written by longdraft: drafts for {kind} come in its own layout alone.")
    given = {"head_dim": head_dim} if head_dim else {}
    tensors = draft_folder.read_tensors(config, folder)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(LEFT)}
    if "longdraft_format" in config:
        found, rope = _ours(config | given, tensors, folder, kind)
    else:
        found, rope = _foreign(config, given, _named_as_ours(tensors, folder), folder, kind)
    return found, stretched(rope, found.config.get("trained_length"), rope_theta, rope_factor, folder)


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
    speculators = MODEL_TYPE in config
    sizes = whole_layer(config, folder) if speculators else dict(config)
    sizes = draft_folder.filled_in(sizes | given)
    if config.get("layernorms"):
        raise CheckpointError(f"{folder} sets layernorms: longdraft's EAGLE has no such norms. Use a draft without.")
    if sizes.get("hidden_act") not in (None, "silu"):
        raise CheckpointError(f"{folder} has hidden_act {sizes['hidden_act']}: longdraft's EAGLE knows silu alone.")
    members = tensors.pop(MEMBERS, None)
    if not _has_own_embedding(config, sizes, kind):
        tensors.pop(EMBEDDING, None)
    for flag, part in (("attention_bias", "q_proj.bias"), ("output_bias", "o_proj.bias"), ("qk_norm", "q_norm.weight")):
        sizes[flag] = f"midlayer.self_attn.{part}" in tensors
    shape = (_eagle_shape if kind == EAGLE else _eagle3_shape)(config, sizes, tensors, folder)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or _nested(config).get("eagle_aux_hidden_state_layer_ids")
    vocabulary = sizes.get("vocab_size") or (None if members is None else len(members))
    target = {"hidden_size": config.get("target_hidden_size") or shape.hidden_size}
    target |= {"vocab_size": vocabulary} if vocabulary else {}
    ours = shape.as_dict() | {
        "layout": "speculators" if speculators else "published",
        "feature_layers": [int(i) - 1 for i in ids] if ids else None,
        "trained_length": sizes.get("max_position_embeddings"),
        "window": sizes.get("sliding_window") if "sliding_attention" in (sizes.get("layer_types") or ()) else None,
        "draft_vocab_size": shape.vocabulary if OFFSETS in tensors and kind != EAGLE else None,
    }
    if kind == PEAGLE:
        ours |= {"slots": proposed(config), "mask_token": mask_token(config, folder)}
    return DraftFolder(kind, ours, tensors, target), foreign_rope(sizes)


def whole_layer(config: Mapping[str, Any], folder: Path | str) -> dict[str, Any]:
    """A layer's sizes in a folder of `speculators`, which leaves out those that transformers has as its defaults.

    Raises:
        CheckpointError: the folder describes no layer.
    """
    stated = config.get("transformer_layer_config")
    if not isinstance(stated, dict):
        raise CheckpointError(f"config.json of {folder} lacks transformer_layer_config: copy the draft again.")
    return completed(stated)


def proposed(config: Mapping[str, Any], usual: int = 8) -> int:
    """Tokens that one forward of a parallel draft proposes, as its folder says."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or config.get("num_speculative_tokens") or usual)


def mask_token(config: Mapping[str, Any], folder: Path | str) -> int:
    """The token whose embedding stands for one that is not known yet.

    Raises:
        CheckpointError: the folder names none.
    """
    found = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
    if type(found) is not int or found < 0:
        raise CheckpointError(
            f"config.json of {folder} has no {MASK_TOKENS[0]}, the token that stands for those not known yet: add it."
        )
    return found


def check_mask(token: int, rows: int, folder: Path | str) -> None:
    """Raises CheckpointError if an embedding of so many rows has none for the mask token."""
    if token >= rows:
        raise CheckpointError(
            f"{MASK_TOKENS[0]} {token} of {folder} is no row of the embedding, which has {rows}: correct its "
            "config.json."
        )


def _has_own_embedding(config: Mapping[str, Any], sizes: Mapping[str, Any], kind: str) -> bool:
    """True if the draft was trained with an embedding of its own, instead of the target's."""
    other = config.get("target_hidden_size") not in (None, sizes.get("hidden_size"))
    return kind == PEAGLE or other or bool(config.get("embed_requires_grad"))


def _eagle3_shape(
    config: Mapping[str, Any], sizes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], folder: Path | str
) -> Eagle3Shape:
    fc, embedding = tensors.get("fc.weight"), tensors.get(EMBEDDING)
    norms = {name: _nested(config).get(name, config.get(name)) for name in _NORMS}
    norms["fc_norm"] = sum(name.startswith("fc_norm.") for name in tensors) if norms["fc_norm"] else None
    known = {
        **sizes,
        **norms,
        "feature_size": 3 * sizes.get("hidden_size", 0) if fc is None else fc.shape[1],
        "vocabulary": config.get("draft_vocab_size") or sizes.get("vocab_size"),
        # As vLLM reads folders of `speculators` that do not say.
        "norm_before_residual": bool(config.get("norm_before_residual", config.get(MODEL_TYPE) == KIND)),
        "embedding": None if embedding is None else len(embedding),
        "decoder_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) + 1,
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


def foreign_rope(config: Mapping[str, Any], usual: float = THETA) -> dict[str, Any]:
    """RoPE's parameters from a configuration of transformers, old or new."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    theta = stated.get("rope_theta") or config.get("rope_theta") or usual
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
        for old, new in _OLD_NAMES.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        parts = name.split(".")
        start = next((i for i, part in enumerate(parts) if part in _BEGINNINGS), 0)
        own = ".".join(parts[start:])
        if own.startswith("layers.0."):
            own = "midlayer." + own.removeprefix("layers.0.")
        if own in found:
            raise CheckpointError(f"{folder} holds {own} twice, once as {name}: is it one draft?")
        # Old transformers saved the frequencies of RoPE too.
        if parts[-1] != "inv_freq":
            found[own] = tensor
    return found
