"""Reads GGUF files, whose weights our kernels use as they are stored.

The package gguf reads the file. transformers makes the configuration and the tokenizer from it, or for architectures
that not every version of it knows, gguf_configs.py and gguf_tokenizer.py. The weights are mapped, not read, so a model
of any size loads in about a second.
"""

from __future__ import annotations

import copy
import logging
import mmap
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.files import check_numbers
from longdraft.model import gguf_cache, gguf_configs, gguf_experts, gguf_layout, stored
from longdraft.model.checkpoints import DType, LoadedModel, Progress, quiet, read_checkpoint, reading, stretch_rope
from longdraft.model.ends import ends_of, stated_ends
from longdraft.model.gguf_cache import Metadata
from longdraft.model.gguf_reader import instead, needs, parts_of, reader_of
from longdraft.model.gguf_rope import RopeError, scaling
from longdraft.model.gguf_tokenizer import RULES, tokenizer_of
from longdraft.model.stored_parts import Arranged, ArrangedLinear
from longdraft.native import Stored, kernels, missing
from longdraft.native.stored import FORMATS

if TYPE_CHECKING:
    from gguf import ReaderTensor

logger = logging.getLogger(__name__)

# Names in GGUF files: of those that transformers makes a configuration of, and of all.
_THEIRS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", *gguf_experts.ARCHITECTURES)
ARCHITECTURES = (*_THEIRS, *gguf_configs.KINDS)
# Layers of the largest models, whose scores are scaled by the hidden size; the files do not say so.
_LARGEST = {"gemma2": 46, "gemma3": 62}
# "stored" keeps matrices as they are stored, "float32" unpacks them.
Weights = Literal["stored", "float32"]
Arithmetic = Literal["int8", "float32"]
_REMEDY = (
    "It may be truncated, or of an architecture that transformers cannot read: fetch it again, or give the model's "
    "Hugging Face folder."
)
_FACTORS = "rope_freqs.weight"
_OF_LAYER = re.compile(r"blk\.(\d+)\.")
# Factors for short and for long texts (LongRoPE), which transformers does not look for.
_BY_LENGTH = "rope_factors_"
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What a file may hold in place of a model, by its general.type.
_OTHERS = {"adapter": "a LoRA adapter", "mmproj": "what reads images for one", "imatrix": "statistics of one"}
# Long fields that only a tokenizer needs.
_WORDS = ("tokens", "token_type", "scores", "merges")


