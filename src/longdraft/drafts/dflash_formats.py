"""DFlash and DSpark: sizes of their module, and their row in the table of formats.

Drafts of the whole vocabulary have neither embedding nor head: they use the target's. What is DSpark's lies in
dflash_config (SpecForge, Model-Optimizer), dspark_config (sglang), at the top (DeepSpec) or behind ``dspark_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longdraft.drafts.draft_folder import D2T
from longdraft.drafts.formats import EMBEDDING, FORMATS, LEFTOVER_TENSORS, DraftFormat, PublishedDraft, read_mask_token
from longdraft.errors import CheckpointError

KIND = "dflash"
HEAD, MASK = "lm_head.weight", "mask_embedding"
_SLIDING = "sliding_attention"
_SINKS = ("attention_sink_bias", "attention_value_scale", "add_swa_attention_sink_bias")


@dataclass(frozen=True)
class DFlashShape:
    """Sizes of the module.

    Attributes:
        feature_size: size of one token's hidden states side by side.
        vocabulary: rows of the head, its own or the target's.
        decoder_layers: layers.
        block_size: rows of a forward, the anchor's included.
        mask_token: the token whose embedding stands for those not known yet.
        from_anchor: the anchor's row proposes a token too.
        attention_bias: whether q, k, v and o have biases.
        own_head, own_mask: whether it has a head of its own, and an embedding of the mask token.
        embedding: rows of its own embedding; None: it uses the target's.
        markov_rank: of DSpark's correction for the token before; None: there is none.
        gated, recurrent: DSpark's correction looks at the row's output too, or keeps a state along the path.
        embedding_scale, logit_scale, softcap: factors of embeddings and logits, and the logits' soft cap.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int
    vocabulary: int
    decoder_layers: int
    block_size: int
    mask_token: int
    from_anchor: bool = False
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    own_head: bool = False
    own_mask: bool = False
    embedding: int | None = None
    markov_rank: int | None = None
    gated: bool = False
    recurrent: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def slots(self) -> int:
        """Tokens that one forward proposes."""
        return self.block_size if self.from_anchor else self.block_size - 1

    norm_before_residual: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True

    @property
    def output_bias(self) -> bool:
        return self.attention_bias


def _contents(theirs: PublishedDraft) -> tuple[dict[str, Any], dict[str, Any]]:
    config, sizes, tensors = theirs.config, theirs.sizes, theirs.tensors
    nested = {**theirs.nested("dflash_config"), **theirs.nested("dspark_config")}
    said = nested | {name.removeprefix("dspark_"): x for name, x in config.items() if x is not None}
    wrong = [name for name in _SINKS if said.get(name)]
    wrong += ["is_neox_style"] if config.get("is_neox_style") is False else []
    if wrong:
        raise CheckpointError(f"{theirs.folder} sets {', '.join(wrong)}: longdraft's DFlash has no such thing.")
    if config.get("target_hidden_size") in (None, 0, sizes.get("hidden_size")) and D2T in tensors:
        tensors.pop(EMBEDDING, None)  # the target's
    markov = said.get("markov_head_type") or "vanilla"
    count = sizes.get("num_hidden_layers")
    # DSpark's and DeepSpec's anchors propose a token; those of `speculators` say so, or are of before they did.
    anchored = said.get("sample_from_anchor", said.get("shift_label"))
    if anchored is None and ("markov_rank" in said or "dspark" in str(said.get("architectures")).lower()):
        methods = theirs.nested("speculators_config").get("proposal_methods") or [{}]
        anchored = methods[0].get("speculative_tokens") in (None, said.get("block_size"))
    known = {
        "decoder_layers": count,
        "feature_size": tensors["fc.weight"].shape[1] if "fc.weight" in tensors else None,
        "vocab_size": len(tensors[HEAD]) if HEAD in tensors else sizes.get("vocab_size"),
        "block_size": said.get("block_size"),
        "mask_token": read_mask_token(said, theirs.folder),
        "from_anchor": bool(anchored),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "own_head": HEAD in tensors,
        "own_mask": MASK in tensors,
        "markov_rank": said.get("markov_rank") or None,
        "gated": markov == "gated",
        "recurrent": markov == "rnn",
        "embedding_scale": nested.get("input_embedding_scale"),
        "logit_scale": nested.get("output_multiplier"),
        "softcap": nested.get("final_logit_softcapping") or None,
    }
    windows, causal = _attention(config, nested, sizes, int(count or 0))
    return known, {
        "windows": windows,
        "causal": causal,
        "any_vocabulary": EMBEDDING in tensors,
    }


def _attention(
    config: Mapping[str, Any], nested: Mapping[str, Any], sizes: Mapping[str, Any], layers: int
) -> tuple[list[int | None], list[bool]]:
    """For each layer, rows of the text that it sees (None: all), and whether its block is causal."""
    types = sizes.get("layer_types") or []
    sliding = [i < len(types) and types[i] == _SLIDING for i in range(layers)]
    if nested.get("use_swa") and not any(sliding):
        sliding = [True] * layers
        usual = [False] * layers
    else:
        usual = [slides and not config.get("sliding_window_non_causal") for slides in sliding]
    window = nested.get("swa_window_size") or sizes.get("sliding_window")
    said = config.get("is_causal", nested.get("causal"))
    causal = usual if said is None else [bool(said)] * layers
    return [int(window) if slides and window else None for slides in sliding], causal


# SpecForge's first DSpark drafts had their heads in a module, Model-Optimizer's have the Markov head's parts outside.
_RENAME = ((r"^model\.", ""), (r"^logit_head\.", ""), (r"^(?=(markov_w[12]|gate_proj|joint_proj)\.)", "markov_head."))
# A confidence head says how likely a level's tokens are to be accepted: the planner learns that itself.
FORMATS[KIND] = DraftFormat(
    DFlashShape, "DFlash", _contents, _RENAME, rf"confidence_(head|proj)\.|{LEFTOVER_TENSORS}", default_theta=1e6
)
