"""Reads draft models (language models that draft for a target), and fits their vocabulary to the target's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from longdraft.drafts.small_llama import frozen_linear
from longdraft.folders import is_gguf
from longdraft.model.gguf.header import require_package
from longdraft.model.gguf.loading import GGUFFile
from longdraft.model.load.checkpoints import check_folder, check_gguf, checkpoint_errors, quiet, read_checkpoint
from longdraft.model.load.embedded import EMBEDDED_ID, packaged_file
from longdraft.model.load.loading import load
from longdraft.model.model_parts import context_length, decoder_config
from longdraft.model.quant import stored
from longdraft.model.runner import TargetRunner

# Two vocabularies count as equal if at most this fraction of the ids that both have stands for different tokens:
# models of one family may rename special tokens.
MAX_RENAMED_FRACTION = 0.01


@dataclass(frozen=True)
class ModelSizes:
    """A causal language model's sizes. ``vocab_size`` counts the rows of the LM head, padding included."""

    vocab_size: int
    num_parameters: int
    context_length: int


def read_model_sizes(name: str) -> ModelSizes:
    """Reads a model's sizes from the configuration of a folder, GGUF file or hub id. Reads no weights.
    Raises CheckpointError if there is no such model or it is no causal language model, and CapabilityError if a GGUF
    file scales its rotary frequencies in an unknown way."""
    path = Path(name)
    if is_file := is_gguf(path):
        check_gguf(path)
        require_package("gguf", path)
    kind = "file" if is_file else "folder or hub id"
    failure = f"{name} is not the {kind} of a causal language model that transformers can read"
    with checkpoint_errors(name, failure), quiet():
        if is_file:
            config = GGUFFile(path).config()
        else:
            if path.is_dir():
                check_folder(path)
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=path.is_dir())
        with torch.device("meta"):  # allocates no weights
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return ModelSizes(
            stored.weight_shape(model.get_output_embeddings())[0],
            sum(p.numel() for p in model.parameters()),
            context_length(model),
        )


def origin_of(model: PreTrainedModel) -> Path | None:
    """Returns the folder or GGUF file that a model was loaded from; None if it is unknown or gone."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name:
        return None
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        file = cached_file(name, "config.json", local_files_only=True)
    except OSError:
        return None
    return None if file is None else Path(file).parent


def read_draft_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Reads a draft model from a folder, GGUF file or hub id, in eval mode and without gradients.
    A GGUF file's matrices stay quantised. Raises CheckpointError if the model cannot be read, or is incomplete."""
    if is_gguf(name):
        return load(name, dtype=dtype, device=device).model
    model = read_checkpoint(name, dtype, with_tokenizer=False).model
    return model.to(device).eval().requires_grad_(False)


def vocabulary_mismatch(name: str, runner: TargetRunner) -> str | None:
    """Describes how the vocabulary of the draft model ``name`` differs from the target's. Returns "" if the
    vocabularies are equal, None if one cannot be read. They are read from the models' files, without downloads."""
    target_name = str(getattr(runner.model, "name_or_path", "") or "")
    draft_vocab, target_vocab = _read_vocab(name), _read_vocab(target_name) if target_name else None
    if draft_vocab is None or target_vocab is None:
        return None
    shared_ids = draft_vocab.keys() & target_vocab.keys()
    renamed_ids = sorted(i for i in shared_ids if draft_vocab[i] != target_vocab[i])
    if shared_ids and len(renamed_ids) <= MAX_RENAMED_FRACTION * len(shared_ids):
        return ""
    message = f"its tokenizer numbers tokens differently from that of {target_name}"
    if renamed_ids:
        i = renamed_ids[0]
        example = f"{i} is {draft_vocab[i]!r} here and {target_vocab[i]!r} there"
        message += f": {len(renamed_ids):,} of {len(shared_ids):,} ids differ, for example {example}"
    return message


def _read_vocab(name: str) -> dict[int, str] | None:
    """Returns token id -> token for the model ``name``; None if its tokenizer cannot be read."""
    with quiet():
        try:
            file = packaged_file() if name == EMBEDDED_ID else Path(name)
            if file.is_file():
                return dict(enumerate(GGUFFile(file).vocab))
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=True)
            return {i: token for token, i in tokenizer.get_vocab().items()}
        except Exception:
            return None


def fit_vocab_size(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Fits a draft model to the target's vocabulary ``size``: the two models may pad one vocabulary differently.
    The head loses its rows beyond ``size``, as the target has no such tokens. The embedding gets rows of zeros for
    tokens that only the target has."""
    model, embedding = fit_head(model, size), model.get_input_embeddings()
    if (num_rows := stored.weight_shape(embedding)[0]) < size:
        if isinstance(embedding, stored.StoredEmbedding):  # a quant block of zero bytes encodes zeros
            embedding.data = _pad_rows(embedding.data, size - num_rows)
        else:
            embedding.weight = nn.Parameter(_pad_rows(embedding.weight.detach(), size - num_rows), requires_grad=False)
        embedding.num_embeddings = size
    return model


def fit_head(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Removes the head's rows beyond ``size``. The embedding does not change."""
    head = model.get_output_embeddings()
    if stored.weight_shape(head)[0] > size:
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias[:size]
        if isinstance(head, stored.StoredLinear):
            head.data, head.out_features = head.data[:size], size
            head.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        else:
            model.set_output_embeddings(frozen_linear(head.weight[:size], bias))
        decoder_config(model).vocab_size = size
    return model


def _pad_rows(rows: torch.Tensor, num_new: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(num_new, rows.shape[1])])
