"""Writes GGUF files of drafts for llama.cpp: a decoder with the tokenizer of its target's file.

Rows of queries and keys are written in pairs, as the first Llama rotated them. Scaled RoPE is written as plain RoPE
with a divisor of each frequency and a factor of cos and sin, which all architectures read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.checkpoints import check_gguf, reading
from longdraft.model.embedded import EMBEDDED_ID, packaged_file
from longdraft.model.gguf_reader import needs, reader_of
from longdraft.model.rotary import Rotary

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Kinds of RoPE whose frequencies do not depend on the text's length.
_FIXED_ROPE = ("default", "linear", "yarn", "llama3")
# Name of a decoder's module -> its name in a file.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
}


class TargetFile:
    """The GGUF file of a target, with its architecture and sizes.

    Args:
        name: the file, or the id of the embedded model.

    Attributes:
        tokens: number of tokens in the vocabulary.

    Raises:
        CapabilityError: the name is a folder or an id, whose tokenizer only llama.cpp's converter can translate.
        CheckpointError: the file is damaged, or no model's.
    """

    def __init__(self, name: str) -> None:
        path = packaged_file() if name == EMBEDDED_ID else Path(name).expanduser()
        if not path.is_file():
            raise CapabilityError(
                f"{name} is not a file: for llama.cpp give the target's .gguf file, as it will be served. "
                "convert_hf_to_gguf.py of llama.cpp makes one of a Hugging Face folder."
            )
        check_gguf(path)
        needs("gguf", path)
        self.path = path
        with reading(path, f"{path} cannot be read as the GGUF file of a model", "Fetch it again."):
            self._reader = reader_of(path)
            self.architecture = str(self._value("general.architecture"))
            self.layers = int(self._value(f"{self.architecture}.block_count"))
            self.hidden_size = int(self._value(f"{self.architecture}.embedding_length"))
            self.context_length = int(self._value(f"{self.architecture}.context_length"))
            self.tokens = len(self._reader.fields["tokenizer.ggml.tokens"].data)

    def _value(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def check(self, hidden_size: int, tokens: int | None, folder: Path) -> None:
        """Raises CheckpointError if the draft in ``folder``, with these sizes, was made for another target."""
        for name, wanted, size in (("hidden_size", hidden_size, self.hidden_size), ("vocab_size", tokens, self.tokens)):
            if wanted not in (None, size):
                raise CheckpointError(
                    f"The draft in {folder} was made for another target: {name} {wanted} ({self.path}: {size}). "
                    "Name the target that it was trained with."
                )

    def copy_tokenizer(self, writer: GGUFWriter) -> None:
        """Copies all fields of the tokenizer."""
        from gguf import GGUFValueType

        for name, field in self._reader.fields.items():
            if name.startswith("tokenizer.") and len(field.data):
                kind = field.types[0]
                of = field.types[-1] if kind is GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=of)

    def copy_tensor(self, writer: GGUFWriter, name: str) -> bool:
        """Copies a tensor as it is stored; returns False if the file has none of that name."""
        tensor = next((t for t in self._reader.tensors if t.name == name), None)
        if tensor is not None:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        return tensor is not None


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int


class DraftFile:
    """Writes a draft's file.

    Args:
        architecture: llama.cpp's name of it.
        name: the draft's name, for people.

    Attributes:
        writer: gguf's writer, for fields of this architecture alone.
    """

    def __init__(self, target: TargetFile, architecture: str, name: str, sizes: Decoder) -> None:
        import gguf

        self._sizes = sizes
        self.writer = writer = gguf.GGUFWriter(None, architecture)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)  # for tensors copied from the target
        writer.add_vocab_size(target.tokens)
        writer.add_context_length(sizes.context_length)
        writer.add_embedding_length(sizes.hidden_size)
        writer.add_block_count(sizes.layers)
        writer.add_feed_forward_length(sizes.intermediate_size)
        writer.add_head_count(sizes.heads)
        writer.add_head_count_kv(sizes.kv_heads)
        writer.add_key_length(sizes.head_dim)
        writer.add_value_length(sizes.head_dim)
        writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
        target.copy_tokenizer(writer)

    def add_rope(self, parameters: Mapping[str, Any]) -> None:
        """Writes RoPE with these parameters of transformers.

        Raises:
            CapabilityError: the frequencies depend on the text's length.
        """
        import gguf

        kind, size, theta = parameters["rope_type"], self._sizes.head_dim, float(parameters["rope_theta"])
        if kind not in _FIXED_ROPE:
            raise CapabilityError(f"The draft's RoPE is {kind}, for which the layout has no words.")
        rotary = Rotary(size, parameters)
        divisors = Rotary(size, {"rope_type": "default", "rope_theta": theta}).frequencies / rotary.frequencies
        self.writer.add_rope_dimension_count(size)
        self.writer.add_rope_freq_base(theta)
        self.writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        if bool((divisors != 1).any()):
            self.writer.add_tensor("rope_freqs.weight", divisors.numpy())
        if rotary.scale != 1:
            self.writer.add_rope_scaling_attn_factors(rotary.scale)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor with its name in a decoder of transformers, such as ``layers.0.mlp.up_proj.weight``.

        Vectors are written in float32, matrices in float16 unless they overflow, and integers unchanged.
        """
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        name = name.replace("layers.", "blk.", 1) if name.startswith("layers.") else name
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()
            halves = tensor.half()
            tensor = halves if tensor.dim() > 1 and bool(halves.isfinite().all()) else tensor
        kind = name.split(".")[-2] if "." in name else ""
        if kind in ("attn_q", "attn_k"):
            heads = self._sizes.heads if kind == "attn_q" else self._sizes.kv_heads
            tensor = tensor.view(heads, 2, self._sizes.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        self.writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))

    def save(self, out: Path | str) -> None:
        """Writes the file, completely or not at all.

        Raises:
            CheckpointError: the file cannot be written.
        """
        out = Path(out)
        part = out.with_name(f".{out.name}.part")
        try:
            if out.is_dir():
                raise IsADirectoryError("it is a folder: name a file, such as draft.gguf")
            out.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.writer.write_header_to_file(part)
                self.writer.write_kv_data_to_file()
                self.writer.write_tensors_to_file()
            finally:
                self.writer.close()
            part.replace(out)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(f"Could not write {out}: {error}") from error
