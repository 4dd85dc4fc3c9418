"""Reads folders of EAGLE's kind of any layout into ours: a table of those that others publish, a row for each kind.

Authors publish folders of their own; `is_speculators` has one for all kinds, whose layer's sizes are nested. The rows are
in ``eagle_formats`` and ``dflash_formats``; how a folder's kind is told, in ``draft_folder``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import D2T, VLLM_MASK_TOKENS, DraftFolder, logger
from longdraft.errors import CheckpointError
from longdraft.model.rotary import complete_config, make_rope_parameters

T2D, EMBEDDING, MODEL_TYPE = "t2d", "embed_tokens.weight", "speculators_model_type"
# RoPE's base where a folder states none.
DEFAULT_ROPE_THETA = 10000.0
# Copies of the target's that training left, and frequencies of RoPE, which old transformers saved too.
LEFTOVER_TENSORS = r"verifier_norm\.|verifier_lm_head\.|(.*\.)?inv_freq$"
# How config.json calls the token that stands for one not known yet, in parallel drafting.
MASK_TOKENS = ("mask_token_id", *VLLM_MASK_TOKENS, "noise_token_id")
# Where config.json has ids of layers ("": at the top), their name, and what is taken off for ours, from 0, whose
# output is read: 1 if they mean what enters a layer, an entry of transformers' hidden_states. The first counts.
_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_IDS: tuple[tuple[str, str, int | None], ...] = (
    ("", "feature_layers", 0),  # ours, which settles it in a folder of others too
    # speculators: models/utils.py ([2, L // 2, L - 3]), convert/dflash/converter.py. vLLM: worker/gpu_model_runner.py.
    ("", "aux_hidden_state_layer_ids", 1),
    ("", _IDS, 1),
    # Outputs: SpecForge (algorithms/model_providers.py: [1, L // 2 - 1, L - 4]), Model-Optimizer (hooks of
    # plugins/hf_eagle.py). What enters: vLLM, drafts of TorchSpec, NVIDIA's later ones. sglang tells them by the first
    # id (models/deepseek_v2.py, pull request 25454).
    ("eagle_config", _IDS, None),
    ("", "aux_hidden_states_layer_ids", 0),  # AngelSlim: models/target/target_model_wrapper.py
    # z-lab/dflash: model.py. SpecForge: modeling/draft/dflash.py. Model-Optimizer: plugins/hf_dflash.py.
    ("dflash_config", "target_layer_ids", 0),
    # sglang: dspark_components/dspark_config.py. DeepSpec: modeling/dspark/common.py, modeling/eagle3/common.py.
    ("dspark_config", "target_layer_ids", 0),
    ("", "dspark_target_layer_ids", 0),
    ("", "target_layer_ids", 0),
)
# What no draft of ours has, as a pattern of the tensors' names.
_UNKNOWN = {
    r"\.experts?\.|\.shared_experts?\.": "a mixture of experts",
    r"\.(kv_a|q_a|kv_b)_": "latent attention (MLA)",
    r"_scale(_inv|_2)?$|\.scales$|\.(weight_packed|qweight|absmax)$": "quantised weights (get it in bfloat16)",
}


@dataclass(frozen=True)
class PublishedDraft:
    """A folder that others made.

    Attributes:
        config: its config.json. sizes: those of its layers, as transformers names them, all of them.
        tensors: by names of ours. speculators: it is a folder of `is_speculators`.
    """

    kind: str
    folder: Path | str
    config: dict[str, Any]
    sizes: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    is_speculators: bool

    def nested(self, name: str) -> Mapping[str, Any]:
        """An entry of its config.json that holds settings; empty if there is none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class DraftFormat:
    """A kind's layout.

    Attributes:
        shape: the dataclass of the module's sizes. label: the kind in messages.
        contents: what was read -> what the sizes' entries are beside those of ``sizes``, and what our config.json says
            beside the usual; ``any_vocabulary``: a target of another fits too. It may take tensors away.
        rename: patterns of tensors' names and what stands in their place, one after the other.
        drop: pattern of the names, then, that are no part of the draft.
        theta: RoPE's base where a folder of the authors states none.
    """

    shape: type[Any]
    label: str
    parse: Callable[[PublishedDraft], tuple[dict[str, Any], dict[str, Any]]]
    rename_rules: tuple[tuple[str, str], ...]
    drop_pattern: str = LEFTOVER_TENSORS
    default_theta: float = DEFAULT_ROPE_THETA

    def rename_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path | str) -> dict[str, torch.Tensor]:
        """Tensors by our module's names. Raises CheckpointError if two have one name."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            own = name
            for pattern, other in self.rename_rules:
                own = re.sub(pattern, other, own)
            if re.match(self.drop_pattern, own):
                continue
            if own in found:
                raise CheckpointError(f"{folder} holds {own} twice, once as {name}: is it one draft?")
            found[own] = tensor
        return found


FORMATS: dict[str, DraftFormat] = {}


def read(folder: Path | str, kind: str) -> tuple[DraftFolder, dict[str, Any]]:
    """Contents of a folder of any layout, in ours. The config names the original ``layout`` of others.

    Args:
        kind: the expected kind of draft.

    Returns:
        The contents, and RoPE's parameters as transformers names them.

    Raises:
        CheckpointError: unreadable, another kind of draft, or settings that cannot be right.
    """
    theirs = draft_folder.load(folder, kind)
    found, rope = (_ours if "longdraft_format" in theirs.config else _published)(theirs, folder)
    return found, scale_rope(rope, found.config.get("trained_length"), None, None, folder)


def _ours(found: DraftFolder, folder: Path | str) -> tuple[DraftFolder, dict[str, Any]]:
    config, layers = found.config, found.config.get("feature_layers")
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise CheckpointError(f"config.json of {folder} lacks feature_layers, the target's layers that it reads.")
    length = config.get("rope_original_length") or config.get("trained_length")
    # RoPE that a published draft brought into training, stretched otherwise than ours are.
    rope = config.get("rope_parameters")
    rope = (
        dict(rope)
        if rope
        else make_rope_parameters(config.get("rope_theta") or DEFAULT_ROPE_THETA, config.get("rope_factor"), length)
    )
    found.tensors.pop(T2D, None)
    config["draft_vocab_size"] = config.get("vocabulary") if D2T in found.tensors else None
    return found, rope


def _published(read: DraftFolder, folder: Path | str) -> tuple[DraftFolder, dict[str, Any]]:
    form, config, speculators = FORMATS[read.kind], read.config, MODEL_TYPE in read.config
    layer = config.get("transformer_layer_config") if speculators else config
    if not isinstance(layer, dict):
        raise CheckpointError(f"config.json of {folder} lacks transformer_layer_config: copy the draft again.")
    # `speculators` leaves out the sizes that transformers has as its defaults.
    sizes = draft_folder.with_derived_sizes(complete_config(layer) if speculators else layer)
    if sizes.get("hidden_act") not in (None, "silu"):
        raise CheckpointError(f"{folder} has hidden_act {sizes['hidden_act']}: longdraft's drafts know silu alone.")
    theirs = PublishedDraft(read.kind, folder, config, sizes, form.rename_tensors(read.tensors, folder), speculators)
    for pattern, what in _UNKNOWN.items():
        if wrong := next((name for name in read.tensors if re.search(pattern, name)), None):
            raise CheckpointError(f"{folder} has {what}, {wrong}: longdraft's {form.label} drafts have none.")
    members = theirs.tensors.pop(T2D, None)
    own, more = form.parse(theirs)
    embedding = theirs.tensors.get(EMBEDDING)
    own["embedding"] = None if embedding is None else len(embedding)
    shape = draft_folder.read_shape(form.shape, sizes | own, folder, form.label, draft_folder.HF_NAMES)
    vocabulary = sizes.get("vocab_size") or (None if members is None else len(members))
    target = {"hidden_size": config.get("target_hidden_size") or shape.hidden_size}
    if not more.pop("any_vocabulary", False) and vocabulary:
        target["vocab_size"] = vocabulary
    ours = asdict(shape) | {
        "layout": "speculators" if speculators else "published",
        "trained_length": sizes.get("max_position_embeddings"),
        "draft_vocab_size": shape.vocabulary if D2T in theirs.tensors else None,
        "target_vocabulary": vocabulary,
        "feature_layers": _feature_layers(config, folder),
    }
    ours |= {name: config[name] for name in ("retrieval_layer",) if name in config}
    rope = rope_from_config(sizes, DEFAULT_ROPE_THETA if speculators else form.default_theta)
    return DraftFolder(read.kind, ours | more, theirs.tensors, target), rope


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 reads of a target with ``layers``: hidden_states[2], [L // 2] and [L - 3]."""
    return 1, layers // 2 - 1, layers - 4


