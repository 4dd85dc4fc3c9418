"""EAGLE's layouts: sizes of its modules, and the rows of EAGLE-1 to EAGLE-3.1 and P-EAGLE in the table of formats.

Names of a published EAGLE-3 draft are those of our module; `speculators`, EAGLE-1 and EAGLE-2 call the layer
``layers.0.`` instead of ``midlayer.``. All may carry the target's embedding, which is dropped unless the draft was
trained with one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafts.formats import EMBEDDING, FORMATS, MODEL_TYPE, DraftFormat, PublishedDraft, read_mask_token
from longdraft.errors import CheckpointError

KIND = "eagle3"
EAGLE = "eagle"  # of EAGLE-1 and EAGLE-2
PEAGLE = "peagle"
# Flags of EAGLE-3.1, at the top of config.json or in eagle_config.
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# Flag of a module -> the tensor of its first layer that tells.
_PARTS = {"attention_bias": "q_proj.bias", "output_bias": "o_proj.bias", "qk_norm": "q_norm.weight"}
# Where a tensor's own name begins; what stands before is the name of the model around it.
_BEGINNINGS = "fc|midlayer|layers|norm|lm_head|embed_tokens|input_norm|fc_norm|mask_hidden|d2t|t2d"
_RENAME = (
    # How `speculators` called parts of EAGLE-1 in its first versions.
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
    (rf"^(?:[^.]+\.)*?(?=(?:{_BEGINNINGS})(?:\.|$))", ""),
    (r"^layers\.0\.", "midlayer."),
)


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


@dataclass(frozen=True)
class EagleShape(Eagle3Shape):
    """Sizes of the module.

    Attributes:
        feature_size, vocabulary: the target's hidden size and vocabulary.
        fc_bias: whether fc has a bias.
    """

    fc_bias: bool = False


def _contents(theirs: PublishedDraft) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts that folders tell: sizes and flags that the tensors tell, keys that are seen."""
    config, sizes, tensors, eagle = theirs.config, theirs.sizes, theirs.tensors, theirs.nested("eagle_config")
    if config.get("layernorms"):
        raise CheckpointError(f"{theirs.folder} sets layernorms: longdraft's EAGLE has no such norms.")
    if eagle.get("use_aux_hidden_state") is False and "fc.weight" not in tensors:
        raise CheckpointError(f"{theirs.folder} sets use_aux_hidden_state to false: longdraft's EAGLE-3 reads several.")
    narrower = config.get("target_hidden_size") not in (None, sizes.get("hidden_size"))
    # P-EAGLE has an embedding of its own always, as it embeds the mask token.
    if theirs.kind != PEAGLE and not narrower and not config.get("embed_requires_grad"):
        tensors.pop(EMBEDDING, None)  # the target's
    slides = "sliding_attention" in (sizes.get("layer_types") or ())
    more = {"window": sizes.get("sliding_window") if slides else None}
    known: dict[str, Any] = {flag: f"midlayer.self_attn.{part}" in tensors for flag, part in _PARTS.items()}
    if theirs.kind == EAGLE:  # one layer is read, and the head is the target's
        known |= {"norm_before_residual": False, "fc_bias": "fc.bias" in tensors}
        return known | {"feature_size": sizes.get("hidden_size")}, more | {"draft_vocab_size": None}
    known |= {name: eagle.get(name, config.get(name)) for name in _NORMS}
    known |= {
        "fc_norm": sum(name.startswith("fc_norm.") for name in tensors) if known["fc_norm"] else None,
        "feature_size": tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 3 * sizes.get("hidden_size", 0),
        "vocab_size": config.get("draft_vocab_size") or sizes.get("vocab_size"),
        # As vLLM reads folders of `speculators` that do not say.
        "norm_before_residual": bool(config.get("norm_before_residual", config.get(MODEL_TYPE) == KIND)),
        "decoder_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) + 1,
    }
    if theirs.kind == PEAGLE:
        methods = theirs.nested("speculators_config").get("proposal_methods") or [{}]
        slots = methods[0].get("speculative_tokens") or config.get("num_speculative_tokens") or 8
        more |= {"slots": int(slots), "mask_token": read_mask_token(config, theirs.folder)}
    return known, more


FORMATS[EAGLE] = DraftFormat(EagleShape, "EAGLE", _contents, _RENAME)
FORMATS[KIND] = DraftFormat(Eagle3Shape, "EAGLE-3", _contents, _RENAME)
FORMATS[PEAGLE] = DraftFormat(Eagle3Shape, "EAGLE-3", _contents, _RENAME)
