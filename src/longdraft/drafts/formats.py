"""Converts draft folders of other projects to our layout, with a table of published formats by kind.

The authors of each paper publish folders in a layout of their own. `speculators` has one layout for all kinds, with the
layer's sizes in a section. ``eagle_formats`` and ``dflash_formats`` fill the table. ``draft_folder`` detects the kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import D2T, VLLM_MASK_TOKENS, DraftFolder, logger
from longdraft.errors import CheckpointError
from longdraft.model.rope import make_rope_parameters

T2D, EMBEDDING, HEAD, MODEL_TYPE = "t2d", "embed_tokens.weight", "lm_head.weight", "speculators_model_type"
# RoPE base of folders that state none.
DEFAULT_ROPE_THETA = 10000.0
# Copies of the target's tensors that training saved, and RoPE frequencies, which old versions of transformers saved.
LEFTOVER_TENSORS = r"verifier_norm\.|verifier_lm_head\.|(.*\.)?inv_freq$"
# Names in config.json of the mask token, which stands for unknown tokens in parallel drafting.
MASK_TOKENS = ("mask_token_id", *VLLM_MASK_TOKENS, "noise_token_id")
_IDS = "eagle_aux_hidden_state_layer_ids"
# Entries of config.json that list the target's layers; the first entry present counts. An entry has a section of
# config.json ("": top level), a name, and an id offset: 0 if id i means the output of layer i, 1 if it means the input
# of layer i (which is the output of layer i - 1, and hidden_states[i] in transformers), None if projects differ.
LAYER_IDS: tuple[tuple[str, str, int | None], ...] = (
    ("", "feature_layers", 0),  # longdraft's entry, with which a user can override all others
    # speculators: models/utils.py ([2, L // 2, L - 3]), convert/dflash/converter.py. vLLM: worker/gpu_model_runner.py.
    ("", "aux_hidden_state_layer_ids", 1),
    ("", _IDS, 1),
    # Layers' outputs: SpecForge (algorithms/model_providers.py: [1, L // 2 - 1, L - 4]), Model-Optimizer (hooks of
    # plugins/hf_eagle.py). Layers' inputs: vLLM, drafts of TorchSpec, NVIDIA's later ones. sglang decides by the first
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
# Parts that our drafts do not support, by pattern of tensors' names.
_UNSUPPORTED_PARTS = {
    r"\.experts?\.|\.shared_experts?\.": "a mixture of experts",
    r"\.(kv_a|q_a|kv_b)_": "latent attention (MLA)",
    r"_scale(_inv|_2)?$|\.scales$|\.(weight_packed|qweight|absmax)$": "quantised weights (get it in bfloat16)",
}


@dataclass(frozen=True)
class PublishedDraft:
    """A draft folder of another project."""

    kind: str  # the kind of draft, by our names
    folder: Path | str  # the folder, for messages
    config: dict[str, Any]  # the content of config.json
    sizes: dict[str, Any]  # the complete sizes of the draft's layers, as transformers names them
    tensors: dict[str, torch.Tensor]  # the draft's tensors by our names

    def nested(self, name: str) -> Mapping[str, Any]:
        """Returns a section of config.json; {} if there is none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


@dataclass(frozen=True)
class DraftFormat:
    """The published layout of one kind.

    Attributes:
        shape: dataclass of the module's sizes.
        label: the kind in messages.
        parse: returns two dicts: entries of ``shape`` that are not in :attr:`PublishedDraft.sizes` or replace them, and
            entries of our config.json. The entry ``any_vocabulary`` is true if targets of any vocabulary fit. ``parse``
            may remove tensors.
        rename_rules: (pattern in a tensor's name, replacement), applied in order.
        drop_pattern: pattern of the names, after renaming, of tensors that the draft does not need.
        default_theta: RoPE base of a folder that states none. Folders of `speculators` have another default.
    """

    shape: type[Any]
    label: str
    parse: Callable[[PublishedDraft], tuple[dict[str, Any], dict[str, Any]]]
    rename_rules: tuple[tuple[str, str], ...]
    drop_pattern: str = LEFTOVER_TENSORS
    default_theta: float = DEFAULT_ROPE_THETA

    def rename_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path | str) -> dict[str, torch.Tensor]:
        """Returns the tensors by our module's names. Raises CheckpointError if two tensors get the same name."""
        renamed: dict[str, torch.Tensor] = {}
        for original, tensor in tensors.items():
            name = original
            for pattern, replacement in self.rename_rules:
                name = re.sub(pattern, replacement, name)
            if re.match(self.drop_pattern, name):
                continue
            if name in renamed:
                raise CheckpointError(f"{folder} holds {name} twice, once as {original}: name a folder with one draft.")
            renamed[name] = tensor
        return renamed