def _feature_layers(config: Mapping[str, Any], folder: Path | str) -> list[int] | None:
    """The layers that a config.json of others names, ours; None if it names none. Warns where they cannot be told."""
    places = ((config.get(place) if place else config, name, off) for place, name, off in LAYER_IDS)
    found = ((at[name], name, off) for at, name, off in places if isinstance(at, dict) and at.get(name))
    ids, name, off = next(found, (None, "", 0))
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json of {folder} has no list of layers in {name}: copy it again.")
    ids = sorted(ids) if name == _IDS else ids  # collected layer by layer; Model-Optimizer writes a set
    sure = name != _IDS or ids[0] != 1
    if off is None and (sure := any(config.get(each) is not None for each in VLLM_MASK_TOKENS)):
        off = 1
    elif off is None:
        off = int(ids[0] > 1)
        # Only one reading gives what nearly all drafts read, of a target of an even or odd number of layers.
        depth = 2 * (ids[len(ids) // 2] - off + 1)
        sure = ids[0] < 1 or tuple(i - off for i in ids) in (
            default_feature_layers(depth),
            default_feature_layers(depth + 1),
        )
    layers, other = [i - off for i in ids], [i - 1 + off for i in ids]
    if min(layers) < 0:
        raise CheckpointError(f"{name} of {folder} names the embedding, which longdraft's drafts do not read.")
    if not sure:
        logger.warning(
            f"The draft in {folder} names layers {ids}, read as outputs of {layers}: projects differ. If it accepts "
            f"little, set feature_layers to {other} in its config.json (`longdraft bench acceptance` compares)."
        )
    return layers


def read_mask_token(config: Mapping[str, Any], folder: Path | str) -> int:
    """The token whose embedding stands for one that is not known yet. Raises CheckpointError if none is named."""
    found = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
    if type(found) is not int or found < 0:
        raise CheckpointError(
            f"config.json of {folder} has no {MASK_TOKENS[0]}, the token that stands for those not known yet: add it."
        )
    return found


def check_mask_token(shape: Any, vocabulary: int, folder: Path | str) -> None:
    """Raises CheckpointError if the draft's embedding, or the target's, has no row for the mask token."""
    token, rows = shape.mask_token, shape.embedding or vocabulary
    if token >= rows:
        raise CheckpointError(
            f"{MASK_TOKENS[0]} {token} of {folder} is no row of the embedding, which has {rows}: correct its "
            "config.json."
        )


def rope_from_config(config: Mapping[str, Any], default_theta: float = DEFAULT_ROPE_THETA) -> dict[str, Any]:
    """RoPE's parameters from a configuration of transformers, old or new."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    theta = stated.get("rope_theta") or config.get("rope_theta") or default_theta
    rest = {name: value for name, value in stated.items() if name != "type" and value is not None}
    return rest | {"rope_type": kind, "rope_theta": float(theta)}


def scale_rope(
    rope: dict[str, Any], trained_length: int | None, theta: float | None, factor: float | None, folder: Path | str
) -> dict[str, Any]:
    """RoPE's parameters with the requested changes, and the length that YaRN stretches.

    Args:
        rope: the draft's own parameters.
        trained: the length it was trained for, which is stretched unless ``rope`` names another.
        theta, factor: replace its base and its stretching; None leaves them.
    """
    rope = rope if theta is None else rope | {"rope_theta": float(theta)}
    length = rope.get("original_max_position_embeddings") or trained_length
    if factor is not None:
        rope = make_rope_parameters(rope["rope_theta"], factor, length)
    elif rope["rope_type"] == "yarn":
        rope = rope | {"original_max_position_embeddings": length}
    if rope["rope_type"] == "yarn" and not length:
        raise CheckpointError(
            f"config.json of {folder} stretches the context but does not say which: add the trained length "
            "(rope_original_length)."
        )
    return rope
