"""Layouts of EAGLE-1 to EAGLE-3.1 and P-EAGLE: sizes of the modules, and the layouts' entries in the table of formats.

Tensors of a published EAGLE-3 draft have the names of our module. `speculators`, EAGLE-1 and EAGLE-2 call the layer
``layers.0.`` instead of ``midlayer.``. A folder may contain an embedding, which is dropped unless it was trained with
the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafts.draft_folder import D2T
from longdraft.drafts.formats import EMBEDDING, FORMATS, HEAD, MODEL_TYPE, DraftFormat, PublishedDraft, read_mask_token
from longdraft.errors import CheckpointError

KIND = "eagle3"
EAGLE = "eagle"  # EAGLE-1 and EAGLE-2
PEAGLE = "peagle"
# Flags of EAGLE-3.1, at the top of config.json or in eagle_config.
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# Flag of a module -> a tensor that the first layer has if the flag is set.
_FLAG_TENSORS = {"attention_bias": "q_proj.bias", "output_bias": "o_proj.bias", "qk_norm": "q_norm.weight"}
# First parts of our tensors' names. A prefix before a first part names a model around the draft, and is removed.
_NAME_STARTS = "fc|midlayer|layers|norm|lm_head|embed_tokens|input_norm|fc_norm|mask_hidden|d2t|t2d"
_RENAME_RULES = (
    # Names of EAGLE-1's parts in the first versions of `speculators`.
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
    (rf"^(?:[^.]+\.)*?(?=(?:{_NAME_STARTS})(?:\.|$))", ""),
    (r"^layers\.0\.", "midlayer."),
)


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of an EAGLE-3 module. The layer fc fuses the target's hidden states of a token to one vector g.
    Head counts may differ from the target's, because the module has a KV cache of its own."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int  # size of one token's concatenated hidden states, usually three times the target's hidden size
    vocabulary: int  # number of rows of the draft's head
    rms_norm_eps: float = 1e-6
    norm_before_residual: bool = False  # the residual stream starts from the normed g (a flag of `speculators`)
    attention_bias: bool = False  # q, k and v have biases
    output_bias: bool = False  # o has a bias
    qk_norm: bool = False  # each head of q and k is normed before RoPE, as in Qwen3's layers
    norm_before_fc: bool = False  # the concatenated hidden states are normed before fc
    fc_norm: int | None = None  # number of norms before fc, one for each hidden state; None: no such norms
    norm_output: bool = False  # the next step's g is the normed output instead of the output (EAGLE-3.1)
    embedding: int | None = None  # number of rows of the draft's own embedding; None: it uses the target's
    decoder_layers: int = 1  # number of layers; all but the first are plain decoder layers
    own_head: bool = True  # False: the draft uses the target's head


@dataclass(frozen=True)
class EagleShape(Eagle3Shape):
    """Sizes of an EAGLE-1 or 2 module. Feature size and vocabulary are the target's hidden size and vocabulary."""

    fc_bias: bool = False  # fc has a bias


def _parse(published: PublishedDraft) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads sizes, flags and window from configuration and tensors; see :attr:`DraftFormat.parse`."""
    config, sizes, tensors = published.config, published.sizes, published.tensors
    eagle, folder = published.nested("eagle_config"), published.folder
    if config.get("layernorms"):
        raise CheckpointError(f"{folder} sets layernorms: longdraft's EAGLE has no such norms.")
    if eagle.get("use_aux_hidden_state") is False and "fc.weight" not in tensors:
        raise CheckpointError(f"{folder} sets use_aux_hidden_state to false, which longdraft's EAGLE-3 cannot read.")
    sizes_differ = config.get("target_hidden_size") not in (None, sizes.get("hidden_size"))
    # P-EAGLE always has its own embedding, for the mask token.
    if published.kind != PEAGLE and not sizes_differ and not config.get("embed_requires_grad"):
        tensors.pop(EMBEDDING, None)  # a copy of the target's
    is_sliding = "sliding_attention" in (sizes.get("layer_types") or ())
    settings = {"window": sizes.get("sliding_window") if is_sliding else None}
    overrides: dict[str, Any] = {flag: f"midlayer.self_attn.{name}" in tensors for flag, name in _FLAG_TENSORS.items()}
    if published.kind == EAGLE:  # EAGLE-1 and 2 read the last layer alone, and use the target's head
        overrides |= {"norm_before_residual": False, "fc_bias": "fc.bias" in tensors}
        return overrides | {"feature_size": sizes.get("hidden_size")}, settings | {"draft_vocab_size": None}
    overrides |= {name: eagle.get(name, config.get(name)) for name in _NORMS}
    overrides |= {
        "fc_norm": sum(name.startswith("fc_norm.") for name in tensors) if overrides["fc_norm"] else None,
        "feature_size": tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 3 * sizes.get("hidden_size", 0),
        "vocab_size": config.get("draft_vocab_size") or sizes.get("vocab_size"),
        # Without the flag, vLLM's default: True for folders of `speculators`.
        "norm_before_residual": bool(config.get("norm_before_residual", config.get(MODEL_TYPE) == KIND)),
        # NVIDIA's drafts for gpt-oss lack a head. vLLM, sglang and llama.cpp use the target's then.
        "own_head": HEAD in tensors or D2T in tensors,
        "decoder_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) + 1,
    }
    if published.kind == PEAGLE:
        proposals = published.nested("speculators_config").get("proposal_methods") or [{}]
        # 8, if the folder does not say how many tokens a forward proposes.
        slots = proposals[0].get("speculative_tokens") or config.get("num_speculative_tokens") or 8
        settings |= {"slots": int(slots), "mask_token": read_mask_token(config, folder)}
    return overrides, settings


FORMATS[EAGLE] = DraftFormat(EagleShape, "EAGLE", _parse, _RENAME_RULES)
FORMATS[KIND] = DraftFormat(Eagle3Shape, "EAGLE-3", _parse, _RENAME_RULES)
FORMATS[PEAGLE] = DraftFormat(Eagle3Shape, "EAGLE-3", _parse, _RENAME_RULES)