class File:
    """An open GGUF file of an ``architecture``, named as in the file.

    Raises:
        ValueError, KeyError, OSError, struct.error: the file is damaged or cut short.
        CheckpointError, CapabilityError: it holds no model, a part is missing, or its layers have several sizes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = reader_of(path)
        self.parts = parts_of(path, int(self._value("split.count") or 1))
        if (kind := self._value("general.type")) not in (None, "model"):
            raise CheckpointError(
                f"{path} holds no model but {_OTHERS.get(kind, repr(kind))}: give the model's own file, into which an "
                "adapter can be merged with llama-export-lora."
            )
        if (architecture := self._value("general.architecture")) is None:
            raise ValueError("it names no architecture")
        self.architecture = str(architecture)
        self._tensors: list[ReaderTensor] = self._reader.tensors
        sizes = () if self.architecture in gguf_configs.BY_LAYER else gguf_configs.SIZES
        for name in (f"{self.architecture}.{size}" for size in sizes):
            field = self._reader.get_field(name)
            if field is None or not isinstance(values := field.contents(), list):
                continue
            if len(set(values)) > 1:
                raise CapabilityError(f"{path} has layers of several sizes ({name}): give the model's folder or id.")
            same = field.parts[field.data[0]]  # for all layers: as if the file gave one
            self._reader.fields[name] = field._replace(parts=[same], data=[0], types=field.types[-1:])
        self._check()

    def _check(self) -> None:
        """Checks the file's numbers against its tensors, before anything is built of them."""
        fields = {name: self._value(name) for name in self._reader.fields if name.startswith(f"{self.architecture}.")}
        check_numbers(fields, self.path, max(int(t.shape.max()) for t in self._tensors))
        layers = {found[1] for t in self._tensors if (found := _OF_LAYER.match(t.name))}
        if layers and layers != {str(i) for i in range(int(fields[f"{self.architecture}.block_count"]))}:
            raise CheckpointError(
                f"{self.path} has tensors of {len(layers)} layers, which are not those that it counts "
                f"(block_count {fields[f'{self.architecture}.block_count']}): fetch it again."
            )
        rows = next(
            (int(t.shape[1]) for t in self._tensors if t.name == "token_embd.weight" and len(t.shape) > 1), None
        )
        words = self._reader.get_field("tokenizer.ggml.tokens")
        if rows is not None and words is not None and len(words.data) > rows:
            raise CheckpointError(
                f"{self.path} has {len(words.data)} tokens, and embeddings of {rows}: fetch it again."
            )

    def _value(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    @property
    def _factors(self) -> np.ndarray[Any, Any] | None:
        """The numbers that divide the rotary frequencies, if the file has any."""
        return next((t.data for t in self._tensors if t.name == _FACTORS), None)

    @property
    def file_type(self) -> int | None:
        """The type of most weights, as a number of gguf's ``LlamaFileType``; None if the file does not say."""
        number = self._value("general.file_type")
        return None if number is None else int(number)

    def config(self) -> Any:
        """The configuration, as transformers reads it, with scaled rotary frequencies.

        Raises:
            CapabilityError: transformers does not know this scaling of rotary frequencies.
        """
        config = self._by_transformers() if self.kind is None else gguf_configs.config_of(self._header, self.kind)
        known = self.architecture in ARCHITECTURES
        if self.kind is None and known:
            # Some versions of transformers ignore this field, and some take the rotated dimensions for a head's.
            size = self._value(f"{self.architecture}.attention.key_length")
            config.head_dim = config.hidden_size // config.num_attention_heads if size is None else int(size)
            if self._value(f"{self.architecture}.attention.sliding_window") is None:
                config.sliding_window = None  # transformers sets one for every Mistral
        if self.architecture in gguf_experts.ARCHITECTURES:
            gguf_experts.complete(config, self.architecture, lambda name: self._value(f"{self.architecture}.{name}"))
        if self.architecture in _LARGEST:
            largest = config.num_hidden_layers == _LARGEST[self.architecture]
            config.query_pre_attn_scalar = (
                config.hidden_size // config.num_attention_heads if largest else config.head_dim
            )
        if self.architecture == "gemma4":
            return config  # its rope_freqs only say which frequencies are not used
        if scaled := self._rope(config if known else None):
            # With parameters by kind of layer, windowed layers have their own base and are never scaled.
            full = config.rope_parameters.get("full_attention")
            own = config.rope_parameters if full is None else full
            changed = {**own, **scaled}
            config.rope_parameters = changed if full is None else {**config.rope_parameters, "full_attention": changed}
        return config

    @cached_property
    def kind(self) -> gguf_configs.Kind | None:
        """The kind of model whose configuration longdraft makes; None if transformers makes it."""
        return gguf_configs.kind_of(self._header)

    @cached_property
    def _header(self) -> gguf_configs.Header:
        names, tokens = {t.name for t in self._tensors}, self._reader.fields.get("tokenizer.ggml.tokens")
        rotated = 1.0 if self._factors is None else float(np.mean(self._factors < 1e9))
        count = 0 if tokens is None else len(tokens.data)
        return gguf_configs.Header(self.architecture, self._value, names, count, rotated)

    def _by_transformers(self) -> Any:
        """The configuration as transformers makes it."""
        reader = copy.copy(self._reader)
        if f"{self.architecture}.vocab_size" in reader.fields:  # otherwise transformers counts the tokens
            hidden = {f"tokenizer.ggml.{name}" for name in _WORDS}
            reader.fields = type(reader.fields)((n, f) for n, f in reader.fields.items() if n not in hidden)
        reader.fields = type(reader.fields)(
            (n, f) for n, f in reader.fields.items() if not n.startswith(gguf_experts.MISREAD)
        )
        with instead(reader):
            return AutoConfig.from_pretrained(self.path.parent, gguf_file=self.parts[0].name, local_files_only=True)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._value("tokenizer.ggml.model") == "gpt2":
            if (rule := self._value("tokenizer.ggml.pre")) in RULES or self.architecture in gguf_configs.KINDS:
                return tokenizer_of(lambda name: self._value(f"tokenizer.{name}"), self._strings)
            logger.warning("%s: how it splits texts (%s) is not known here, so tokens may differ.", self.path, rule)
        reader = self._reader
        if self.kind is not None:  # transformers, which makes a configuration first, may misread the other fields
            reader = copy.copy(reader)
            kept = ((n, f) for n, f in reader.fields.items() if n.startswith(("GGUF.", "general.", "tokenizer.")))
            reader.fields = type(reader.fields)(kept)
        with instead(reader):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(self.path.parent), gguf_file=self.parts[0].name, local_files_only=True
            )
        return tokenizer

    def metadata(self, say: Progress) -> Metadata:
        """Configuration and tokenizer, from the cache, or made and put into it."""
        factors = [] if self._factors is None else [self._factors.tobytes()]
        folder = gguf_cache.folder_of(*self._reader.headers, *factors)
        metadata = gguf_cache.read(folder)
        if metadata is None:
            say(f"Reading the vocabulary of {self.path.name}, once")
            metadata = Metadata(self.config(), self.tokenizer())
            gguf_cache.keep(folder, metadata)
        return metadata

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of its ids."""
        return self._strings("ggml.tokens")

    @property
    def ends(self) -> list[int]:
        """The tokens that the file says to end a text, a turn, a message or a part of code."""
        ids = [self._value(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        return [int(i) for i in ids if i is not None and 0 <= i < self._header.tokens]

    def _strings(self, name: str) -> list[str]:
        return list(self._reader.fields[f"tokenizer.{name}"].contents())

    def _rope(self, config: Any) -> dict[str, Any]:
        """Additions to the configuration's ``rope_parameters``, for scaled frequencies."""
        factors = None if self._factors is None else torch.from_numpy(self._factors)
        try:
            if any(t.name.startswith(_BY_LENGTH) for t in self._tensors):
                raise RopeError("longrope")
            return scaling(lambda name: self._value(f"{self.architecture}.rope.{name}"), factors, config)
        except RopeError as error:
            raise CapabilityError(
                f"{self.path} scales its rotary frequencies ({error}), which is not read from GGUF files: give the "
                "model's Hugging Face folder or id."
            ) from error

    def unserved(self) -> str | None:
        """The reason why the weights cannot stay as they are stored; None if they can."""
        if self.architecture not in ARCHITECTURES:
            return f"models of the kind {self.architecture} are not read as they are stored"
        kinds = {t.tensor_type.name: t.name for t in self._tensors if len(t.shape) in (2, 3)}
        odd = sorted(kind for kind in kinds if kind not in (*FORMATS, "F32"))
        return f"blocks of the type {odd[0]} ({kinds[odd[0]]}) are not read as they are stored" if odd else None

    def model(self, config: Any) -> PreTrainedModel:
        """The model, in float32, with matrices as they are stored, mapped from the file.

        Raises:
            CheckpointError: a weight is missing, or has another size than the configuration says.
        """
        with stored.without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        mixtures = {t.name: gguf_layout.as_stored(t) for t in self._tensors if "_exps." in t.name}
        wrong = [
            each
            for path, module in list(gguf_experts.mixtures(model))
            for each in gguf_experts.put_in(model, path, module, mixtures)
        ]
        known, tensors = self._known(config), {t.name: t for t in self._tensors}
        weights, used = {}, {_FACTORS, *mixtures}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:  # otherwise an expert's, which is there already
                found = gguf_layout.tensor_names(name, known, tensors)
                if found and all(each in tensors for each in found):
                    parts = [tensors[each] for each in found]
                    used.update(found)
                    weights[name] = gguf_layout.weight(self.architecture, parts, config, parameter.shape)
        _put_in(model, weights, self.path, wrong)
        for name, buffer in model.named_buffers():
            if (at := gguf_layout.buffer_name(name)) in tensors:
                used.add(at)
                buffer.copy_(torch.from_numpy(tensors[at].data).view_as(buffer))
        if unused := sorted(each for each in tensors.keys() - used if not self._spare(each, config)):
            raise CheckpointError(
                f"{self.path} has {len(unused)} tensors that a model of its configuration has no place for: "
                f"{', '.join(unused[:5])}. It is damaged, or of another architecture than it says: fetch it again."
            )
        if hasattr(mmap, "MADV_WILLNEED"):  # not on Windows
            self._reader.data._mmap.madvise(mmap.MADV_WILLNEED)
        return stored.mark(model, *self.parts)

    def _spare(self, name: str, config: Any) -> bool:
        """True for a tensor that a model may leave unused: of layers that predict further tokens, or share rows."""
        layer = _OF_LAYER.match(name)
        shared = int(getattr(config, "num_kv_shared_layers", None) or 0) if ".attn_" in name else 0
        return layer is not None and int(layer[1]) >= config.num_hidden_layers - shared

    def _known(self, config: Any) -> Callable[[str], str | None]:
        """Gives gguf's name of a module or parameter of transformers, or None."""
        import gguf

        kind = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture), None)
        if kind is None:
            raise CheckpointError(
                f"{self.path} is a model of the kind {self.architecture}, which the installed package gguf does not "
                "know: pip install -U gguf"
            )
        known = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        return lambda name: known.get_name(name)


