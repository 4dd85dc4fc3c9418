"""An EAGLE-3 draft as a GGUF file, which llama.cpp drafts with: ``-md FILE --spec-type draft-eagle3``.

The embedding is left out: llama.cpp then uses the target's, which is what the draft was trained with. Its table ``d2t``
holds the target's ids themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.drafts.eagle_draft import EagleDraft
from longdraft.drafts.eagle_formats import usual_layers
from longdraft.errors import CapabilityError
from longdraft.model.gguf_writing import Decoder, DraftFile, TargetFile

_FEATURES = 3  # layers of the target that llama.cpp hands over
_NAMES = {"midlayer.": "layers.0.", "norm.": "output_norm.", "lm_head.": "output."}


def to_gguf(draft: EagleDraft[Any], out: Path | str, verifier: str) -> list[str]:
    """Writes the file.

    Args:
        verifier: the target's own GGUF file, as it will be served; its tokenizer is copied.

    Returns:
        Properties of the draft that the layout cannot express, a sentence each.

    Raises:
        CapabilityError: the draft has parts for which the layout has no place, or the target is no file.
        CheckpointError: the file cannot be written, or the draft was made for another target.
    """
    shape, target = draft.shape, TargetFile(verifier)
    layers = draft.layers or usual_layers(target.layers)
    if shape.attention_bias or shape.output_bias:
        raise CapabilityError("The draft's attention has biases, for which llama.cpp's EAGLE-3 has no place.")
    norms = shape.qk_norm or shape.norm_before_fc or shape.fc_norm or shape.norm_output
    if norms or shape.embedding or shape.decoder_layers > 1:
        raise CapabilityError("The draft has norms, layers or an embedding that the file has no place for.")
    if len(layers) != _FEATURES:
        raise CapabilityError(f"The draft reads {len(layers)} of its target's layers; llama.cpp's EAGLE-3 reads three.")
    tokens = shape.vocabulary if draft.ids is None else draft.made_for.get("vocab_size")
    target.check(shape.feature_size // _FEATURES, tokens, draft.folder)
    sizes = Decoder(
        1, shape.hidden_size, shape.intermediate_size, shape.heads, shape.kv_heads, shape.head_dim,
        shape.rms_norm_eps, target.context_length,
    )  # fmt: skip
    file = DraftFile(target, "eagle3", draft.folder.name, sizes)
    # What enters a layer is the output of the one before.
    file.writer.add_array("eagle3.target_layers", [i + 1 for i in layers])
    file.writer.add_uint32("eagle3.target_hidden_size", target.hidden_size)
    file.writer.add_bool("eagle3.norm_before_residual", shape.norm_before_residual)
    file.add_rope(draft.rope)
    for name, tensor in draft.weights.items():
        for ours, theirs in _NAMES.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        file.add(name, tensor)
    if draft.ids is not None:
        file.add("d2t", draft.ids)
    file.save(out)
    lost = []
    if draft.window is not None:
        lost.append(f"The layout knows no window ({draft.window} tokens): the served draft sees the whole text.")
    if draft.layers is None:
        lost.append(f"The draft does not name the layers that it reads: those of EAGLE-3, {layers}, are written.")
    return lost
