"""Loads models from GGUF files. Weights stay in their quant blocks, which longdraft's C++ kernels read.

Weights are memory-mapped, so a model of any size loads in about a second.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.huge_pages import drop_prefaulted
from longdraft.model.gguf import tensor_mapping
from longdraft.model.gguf.architectures import DRAFT_ARCHITECTURES, PER_LAYER_FIELDS, Arch, build_config, find_arch
from longdraft.model.gguf.header import LAYER_PATTERN, ROPE_FREQS, GGUFHeader, require_package
from longdraft.model.gguf.rope import rope_scaling
from longdraft.model.gguf.tokenizer import PRE_TOKENIZERS, build_tokenizer
from longdraft.model.load.checkpoints import DType, LoadedModel, Progress, checkpoint_errors, quiet
from longdraft.model.load.eos_tokens import config_eos_ids, eos_ids
from longdraft.model.quant import stored, stored_model
from longdraft.model.rope import stretch_rope
from longdraft.native import kernels, unavailable_reason

logger = logging.getLogger(__name__)

WeightFormat = Literal["stored", "float32"]  # "stored" keeps the file's quant blocks, "float32" dequantizes them
Arithmetic = Literal["int8", "float32"]  # in which activations are multiplied by quant blocks
_REMEDY = (
    "It may be truncated, or of an architecture that transformers cannot read: fetch it again, or give the model's "
    "Hugging Face folder."
)


class GGUFFile(GGUFHeader):
    """A GGUF file of a known architecture. Adds ``arch``, the table's row, to the attributes of GGUFHeader. Raises
    CheckpointError for an unknown architecture, and CapabilityError if its layers must be equal and are not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        arch = find_arch(self)
        if self.architecture in DRAFT_ARCHITECTURES:
            raise CheckpointError(
                f"{path} holds a draft ({self.architecture}), not a model: name it as the draft (draft=, or --draft "
                "FILE) without a method, and the model that it drafts for as the target."
            )
        if arch is None:
            raise CheckpointError(
                f"{path} has the architecture {self.architecture}, which is not read from GGUF files: give "
                "the model's Hugging Face folder or id."
            )
        self.arch: Arch = arch
        for name in (f"{self.architecture}.{field}" for field in PER_LAYER_FIELDS if not arch.per_layer_sizes):
            if isinstance(values := self.field(name), list):
                if len(set(values)) > 1:
                    raise CapabilityError(
                        f"{path} has layers of several sizes ({name}): give the model's Hugging Face folder or id."
                    )
                self.fields[name] = values[0]  # equal in all layers: a number instead of a list
        self.check()

    def config(self) -> Any:
        """Builds the transformers config with RoPE scaling. Raises CapabilityError if transformers lacks it."""
        config = build_config(self, self.arch)
        if self.arch.scales_by_rope_freqs and (scaling := rope_scaling(self, config)):
            # If layer types have parameters of their own, only layers with full attention are scaled.
            entry = config.rope_parameters.get("full_attention")
            scaled = {**(config.rope_parameters if entry is None else entry), **scaling}
            config.rope_parameters = scaled if entry is None else {**config.rope_parameters, "full_attention": scaled}
        return config

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Builds byte-level BPE ("gpt2") with a known pre-tokenizer; transformers builds all other tokenizers."""
        kind, pre_tokenizer = (self.field(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind == "gpt2" and pre_tokenizer in PRE_TOKENIZERS:
            return build_tokenizer(lambda name: self.field(f"tokenizer.{name}"))
        try:
            with _replace_gguf_reader(self):
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    str(self.path.parent), gguf_file=self.parts[0].name, local_files_only=True
                )
        except Exception as error:
            if kind != "gpt2":
                raise
            raise CapabilityError(
                f"the tokenizer ({kind}, {pre_tokenizer}) is not supported in GGUF files: give the model's "
                "Hugging Face folder."
            ) from error
        if kind == "gpt2":
            logger.warning("%s: its pre-tokenizer %s is unknown, so tokens may differ.", self.path, pre_tokenizer)
        return tokenizer

    def load_model(self, config: Any, requantize: bool, layer: int | None = None) -> PreTrainedModel:
        """Builds the model in float32, with quantized matrices mapped from the file.

        Args:
            requantize: as for :func:`.tensor_mapping.read_tensor`.
            layer: the only decoder layer whose weights are loaded; None: all weights are loaded.

        Raises:
            CheckpointError: a weight is missing or does not have the config's size, or (``layer`` is None) a tensor of
                the file is unused.
        """
        with stored_model.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        name_map, tensors = self.tensor_name_map(config), self.tensors
        if layer is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{layer}.")}
        experts = {name: tensor_mapping.read_tensor(t, requantize) for name, t in tensors.items() if "_exps." in name}
        errors = list(tensor_mapping.load_experts(model, experts))
        weights, used = {}, {ROPE_FREQS, *experts}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:  # else the parameter belongs to experts, which are loaded already
                names = tensor_mapping.tensor_names(name, name_map, tensors)
                if names and all(n in tensors for n in names):
                    used.update(names)
                    sources = [tensors[n] for n in names]
                    weights[name] = tensor_mapping.load_weight(self.arch, sources, config, parameter.shape, requantize)
        _set_weights(model, weights, self.path, errors, "" if layer is None else f".layers.{layer}.")
        for name, buffer in model.named_buffers():
            if (tensor_name := tensor_mapping.extra_tensor_name(name)) in tensors:
                used.add(tensor_name)
                buffer.copy_(torch.from_numpy(tensors[tensor_name].data).view_as(buffer))
        unused = sorted(name for name in tensors.keys() - used if not self._may_be_unused(name, config))
        if layer is None and unused:
            raise CheckpointError(
                f"{self.path} has {len(unused)} tensors that a model of its configuration does not use: "
                f"{', '.join(unused[:5])}. It is damaged, or its architecture is wrong: fetch it again."
            )
        if hasattr(mmap, "MADV_WILLNEED"):  # not on Windows
            self.mapped.madvise(mmap.MADV_WILLNEED)
        return stored_model.mark_as_stored(model, *self.parts)

    def _may_be_unused(self, name: str, config: Any) -> bool:
        """True for tensors of MTP layers, and of attention layers that share the KV of an earlier layer."""
        layer = LAYER_PATTERN.match(name)
        num_shared = int(getattr(config, "num_kv_shared_layers", None) or 0) if ".attn_" in name else 0
        return layer is not None and int(layer[1]) >= config.num_hidden_layers - num_shared

    def tensor_name_map(self, config: Any) -> Callable[[str], str | None]:
        """Returns a function that maps the transformers name of a module or parameter to the gguf name, or to None."""
        import gguf

        arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture), None)
        if arch is None:
            raise CheckpointError(
                f"{self.path} has the architecture {self.architecture}, which the installed package gguf does not "
                "know: pip install -U gguf"
            )
        name_map = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        return lambda name: name_map.get_name(name)


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Opens a GGUF file. Errors here and inside the context become CheckpointError: a damaged file, an unknown
    architecture, or no package gguf."""
    require_package("gguf", path)
    with checkpoint_errors(path, f"{path} cannot be read as a GGUF model", _REMEDY), quiet():
        yield GGUFFile(path)


