"""Layouts of DFlash, DFlash 2 and DSpark: sizes of the module, and the layouts' entry in the table of formats.

A draft with the target's vocabulary has neither embedding nor head, and uses the target's. DSpark's settings are in
dflash_config (SpecForge, Model-Optimizer), in dspark_config (sglang), or at the top level of config.json (DeepSpec).
Their names may have the prefix ``dspark_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longdraft.drafts.draft_folder import D2T
from longdraft.drafts.formats import (
    EMBEDDING,
    FORMATS,
    HEAD,
    LEFTOVER_TENSORS,
    MODEL_TYPE,
    DraftFormat,
    PublishedDraft,
    read_mask_token,
)
from longdraft.errors import CheckpointError

KIND = "dflash"
MASK = "mask_embedding"
_SLIDING = "sliding_attention"
_UNSUPPORTED_SETTINGS = ("attention_sink_bias", "attention_value_scale", "add_swa_attention_sink_bias")

# {size of DFlash 2: (its name in config.json, the authors' default)}
_DFLASH2_SETTINGS = {
    "conv_taps": ("conv_kernel_size", 2), "conv_group_size": ("conv_group_size", 16),
    "selector_rank": ("selector_rank", 256), "selector_top_k": ("selector_top_k", 16),
}  # fmt: skip


@dataclass(frozen=True)
class DFlashShape:
    """Sizes of a DFlash, DFlash 2 or DSpark module."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int  # size of one token's concatenated hidden states
    vocabulary: int  # number of rows of the head, the draft's or the target's
    decoder_layers: int  # number of layers
    block_size: int  # number of tokens of a draft block, the anchor (the last committed token) included
    mask_token: int  # the token whose embedding stands for unknown tokens
    from_anchor: bool = False  # True if the output at the anchor proposes a token, too
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # True if q, k, v and o have biases
    own_head: bool = False  # True if the draft has a head of its own; False: it uses the target's
    own_mask: bool = False  # True if the draft has a separate embedding of the mask token
    embedding: int | None = None  # number of rows of the draft's own embedding; None: it uses the target's
    markov_rank: int | None = None  # rank of DSpark's Markov head (corrects logits by the last token); None: no head
    selector_rank: int | None = None  # rank of DFlash 2's selector; None: no selector
    selector_top_k: int | None = None  # number of the most likely tokens that it selects from
    conv_taps: int | None = None  # length of DFlash 2's convolutions; None: no convolutions
    conv_group_size: int | None = None  # channels that share a token's kernel
    embedding_scale: float = 1.0  # factor of the input embeddings
    logit_scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # soft cap of the logits; None: no cap

    @property
    def slots(self) -> int:
        """Number of tokens that one forward proposes."""
        return self.block_size if self.from_anchor else self.block_size - 1

    # Attributes that the decoder layer reads of every shape, and that are equal in all DFlash drafts.
    norm_before_residual: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True

    @property
    def output_bias(self) -> bool:
        return self.attention_bias


def _parse(published: PublishedDraft) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads sizes, flags and attention windows; see :attr:`DraftFormat.parse`."""
    config, sizes, tensors = published.config, published.sizes, published.tensors
    # nested: the sections. settings: sections and top level, without the prefix.
    nested = {**published.nested("dflash_config"), **published.nested("dspark_config")}
    settings = nested | {name.removeprefix("dspark_"): x for name, x in config.items() if x is not None}
    unsupported = [name for name in _UNSUPPORTED_SETTINGS if settings.get(name)]
    markov_type = settings.get("markov_head_type") or "vanilla"
    if markov_type != "vanilla" and settings.get("markov_rank"):
        unsupported.append(f"markov_head_type={markov_type}")
    unsupported += ["is_neox_style"] if config.get("is_neox_style") is False else []  # RoPE of interleaved pairs
    if unsupported:
        raise CheckpointError(
            f"{published.folder} sets {', '.join(unsupported)}, which longdraft's DFlash does not support."
        )
    # None and 0: not set. The embedding of a draft with the target's hidden size is a copy of the target's.
    if config.get("target_hidden_size") in (None, 0, sizes.get("hidden_size")) and D2T in tensors:
        tensors.pop(EMBEDDING, None)
    num_layers = sizes.get("num_hidden_layers")
    # The anchor proposes a token in DSpark and DeepSpec. In new folders of `speculators` a flag says so.
    from_anchor = settings.get("sample_from_anchor", settings.get("shift_label"))
    if from_anchor is None and ("markov_rank" in settings or "dspark" in str(settings.get("architectures")).lower()):
        proposals = published.nested("speculators_config").get("proposal_methods") or [{}]
        from_anchor = proposals[0].get("speculative_tokens") in (None, settings.get("block_size"))
    overrides = {
        "decoder_layers": num_layers,
        "feature_size": tensors["fc.weight"].shape[1] if "fc.weight" in tensors else None,
        "vocab_size": len(tensors[HEAD]) if HEAD in tensors else sizes.get("vocab_size"),
        "block_size": settings.get("block_size"),
        "mask_token": read_mask_token(settings, published.folder),
        "from_anchor": bool(from_anchor),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "own_head": HEAD in tensors,
        "own_mask": MASK in tensors,
        "markov_rank": settings.get("markov_rank") or None,
        "embedding_scale": nested.get("input_embedding_scale"),
        "logit_scale": nested.get("output_multiplier"),
        "softcap": nested.get("final_logit_softcapping") or None,
    }
    if config.get(MODEL_TYPE) == "dflash2" or settings.get("conv_kernel_size"):
        overrides |= {name: settings.get(key) or default for name, (key, default) in _DFLASH2_SETTINGS.items()}
    windows, causal = _layer_attention(config, nested, sizes, int(num_layers or 0))
    return overrides, {"windows": windows, "causal": causal, "any_vocabulary": EMBEDDING in tensors}


def _layer_attention(
    config: Mapping[str, Any], nested: Mapping[str, Any], sizes: Mapping[str, Any], num_layers: int
) -> tuple[list[int | None], list[bool]]:
    """Returns two lists by layer: the window in tokens (None: full attention), and True for causal attention between
    the tokens of a draft block."""
    types = sizes.get("layer_types") or []
    sliding_by_layer = [i < len(types) and types[i] == _SLIDING for i in range(num_layers)]
    if nested.get("use_swa") and not any(sliding_by_layer):
        sliding_by_layer = [True] * num_layers
        causal_by_layer = [False] * num_layers
    else:
        causal_by_layer = [slides and not config.get("sliding_window_non_causal") for slides in sliding_by_layer]
    window = nested.get("swa_window_size") or sizes.get("sliding_window")
    all_causal = config.get("is_causal", nested.get("causal"))
    causal_by_layer = causal_by_layer if all_causal is None else [bool(all_causal)] * num_layers
    return [int(window) if slides and window else None for slides in sliding_by_layer], causal_by_layer


# In SpecForge's first DSpark drafts, names begin with a module around model or head. In Model-Optimizer's drafts, names
# of the Markov head lack the module's name.
_MARKOV = r"^(?=(markov_w[12]|gate_proj|joint_proj)\.)"
_RENAME_RULES = ((r"^model\.", ""), (r"^logit_head\.", ""), (_MARKOV, "markov_head."))
# The confidence head is dropped, because the planner measures acceptance.
FORMATS[KIND] = DraftFormat(
    DFlashShape, "DFlash", _parse, _RENAME_RULES, rf"confidence_(head|proj)\.|{LEFTOVER_TENSORS}", default_theta=1e6
)