FORMATS: dict[str, DraftFormat] = {}


def read(folder: Path | str, kind: str) -> tuple[DraftFolder, dict[str, Any]]:
    """Reads a draft of ``kind`` in any layout. Returns the contents in our layout (the entry ``layout`` names the
    original layout) and RoPE parameters as transformers names them.

    Raises CheckpointError if the folder is unreadable, has impossible settings, or holds another kind of draft.
    """
    original = draft_folder.load(folder, kind)
    convert = _convert_longdraft if "longdraft_format" in original.config else _convert_published
    contents, rope = convert(original, folder)
    return contents, scale_rope(rope, contents.config.get("trained_length"), None, None, folder)


def _convert_longdraft(contents: DraftFolder, folder: Path | str) -> tuple[DraftFolder, dict[str, Any]]:
    """Returns a folder of our layout without ``t2d``, which drafting does not need, and the RoPE parameters."""
    config, layers = contents.config, contents.config.get("feature_layers")
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise CheckpointError(f"config.json of {folder} lacks feature_layers, the layers of the target that it reads.")
    length = config.get("rope_original_length") or config.get("trained_length")
    # A published draft that longdraft trained further has rope_parameters, for scaling of any type.
    theta, rope = config.get("rope_theta") or DEFAULT_ROPE_THETA, config.get("rope_parameters")
    rope = dict(rope) if rope else make_rope_parameters(theta, config.get("rope_factor"), length)
    contents.tensors.pop(T2D, None)
    config["draft_vocab_size"] = config.get("vocabulary") if D2T in contents.tensors else None
    return contents, rope


