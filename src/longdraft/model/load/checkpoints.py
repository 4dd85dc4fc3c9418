"""Reads checkpoints (folders and hub ids) with transformers, safely and silently.

A bad checkpoint raises a CheckpointError that names the file and the remedy. Missing weights raise it too: transformers
would initialise them at random. No code from a checkpoint runs, pickled or not. Progress bars and warnings are off.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from longdraft.errors import CheckpointError
from longdraft.files import (
    MAX_TEXT_BYTES,
    check_numbers,
    file_errors,
    open_safetensors,
    read_json,
    read_weight_index,
    require_regular,
)
from longdraft.model.load.eos_tokens import config_eos_ids, eos_ids
from longdraft.model.quant.external import is_externally_quantized
from longdraft.model.rope import stretch_rope

Progress = Callable[[str], None]  # called with one line of text before each step that takes seconds
DType: TypeAlias = str | torch.dtype  # of from_pretrained: "auto", or a dtype or its name
_REMEDY = "Fetch the folder again, or save it again with `save_pretrained`."
# Log levels and progress bars are process-wide, so only one thread at a time may change and restore them.
_QUIET_LOCK = threading.RLock()
_TOKENIZER_REMEDY = (
    "Is there no tokenizer.json (or tokenizer.model)? `tokenizer.save_pretrained(folder)` writes it beside the model. "
    "A model without one decodes token ids: Speculator(target=AutoModelForCausalLM.from_pretrained(folder))."
)
_CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")  # checked before transformers reads
_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model")  # files of at most MAX_TEXT_BYTES


class LoadedModel(NamedTuple):
    """A loaded model and its tokenizer: ``model, tokenizer = longdraft.load()``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        return f"LoadedModel(model={type(self.model).__name__}, tokenizer={type(self.tokenizer).__name__})"


def read_checkpoint(
    name: str,
    dtype: DType,
    rope_factor: float | None = None,
    *,
    with_tokenizer: bool = True,
    keep_dtype: bool = False,
    tensor_parallel: bool = False,
) -> LoadedModel:
    """Reads a model and its tokenizer to the CPU, silently. Refuses incomplete weights.

    Args:
        name: a folder or hub id.
        dtype: dtype of the weights; "auto" takes the checkpoint's.
        rope_factor: YaRN's factor (:func:`longdraft.model.rope.stretch_rope`); None leaves RoPE unchanged.
        with_tokenizer: False returns None as the tokenizer.
        keep_dtype: True keeps the checkpoint's dtype, unless another package (bitsandbytes, ...) computes its layers.
        tensor_parallel: True lets each process under torchrun read its own shards, to its own device."""
    tokenizer: Any = None
    folder = Path(name).expanduser()
    is_folder = folder.is_dir()
    # Some tokenizers would look up the folder's origin on the hub, and hang if it is unreachable.
    kwargs: dict[str, Any] = {"trust_remote_code": False} | ({"local_files_only": True} if is_folder else {})
    use_safetensors = check_folder(folder) if is_folder else None  # None: what there is
    if is_folder:
        name = str(folder)
        failure, remedy = f"The model in {name} cannot be read", _REMEDY
    else:
        failure = f"{name!r} is not a folder here, and reading it from the Hugging Face hub failed"
        remedy = (
            f"Check that https://huggingface.co/{name} exists and can be reached from this machine (a gated model "
            "needs `hf auth login`), or give a local folder."
        )
    with checkpoint_errors(name, failure, remedy), quiet():
        config = AutoConfig.from_pretrained(name, **kwargs)
        if keep_dtype and not is_externally_quantized(config):
            dtype = "auto"
        if rope_factor is not None:
            stretch_rope(config.get_text_config(), rope_factor)
        if with_tokenizer:
            with checkpoint_errors(name, f"The tokenizer in {name} cannot be read", _TOKENIZER_REMEDY):
                tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
                eos_ids(tokenizer)  # a damaged tokenizer may load and fail at its first use, so it is used here
                tokenizer.decode(tokenizer("a b").input_ids)
        # AutoModelForImageTextToText loads models that also read images.
        auto_model_classes: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
        auto_class = next((c for c in auto_model_classes if type(config) in c._model_mapping), auto_model_classes[0])
        model, loading_info = auto_class.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            use_safetensors=use_safetensors,
            weights_only=True,
            ignore_mismatched_sizes=True,  # transformers would raise without a remedy: this function raises below
            output_loading_info=True,
            **({"distributed_config": DistributedConfig(tp_plan="auto")} if tensor_parallel else {}),
            **kwargs,
        )
        config_eos_ids(model.generation_config)  # raises for ids that are no numbers
    # Tied weights do not count as missing.
    problems = [f"{key} (not there)" for key in sorted(loading_info["missing_keys"])]
    mismatches = sorted(loading_info["mismatched_keys"])  # (name, shape in the file, shape in the model)
    problems += [f"{key} ({tuple(shape)}, not {tuple(needed)})" for key, shape, needed in mismatches]
    if problems:
        listing = ", ".join(problems[:5]) + (f", and {len(problems) - 5} more" if len(problems) > 5 else "")
        advice = "It is incomplete or made for another architecture: fetch or save it again."
        raise CheckpointError(f"The checkpoint {name} does not fit its config; weights at fault: {listing}. {advice}")
    return LoadedModel(model, tokenizer)