def _put_in(model: PreTrainedModel, weights: dict[str, gguf_layout.Weight], file: Path, wrong: list[str]) -> None:
    """Gives the modules of a model without memory their weights, and raises an error if some are ``wrong``."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_meta}
    wrong += [f"{n} (not there)" for n in wanted if n not in weights]
    wrong += [f"{n} ({tuple(t.shape)}, not {wanted[n]})" for n, t in weights.items() if wanted[n] != tuple(t.shape)]
    if wrong:
        raise CheckpointError(
            f"{file} does not fit its own configuration; weights at fault: {', '.join(wrong[:5])}. It is incomplete or "
            "of another architecture than it says: fetch it again."
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    modules: dict[str, dict[str, Any]] = {}
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        modules.setdefault(path, {})[leaf] = tensor
    for path, leaves in modules.items():
        module, weight = model.get_submodule(path), leaves.get("weight")
        parent, _, own = path.rpartition(".")
        if isinstance(weight, Arranged):
            setattr(model.get_submodule(parent), own, ArrangedLinear(weight))
            continue
        if isinstance(weight, Stored) and not isinstance(module, nn.Linear | nn.Embedding):
            leaves["weight"] = weight = stored.unpacked(weight)  # a router's
        if isinstance(weight, Stored):
            embeds = isinstance(module, nn.Embedding)
            made = (
                stored.StoredEmbedding(weight, getattr(module, "scalar_embed_scale", 1.0))
                if embeds
                else stored.StoredLinear(weight, leaves.get("bias"))
            )
            setattr(model.get_submodule(parent), own, made)
        else:
            for leaf, floats in leaves.items():
                setattr(module, leaf, nn.Parameter(floats, requires_grad=False))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied and isinstance(embedding, stored.StoredEmbedding):
        model.set_output_embeddings(stored.StoredLinear(embedding.matrix))
    elif tied:
        head.weight = embedding.weight


def read_gguf(
    path: Path,
    dtype: DType,
    rope_factor: float | None,
    weights: Weights | None,
    say: Progress,
    arithmetic: Arithmetic | None = None,
) -> LoadedModel:
    """Reads a GGUF file, after :func:`check_gguf`, on the CPU.

    Args:
        dtype: any dtype but float32 has transformers unpack the weights.
        weights, arithmetic: see :func:`longdraft.model.loading.load`.

    Raises:
        CheckpointError: the file is damaged or of an unknown architecture.
        CapabilityError: the weights cannot stay as they are stored, or be computed in int8, as required; or the RoPE
            is of an unknown kind.
    """
    needs("gguf", path)
    failure = f"{path} cannot be read as a GGUF model"
    with reading(path, failure, _REMEDY), quiet():
        file = File(path)
        why = file.unserved()
        known, split = file.architecture in ARCHITECTURES, len(file.parts) > 1
        if split and not known:
            raise CapabilityError(f"{path}: {why}, so join its parts with llama-gguf-split --merge and give that file.")
        unpacked = file.kind is None and (not known or (dtype != torch.float32 and not split))
        metadata = None if unpacked else file.metadata(say)
        config = file.config() if metadata is None else metadata.config
        if weights == "stored" and why:
            raise CapabilityError(f'{path}: {why}: give weights="float32" (--weights float32), which unpacks them.')
        if rope_factor is not None:
            stretch_rope(config.get_text_config(), rope_factor)
        config._name_or_path = str(path)
        vars(config).pop("_model_name_or_path", None)  # its name before it was a file
        loaded = None if metadata is None else LoadedModel(file.model(config), metadata.tokenizer)
    unpacking = f"Unpacking {path.name}, as at every start" + (f": {why}" if why else "")
    if loaded is None:
        needs("accelerate", path)
        say(unpacking)
        folder, name = str(path.parent), path.name
        with instead(file._reader):
            model = read_checkpoint(
                *(folder, dtype, None), config=config, failure=failure, remedy=_REMEDY, with_tokenizer=False,
                gguf_file=name, local_files_only=True,
            ).model  # fmt: skip
        with reading(path, failure, _REMEDY), quiet():
            loaded = LoadedModel(model, file.tokenizer())
        # transformers names the folder here; a draft for this model finds its tokenizer by the name.
        loaded.model.config._name_or_path = loaded.model.name_or_path = str(path)
    elif why or dtype != torch.float32 or weights == "float32" or (weights is None and kernels() is None):
        say(unpacking)
        model = stored.in_float32(loaded.model)
        loaded = LoadedModel(model.to(dtype) if isinstance(dtype, torch.dtype) else model, loaded.tokenizer)
    elif arithmetic != "float32" and kernels() is not None:
        stored.use_int8(loaded.model)
    if arithmetic == "int8" and stored.arithmetic_of(loaded.model) != "int8":
        raise no_int8(path, why or _why_no_int8(dtype, weights))
    with reading(path, failure, _REMEDY):
        # Some versions of transformers give the tokenizer BOS for EOS, and let it remove the space before a comma.
        for role in ("bos_token", "eos_token", "pad_token"):
            token_id = getattr(loaded.model.config, f"{role}_id")
            if isinstance(token_id, int):
                setattr(loaded.tokenizer, role, loaded.tokenizer.convert_ids_to_tokens(token_id))
        loaded.tokenizer.clean_up_tokenization_spaces = False
        loaded.tokenizer.name_or_path = str(path)
        settings = loaded.model.generation_config
        ends = dict.fromkeys([*stated_ends(settings), *file.ends, *sorted(ends_of(loaded.tokenizer))])
        settings.eos_token_id = list(ends) or None
    return loaded


def no_int8(name: object, why: str) -> CapabilityError:
    """The error to raise if int8 arithmetic is required and not possible."""
    return CapabilityError(f"{name} cannot be computed in int8 arithmetic: {why}. Leave arithmetic out.")


def _why_no_int8(dtype: DType, weights: Weights | None) -> str:
    if weights == "float32":
        return "its weights were to be unpacked (weights)"
    if dtype != torch.float32:
        return f"it is for float32 on a CPU, not for {dtype}"
    if kernels() is None:
        return f"there are no kernels for it here ({missing()})"
    return "none of its weights are stored in 8 bits or fewer"
