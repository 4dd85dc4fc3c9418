"""A small language model as a GGUF file, which llama.cpp drafts with: ``-md FILE --spec-type draft-simple``.

There a draft is a whole model, so embedding and head are copied out of the target's file, as they are stored.
"""

from __future__ import annotations

from pathlib import Path

from longdraft.drafts.language_model import SmallLMDraft, TrainedLM
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.folders import is_gguf
from longdraft.model.gguf_files import ARCHITECTURES
from longdraft.model.gguf_writing import Decoder, DraftFile, TargetFile

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def to_gguf(draft: SmallLMDraft, out: Path | str, verifier: str) -> list[str]:
    """Writes the file.

    Args:
        verifier: the target's own GGUF file, as it will be served.

    Returns:
        Properties of the draft that the layout cannot express, a sentence each.

    Raises:
        CapabilityError: the draft is a model of transformers; the target is no file, or scales its embedding.
        CheckpointError: the file cannot be written, or the draft was made for another target.
    """
    if is_gguf(draft.folder):
        raise CapabilityError(f"{draft.folder} is a GGUF file already: llama.cpp takes it as it is (-md).")
    if not isinstance(draft, TrainedLM):
        raise CapabilityError(
            f"{draft.folder} is a model of its own, of which convert_hf_to_gguf.py of llama.cpp makes a file."
        )
    target, given = TargetFile(verifier), draft.sizes
    target.check(given["hidden_size"], draft.made_for.get("vocab_size"), draft.folder)
    if target.architecture not in ARCHITECTURES:
        raise CapabilityError(
            f"{target.path} is of the architecture {target.architecture}; embeddings are taken from "
            f"{', '.join(ARCHITECTURES)} alone."
        )
    sizes = Decoder(
        given["num_hidden_layers"], given["hidden_size"], given["intermediate_size"], given["num_attention_heads"],
        given["num_key_value_heads"], given["head_dim"], given["rms_norm_eps"], given["max_position_embeddings"],
    )  # fmt: skip
    file = DraftFile(target, "llama", draft.folder.name, sizes)
    file.add_rope(given["rope_parameters"])
    if not target.copy_tensor(file.writer, _EMBEDDING):
        raise CheckpointError(f"{target.path} has no {_EMBEDDING}: fetch it again.")
    target.copy_tensor(file.writer, _HEAD)  # none where the embedding is the head
    for name, tensor in draft.weights.items():
        file.add("output_norm.weight" if name == "norm.weight" else name, tensor)
    file.save(out)
    lost = [f"It was trained on texts of {draft.trained_length:,} tokens: beyond, fewer of its tokens are accepted."]
    if draft.ids is not None:
        lost.append(
            f"The layout knows no vocabulary of a draft's own ({len(draft.ids):,} tokens): the served draft proposes "
            f"any of the target's {target.tokens:,}."
        )
    return lost