@contextmanager
def checkpoint_errors(file: Path | str, failure: str, remedy: str = "") -> Iterator[None]:
    """Turns another library's error into a CheckpointError that names ``file`` (:func:`file_errors`)."""
    with file_errors(file, failure, remedy), torch.device("cpu"):  # the user's default device may be a GPU
        yield


def check_folder(folder: Path) -> bool:
    """Checks a folder's files without reading weights. Returns True for safetensors files, False for .bin files.
    Raises CheckpointError, which names the missing, truncated or invalid file."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder} holds an adapter, not a model: load its base model, put the adapter on it with "
                "peft.PeftModel.from_pretrained(model, folder), and give the result as the target."
            )
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"Give the file itself: {ggufs[0]}" if ggufs else "Give a folder that `save_pretrained` wrote."
        raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face model folder. {hint}")
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        require_regular(file, MAX_TEXT_BYTES if file.suffix in _TEXT_SUFFIXES else None)
    configs = {name: read_json(folder / name) for name in _CONFIG_FILES if (folder / name).is_file()}
    for name, values in configs.items():
        check_numbers(values, folder / name)
    config = configs["config.json"]
    if "longdraft_format" in config:
        raise CheckpointError(f"{folder} holds a draft, not a target model: give it as the draft (draft=).")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        shards = [folder / SAFE_WEIGHTS_NAME]
    elif index.is_file():
        shards = sorted(set(read_weight_index(index).values()))
    elif (folder / WEIGHTS_NAME).is_file():
        return False
    elif (index := folder / WEIGHTS_INDEX_NAME).is_file():
        read_weight_index(index)
        return False
    else:
        raise CheckpointError(f"{folder} has no weights: {SAFE_WEIGHTS_NAME} is missing. Fetch it again.")
    max_size = 0
    for shard in shards:
        # safetensors compares the header with the file's length when it opens the file, so truncation is noticed.
        with open_safetensors(shard, "It is truncated or corrupt: fetch that file again.") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
            max_size = max([max_size, *(size for shape in shapes for size in shape)])
    check_numbers(config, folder / "config.json", max_size)  # again, now that the largest dimension is known
    return True


def check_gguf(file: Path) -> None:
    """Raises CheckpointError if ``file`` cannot be opened or does not begin with GGUF's magic bytes."""
    remedy = "Check the path, and that you may read the file."
    with file_errors(file, f"{file} cannot be opened", remedy), require_regular(file).open("rb") as reader:
        magic = reader.read(4)
    if magic != b"GGUF":
        raise CheckpointError(
            f"{file} is not a GGUF file (it begins with {magic!r}). Give a .gguf file, or the model's folder."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences progress bars, log lines and warnings of transformers and the hub client inside the ``with``."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    with _QUIET_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        levels = [logger.level for logger in loggers]
        bars_enabled = transformers.utils.logging.is_progress_bar_enabled()
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            transformers.utils.logging.disable_progress_bar()
            yield
        finally:
            if bars_enabled:
                transformers.utils.logging.enable_progress_bar()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
