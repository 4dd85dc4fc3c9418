"""A language model of transformers that drafts for another: what its configuration says, and its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from longdraft.errors import CheckpointError, reason_of
from longdraft.host import hosting, stored
from longdraft.host.checkpoints import quiet
from longdraft.host.embedded import EMBEDDED_ID, packaged_file
from longdraft.host.gguf_files import File
from longdraft.host.runner import TargetRunner
from longdraft.host.small_models import linear

# Of the ids that two tokenizers share: renamed special tokens do no harm.
MOST_RENAMED = 0.01


@dataclass(frozen=True)
class Described:
    """A causal language model as its configuration describes it.

    Attributes:
        vocab_size: rows of its head. parameters: numbers in its tensors.
        trained_length: tokens of its trained context.
    """

    vocab_size: int
    parameters: int
    trained_length: int


def describe(name: str) -> Described:
    """Reads the configuration, and no weights, of a folder or hub id.

    Raises:
        CheckpointError: there is none, or it is no causal language model's.
    """
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=Path(name).is_dir())
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return Described(
                stored.weight_shape(model.get_output_embeddings())[0],
                sum(p.numel() for p in model.parameters()),
                hosting.context_length(model),
            )
        except Exception as error:  # whatever a bad file sets off: no list of types would be complete
            raise CheckpointError(
                f"{name} is not the folder or hub id of a causal language model that transformers can read: "
                f"{reason_of(error)}."
            ) from error


def same_tokens(name: str, runner: TargetRunner) -> bool | None:
    """Whether a model's tokenizer numbers tokens as the target's does; None where one of the two cannot be found.

    The target's is looked for in the folder that it was loaded from. Nothing is downloaded.
    """
    origin = str(getattr(runner.model, "name_or_path", "") or "")
    found = [_tokens(name), _tokens(origin) if origin else None]
    if found[0] is None or found[1] is None:
        return None
    shared = found[0].keys() & found[1].keys()
    renamed = sum(found[0][i] != found[1][i] for i in shared)
    return bool(shared) and renamed <= MOST_RENAMED * len(shared)


def _tokens(name: str) -> dict[int, str] | None:
    """Token of each id."""
    with quiet():
        try:
            file = packaged_file() if name == EMBEDDED_ID else Path(name)
            if file.suffix == ".gguf":
                tokenizer = File(file).tokenizer()
            else:
                tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=True)
            return {i: token for token, i in tokenizer.get_vocab().items()}
        except Exception:  # no tokenizer there, or none that can be read
            return None


def fit_vocabulary(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Gives a model the target's vocabulary where the two are padded to different sizes.

    Rows beyond ``size`` are cut off the head, for nothing that the target does not know may be proposed; ids that the
    embedding lacks become zeros.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight.shape[0] > size:
        bias = getattr(head, "bias", None)
        model.set_output_embeddings(linear(head.weight[:size], None if bias is None else bias[:size]))
        hosting.decoder_config(model).vocab_size = size
    if (rows := embedding.weight.shape[0]) < size:
        weight = embedding.weight.detach()
        padded = torch.cat([weight, weight.new_zeros(size - rows, weight.shape[1])])
        embedding.weight = nn.Parameter(padded, requires_grad=False)
        embedding.num_embeddings = size
    return model
