"""Reads GGUF files, whose weights our kernels use as they are stored.

The package gguf reads the file. The weights are mapped, not read, so a model of any size loads in about a second.
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
from longdraft.model import stored, stored_model
from longdraft.model.checkpoints import DType, LoadedModel, Progress, quiet, reading, stretch_rope
from longdraft.model.ends import ends_of, stated_ends
from longdraft.model.gguf import layout
from longdraft.model.gguf.architectures import SIZES, Arch, arch_of, config_of
from longdraft.model.gguf.header import FACTORS, LAYER, Header, needs
from longdraft.model.gguf.rope import scaling
from longdraft.model.gguf.tokenizer import RULES, tokenizer_of
from longdraft.native import kernels, missing
from longdraft.native.stored import FORMATS
from longdraft.pages import drop

logger = logging.getLogger(__name__)

# "stored" keeps matrices as they are stored, "float32" unpacks them.
Weights = Literal["stored", "float32"]
Arithmetic = Literal["int8", "float32"]
_REMEDY = (
    "It may be truncated, or of an architecture that transformers cannot read: fetch it again, or give the model's "
    "Hugging Face folder."
)


class File(Header):
    """A GGUF file as a model; ``arch`` is the row of its architecture.

    Raises:
        CheckpointError: there is no such row.
        CapabilityError: its layers have several sizes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        arch = arch_of(self)
        if arch is None:
            raise CheckpointError(
                f"{path} is a model of the kind {self.architecture}, which is not read from GGUF files: give "
                "the model's folder or id."
            )
        self.arch: Arch = arch
        for name in (f"{self.architecture}.{size}" for size in SIZES if not arch.by_layer):
            if isinstance(values := self.whole(name), list):
                if len(set(values)) > 1:
                    raise CapabilityError(
                        f"{path} has layers of several sizes ({name}): give the model's folder or id."
                    )
                self.fields[name] = values[0]  # for all layers: as if the file gave one
        self.check()

    def config(self) -> Any:
        """The configuration, with scaled rotary frequencies.

        Raises:
            CapabilityError: transformers does not know this scaling of rotary frequencies.
        """
        config = config_of(self, self.arch)
        if self.arch.factors_scale and (scaled := scaling(self, config)):
            # With parameters by kind of layer, windowed layers have their own base and are never scaled.
            full = config.rope_parameters.get("full_attention")
            changed = {**(config.rope_parameters if full is None else full), **scaled}
            config.rope_parameters = changed if full is None else {**config.rope_parameters, "full_attention": changed}
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        kind, rule = (self.whole(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind == "gpt2" and rule in RULES:
            return tokenizer_of(lambda name: self.whole(f"tokenizer.{name}"))
        try:
            with _given(self):
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    str(self.path.parent), gguf_file=self.parts[0].name, local_files_only=True
                )
        except Exception as error:
            if kind != "gpt2":
                raise
            raise CapabilityError(
                f"the tokenizer ({kind}, {rule}) is not read from a file of this architecture: give the model's "
                "Hugging Face folder."
            ) from error
        if kind == "gpt2":
            logger.warning("%s: how it splits texts (%s) is not known here, so tokens may differ.", self.path, rule)
        return tokenizer

    def model(self, config: Any, whole: bool = True) -> PreTrainedModel:
        """The model, in float32, with matrices as they are stored, mapped from the file.

        Args:
            whole: the model has a place for every tensor.

        Raises:
            CheckpointError: a weight is missing, or has another size than the configuration says.
        """
        with stored_model.without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        known, tensors = self.known(config), self.tensors
        mixtures = {name: layout.as_stored(t) for name, t in tensors.items() if "_exps." in name}
        wrong = list(layout.put_experts_in(model, mixtures))
        weights, used = {}, {FACTORS, *mixtures}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:  # otherwise an expert's, which is there already
                found = layout.tensor_names(name, known, tensors)
                if found and all(each in tensors for each in found):
                    used.update(found)
                    weights[name] = layout.weight(self.arch, [tensors[each] for each in found], config, parameter.shape)
        _put_in(model, weights, self.path, wrong)
        for name, buffer in model.named_buffers():
            if (at := layout.other_name(name)) in tensors:
                used.add(at)
                buffer.copy_(torch.from_numpy(tensors[at].data).view_as(buffer))
        unused = sorted(each for each in tensors.keys() - used if not self._spare(each, config))
        if whole and unused:
            raise CheckpointError(
                f"{self.path} has {len(unused)} tensors that a model of its configuration has no place for: "
                f"{', '.join(unused[:5])}. It is damaged, or of another architecture than it says: fetch it again."
            )
        if hasattr(mmap, "MADV_WILLNEED"):  # not on Windows
            self.memory.madvise(mmap.MADV_WILLNEED)
        return stored_model.mark(model, *self.parts)

    def _spare(self, name: str, config: Any) -> bool:
        """True for a tensor that a model may leave unused: of layers that predict further tokens, or share rows."""
        layer = LAYER.match(name)
        shared = int(getattr(config, "num_kv_shared_layers", None) or 0) if ".attn_" in name else 0
        return layer is not None and int(layer[1]) >= config.num_hidden_layers - shared

    def known(self, config: Any) -> Callable[[str], str | None]:
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


@contextmanager
def opened(path: Path) -> Iterator[File]:
    """A GGUF file, and the boundary of what is read from it.

    Raises:
        CheckpointError: it is damaged or of an unknown architecture, or the package gguf is not installed.
    """
    needs("gguf", path)
    with reading(path, f"{path} cannot be read as a GGUF model", _REMEDY), quiet():
        yield File(path)


@contextmanager
def _given(header: Header) -> Iterator[None]:
    """Gives transformers what was read of a tokenizer, where it would read the file anew: it makes a configuration
    first, and may misread the other fields."""
    import gguf

    def field(value: Any) -> SimpleNamespace:
        items = value if isinstance(value, list) else [value]
        kind = {str: 8, bool: 7, float: 6}.get(type(items[0]) if items else str, 5)
        parts = [item.encode() if isinstance(item, str) else [item] for item in items]
        types = [9, kind] if isinstance(value, list) else [kind]
        return SimpleNamespace(parts=parts, data=range(len(parts)), types=types)

    kept = {n: field(x) for n, x in header.fields.items() if n.startswith(("general.", "tokenizer."))}
    reader, theirs = SimpleNamespace(fields=kept, tensors=list(header.tensors.values())), gguf.GGUFReader
    gguf.GGUFReader = lambda *_args, **_named: reader
    try:
        yield
    finally:
        gguf.GGUFReader = theirs


def _put_in(model: PreTrainedModel, weights: dict[str, layout.Weight], file: Path, wrong: list[str]) -> None:
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
    stored_model.put_in(model, weights)
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
        dtype: any dtype but float32 has the weights unpacked.
        weights, arithmetic: see :func:`longdraft.model.loading.load`.

    Raises:
        CheckpointError: the file is damaged or of an unknown architecture.
        CapabilityError: the weights cannot stay as they are stored, or be computed in int8, as required; or the RoPE
            is of an unknown kind.
    """
    with opened(path) as file:
        kinds = {t.kind: name for name, t in file.tensors.items() if len(t.shape) in (2, 3)}
        odd = sorted(kind for kind in kinds if kind not in (*FORMATS, "F32"))
        why = f"blocks of the type {odd[0]} ({kinds[odd[0]]}) are not read as they are stored" if odd else None
        config = file.config()
        if weights == "stored" and why:
            raise CapabilityError(f'{path}: {why}: give weights="float32" (--weights float32), which unpacks them.')
        if rope_factor is not None:
            stretch_rope(config.get_text_config(), rope_factor)
        config._name_or_path = str(path)
        loaded = LoadedModel(file.model(config), file.tokenizer())
    if why or dtype != torch.float32 or weights == "float32" or (weights is None and kernels() is None):
        drop()  # what was begun for stored weights would be missed here
        say(f"Unpacking {path.name}, as at every start" + (f": {why}" if why else ""))
        unpacked = dtype if isinstance(dtype, torch.dtype) else torch.float32
        loaded = LoadedModel(stored_model.in_floats(loaded.model, unpacked), loaded.tokenizer)
    elif arithmetic != "float32" and kernels() is not None:
        stored_model.use_int8(loaded.model)
        stored_model.weave(loaded.model, say)
    if arithmetic == "int8" and stored_model.arithmetic_of(loaded.model) != "int8":
        unpacked_why = f"they are unpacked here ({missing() or weights or dtype})"
        none = "none of its weights are stored in 8 bits or fewer"
        raise no_int8(path, why or (none if stored_model.is_stored(loaded.model) else unpacked_why))
    with reading(path, f"{path} cannot be read as a GGUF model", _REMEDY):
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