def _complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with all settings: those missing in ``config`` get transformers' defaults.
    Raises ValueError if transformers does not know its ``model_type``, or a value is not allowed."""
    settings = {name: value for name, value in config.items() if name != "model_type"}
    completed: dict[str, Any] = AutoConfig.for_model(str(config.get("model_type") or "llama"), **settings).to_dict()
    return completed


def _convert_published(original: DraftFolder, folder: Path | str) -> tuple[DraftFolder, dict[str, Any]]:
    """Returns the contents of another project's folder in our layout, and the RoPE parameters."""
    kind, config, tensors = original.kind, original.config, original.tensors
    draft_format, is_speculators = FORMATS[kind], MODEL_TYPE in config
    layer_config = config.get("transformer_layer_config") if is_speculators else config
    if not isinstance(layer_config, dict):
        raise CheckpointError(f"config.json of {folder} lacks transformer_layer_config: copy the draft again.")
    # `speculators` leaves out sizes that equal transformers' defaults.
    sizes = draft_folder.with_derived_sizes(_complete_config(layer_config) if is_speculators else layer_config)
    if sizes.get("hidden_act") not in (None, "silu"):
        raise CheckpointError(f"{folder} has hidden_act {sizes['hidden_act']}: longdraft's drafts know silu alone.")
    renamed = draft_format.rename_tensors(tensors, folder)
    published = PublishedDraft(kind, folder, config, sizes, renamed)
    for pattern, part in _UNSUPPORTED_PARTS.items():
        if tensor_name := next((name for name in tensors if re.search(pattern, name)), None):
            raise CheckpointError(f"{folder} has {part} ({tensor_name}), which longdraft's drafts do not support.")
    t2d = published.tensors.pop(T2D, None)
    overrides, settings = draft_format.parse(published)
    embedding = published.tensors.get(EMBEDDING)
    overrides["embedding"] = None if embedding is None else len(embedding)
    values, names = sizes | overrides, draft_folder.HF_NAMES
    shape = draft_folder.read_shape(draft_format.shape, values, folder, draft_format.label, names)
    vocabulary = sizes.get("vocab_size") or (None if t2d is None else len(t2d))
    target = {"hidden_size": config.get("target_hidden_size") or shape.hidden_size}
    if not settings.pop("any_vocabulary", False) and vocabulary:
        target["vocab_size"] = vocabulary
    converted = asdict(shape) | {
        "layout": "speculators" if is_speculators else "published",
        "trained_length": sizes.get("max_position_embeddings"),
        "draft_vocab_size": shape.vocabulary if D2T in published.tensors else None,
        "target_vocabulary": vocabulary,
        "feature_layers": _feature_layers(config, folder),
    }
    if "retrieval_layer" in config:
        converted["retrieval_layer"] = config["retrieval_layer"]
    rope = rope_from_config(sizes, DEFAULT_ROPE_THETA if is_speculators else draft_format.default_theta)
    return DraftFolder(kind, converted | settings, published.tensors, target), rope


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose outputs EAGLE-3 reads: in transformers hidden_states[2], [L // 2] and [L - 3], where L
    is the target's number of layers, and hidden_states[i + 1] is the output of layer i."""
    return 1, num_layers // 2 - 1, num_layers - 4


def _feature_layers(config: Mapping[str, Any], folder: Path | str) -> list[int] | None:
    """Returns the layers, from 0, whose outputs a published config.json names; None if it names no layers.
    Warns if the offset of the ids is uncertain, because projects differ."""
    sections = ((config.get(key) if key else config, name, offset) for key, name, offset in LAYER_IDS)
    entries = ((x[name], name, offset) for x, name, offset in sections if isinstance(x, dict) and x.get(name))
    ids, name, offset = next(entries, (None, "", 0))
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json of {folder} has no list of layers in {name}: copy it again.")
    ids = sorted(ids) if name == _IDS else ids  # features are collected in layer order; Model-Optimizer writes a set
    is_certain = name != _IDS or ids[0] != 1
    if offset is None and (is_certain := any(config.get(key) is not None for key in VLLM_MASK_TOKENS)):
        offset = 1
    elif offset is None:
        offset = int(ids[0] > 1)
        # Certain if the ids are the default layers of a target whose number of layers follows from the middle id.
        num_layers = 2 * (ids[len(ids) // 2] - offset + 1)
        defaults = map(default_feature_layers, (num_layers, num_layers + 1))
        is_certain = ids[0] < 1 or tuple(i - offset for i in ids) in defaults
    layers, alternative = [i - offset for i in ids], [i - 1 + offset for i in ids]
    if min(layers) < 0:
        raise CheckpointError(f"{name} of {folder} names the embedding, which longdraft's drafts do not read.")
    if not is_certain:
        logger.warning(
            f"The draft in {folder} names layers {ids}, read as outputs of {layers}: projects differ. If few tokens "
            f"are accepted, set feature_layers to {alternative} in its config.json (`longdraft bench acceptance` "
            "compares)."
        )
    return layers


def read_mask_token(config: Mapping[str, Any], folder: Path | str) -> int:
    """Reads the token whose embedding stands for unknown tokens. Raises CheckpointError if there is none."""
    token = next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)
    if type(token) is not int or token < 0:
        raise CheckpointError(
            f"config.json of {folder} has no {MASK_TOKENS[0]}, the token that stands for unknown tokens: add it."
        )
    return token


def check_mask_token(shape: Any, vocabulary: int, folder: Path | str) -> None:
    """Raises CheckpointError if the embedding has no row for the mask token. ``vocabulary``: rows of the target's."""
    token, rows = shape.mask_token, shape.embedding or vocabulary
    if token >= rows:
        raise CheckpointError(
            f"{MASK_TOKENS[0]} {token} of {folder} is no row of the embedding, which has {rows}: correct its "
            "config.json."
        )


def rope_from_config(config: Mapping[str, Any], default_theta: float = DEFAULT_ROPE_THETA) -> dict[str, Any]:
    """Returns RoPE parameters from a configuration of any version of transformers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or default_theta
    parameters = {name: value for name, value in rope.items() if name != "type" and value is not None}
    return parameters | {"rope_type": rope_type, "rope_theta": float(theta)}


def scale_rope(
    rope: dict[str, Any], trained_length: int | None, theta: float | None, factor: float | None, folder: Path | str
) -> dict[str, Any]:
    """Returns RoPE parameters with a new base or YaRN factor, and with the original length for YaRN.

    Args:
        rope: the draft's parameters.
        trained_length: the length that YaRN scales, if ``rope`` names no length.
        theta: the new base; None keeps the draft's base.
        factor: the new YaRN factor; None keeps the draft's scaling.
        folder: the draft's folder, for messages.
    """
    rope = rope if theta is None else rope | {"rope_theta": float(theta)}
    length = rope.get("original_max_position_embeddings") or trained_length
    if factor is not None:
        rope = make_rope_parameters(rope["rope_theta"], factor, length)
    elif rope["rope_type"] == "yarn":
        rope = rope | {"original_max_position_embeddings": length}
    if rope["rope_type"] == "yarn" and not length:
        raise CheckpointError(
            f"config.json of {folder} has YaRN but not the context length that it scales: add rope_original_length."
        )
    return rope