@contextmanager
def _replace_gguf_reader(header: GGUFHeader) -> Iterator[None]:
    """Replaces gguf.GGUFReader by a stand-in with only the tokenizer's fields: from other fields, transformers would
    also build a config, and may misread them."""
    import gguf

    def field(value: Any) -> SimpleNamespace:
        items = value if isinstance(value, list) else [value]
        value_type = {str: 8, bool: 7, float: 6}.get(type(items[0]) if items else str, 5)  # GGUFValueType
        types = [9, value_type] if isinstance(value, list) else [value_type]  # 9: ARRAY
        parts = [item.encode() if isinstance(item, str) else [item] for item in items]
        return SimpleNamespace(parts=parts, data=range(len(parts)), types=types)

    fields = {name: field(x) for name, x in header.fields.items() if name.startswith(("general.", "tokenizer."))}
    reader, original = SimpleNamespace(fields=fields, tensors=list(header.tensors.values())), gguf.GGUFReader
    gguf.GGUFReader = lambda *_args, **_named: reader
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _set_weights(
    model: PreTrainedModel, weights: dict[str, tensor_mapping.LoadedWeight], file: Path, errors: list[str], part: str
) -> None:
    """Loads weights into a model on the meta device. Raises CheckpointError for ``errors`` and for wrong weights if
    they name parameters whose names contain ``part``."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_meta}
    errors += [f"{n} (not there)" for n in shapes if n not in weights]
    errors += [f"{n} ({tuple(t.shape)}, not {shapes[n]})" for n, t in weights.items() if shapes[n] != tuple(t.shape)]
    if errors := [error for error in errors if part in error]:
        raise CheckpointError(
            f"{file} does not fit its own configuration; missing or misshaped: {', '.join(errors[:5])}. It is "
            "incomplete, or its architecture is wrong: fetch it again."
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    stored_model.load_weights(model, weights)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied and isinstance(embedding, stored.StoredEmbedding):
        model.set_output_embeddings(stored.StoredLinear(embedding.matrix))
    elif tied:
        head.weight = embedding.weight


def load_gguf(
    path: Path,
    dtype: DType,
    rope_factor: float | None,
    weights: WeightFormat | None,
    progress: Progress,
    arithmetic: Arithmetic | None = None,
    keep_planes: bool = False,
) -> LoadedModel:
    """Loads a GGUF file on the CPU. :func:`longdraft.model.load.checkpoints.check_gguf` has checked ``path`` already.

    Args:
        dtype: a dtype other than float32 dequantizes the weights. "auto", which is for a GPU, is bfloat16.
        keep_planes: as for :func:`longdraft.model.quant.stored_model.dequantize_model`.
        rope_factor, weights, progress, arithmetic: as for :func:`longdraft.model.load.loading.load`.

    Raises:
        CheckpointError: the file is damaged or of an unknown architecture.
        CapabilityError: ``weights`` or ``arithmetic`` demand what is impossible here, or the RoPE scaling is unknown.
    """
    keeps_stored = dtype == torch.float32 and (weights == "stored" or (weights is None and kernels() is not None))
    with open_gguf(path) as file:
        config = file.config()
        if rope_factor is not None:
            stretch_rope(config.get_text_config(), rope_factor)
        config._name_or_path = str(path)
        foreign = {t.quant_type for t in file.tensors.values() if tensor_mapping.is_foreign(t)}
        if not keeps_stored:
            progress(f"{'Sorting the blocks of' if keep_planes else 'Unpacking'} {path.name}, as at every start")
        elif foreign:
            progress(f"Converting blocks of {', '.join(sorted(foreign))} in {path.name} to Q8_0, as at every start")
        if foreign or not keeps_stored:
            drop_prefaulted()  # the memory was for repacked weights
        loaded = LoadedModel(file.load_model(config, requantize=keeps_stored), file.load_tokenizer())
    if not keeps_stored:
        float_dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        unpacked = stored_model.dequantize_model(loaded.model, float_dtype, keep_planes)
        loaded = LoadedModel(unpacked, loaded.tokenizer)
    elif arithmetic != "float32" and kernels() is not None:
        stored_model.set_int8(loaded.model)
        stored_model.repack_weights(loaded.model, progress)
    if arithmetic == "int8" and stored_model.arithmetic_of(loaded.model) != "int8":
        dequantized = f"they are unpacked here ({unavailable_reason() or weights or dtype})"
        not_quantized = "none of its weights are stored in 8 bits or fewer"
        raise int8_unavailable_error(
            path, not_quantized if stored_model.has_stored_weights(loaded.model) else dequantized
        )
    with checkpoint_errors(path, f"{path} cannot be read as a GGUF model", _REMEDY):
        # Corrects what some versions of transformers set: BOS in place of EOS, and a clean-up that removes spaces.
        for role in ("bos_token", "eos_token", "pad_token"):
            token_id = getattr(loaded.model.config, f"{role}_id")
            if isinstance(token_id, int):
                setattr(loaded.tokenizer, role, loaded.tokenizer.convert_ids_to_tokens(token_id))
        loaded.tokenizer.clean_up_tokenization_spaces = False
        loaded.tokenizer.name_or_path = str(path)
        generation_config = loaded.model.generation_config
        ids = dict.fromkeys([*config_eos_ids(generation_config), *file.eos_ids, *sorted(eos_ids(loaded.tokenizer))])
        generation_config.eos_token_id = list(ids) or None
    return loaded


def int8_unavailable_error(name: object, reason: str) -> CapabilityError:
    """Makes the error for a user who demands int8 arithmetic where it is impossible."""
    return CapabilityError(f"{name} cannot be computed in int8 arithmetic: {reason}. Leave arithmetic out.")
