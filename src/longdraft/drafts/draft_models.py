"""Reads draft models (language models that draft for a target), and fits their vocabulary to the target's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from longdraft.drafts.small_llama import frozen_linear
from longdraft.drafts.token_map import TokenMap, match_tokens
from longdraft.errors import CheckpointError
from longdraft.folders import is_gguf
from longdraft.model.gguf.header import require_package
from longdraft.model.gguf.loading import GGUFFile
from longdraft.model.load.checkpoints import check_folder, check_gguf, checkpoint_errors, quiet, read_checkpoint
from longdraft.model.load.embedded import EMBEDDED_ID, packaged_file
from longdraft.model.load.loading import load
from longdraft.model.model_parts import context_length, decoder_config
from longdraft.model.quant import stored, stored_model
from longdraft.model.quant.planes import PlanesLinear
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


def token_map(name: str, runner: TargetRunner, draft_size: int, num_proposed: int | None) -> TokenMap | None:
    """Returns how the draft model ``name`` drafts with another vocabulary than the target's; None if token ids mean the
    same for both. Tokenizers are read from the models' files; if one is unknown, heads of one size count as equal.

    Args:
        draft_size: number of rows of the draft's head.
        num_proposed: only draft ids below it are proposed; None: all.

    Raises:
        CheckpointError: the vocabularies differ, and a tokenizer is unknown or no token is the same.
    """
    target_name = str(getattr(runner.model, "name_or_path", "") or "")
    draft_vocab, target_vocab = _read_vocab(name, download=True), _read_vocab(target_name) if target_name else None
    if draft_vocab is None or target_vocab is None:
        if draft_size == runner.vocab_size:
            return None
        unknown = name if draft_vocab is None else target_name or "the target"
        raise CheckpointError(
            f"{name} has {draft_size} tokens, the target {runner.vocab_size}, and the tokenizer of {unknown} cannot be "
            "read here, which would say what they are. Name folders or files with tokenizers, or a model with the "
            "target's vocabulary, or train a draft: longdraft train lm."
        )
    shared_ids = draft_vocab.keys() & target_vocab.keys()
    num_renamed = sum(draft_vocab[i] != target_vocab[i] for i in shared_ids)
    if shared_ids and num_renamed <= MAX_RENAMED_FRACTION * len(shared_ids):
        return None
    draft_vocab = {i: token for i, token in draft_vocab.items() if i < draft_size}
    matched = match_tokens(draft_vocab, target_vocab, num_proposed or draft_size, runner.vocab_size)
    if not len(matched.draft_ids):
        raise CheckpointError(
            f"{name} has no token of {target_name} to propose: name a model whose tokenizer has the same texts, or "
            "train a draft: longdraft train lm."
        )
    return matched


def _read_vocab(name: str, download: bool = False) -> dict[int, str] | None:
    """Returns token id -> token for the model ``name``; None if its tokenizer cannot be read."""
    with quiet():
        try:
            file = packaged_file() if name == EMBEDDED_ID else Path(name)
            if file.is_file():
                return dict(enumerate(GGUFFile(file).vocab)) or None
            is_local = file.is_dir() or not download
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=is_local)
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


def fit_head(model: PreTrainedModel, rows: int | torch.Tensor) -> PreTrainedModel:
    """Keeps the head's first ``rows`` rows, or those of the ids ``rows`` (n,). The embedding does not change."""
    head = model.get_output_embeddings()
    if not isinstance(rows, int) or stored.weight_shape(head)[0] > rows:
        index, size = (slice(rows), rows) if isinstance(rows, int) else (rows.to(model.device), len(rows))
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias[index]
        if isinstance(head, PlanesLinear):
            model.set_output_embeddings(PlanesLinear(head.planes.select_rows(index), bias))
        elif not isinstance(head, stored.StoredLinear):
            model.set_output_embeddings(frozen_linear(head.weight[index], bias))
        elif isinstance(rows, int):  # a repacked copy has the same first rows
            head.data, head.out_features = head.data[index], size
            head.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        else:
            selected = stored.StoredLinear(head.matrix.select_rows(rows), bias)
            stored_model.repack_weights(selected, lambda message: None)
            model.set_output_embeddings(selected)
        decoder_config(model).vocab_size = size
    return model


def _pad_rows(rows: torch.Tensor, num_new: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(num_new, rows.shape[1])])
