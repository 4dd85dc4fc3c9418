"""Readers of untrusted files: checks of type, size and numbers, and errors that name the file."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from longdraft.errors import CheckpointError, LongdraftError, MemoryBudgetError, lacks_memory, reason_of

P = ParamSpec("P")
R = TypeVar("R")

# The most bytes read of a configuration, and of other text files, such as a tokenizer's vocabulary.
MAX_CONFIG_BYTES, MAX_TEXT_BYTES = 10 << 20, 200 << 20
# Sizes up to this one are accepted even if no tensor is that large. It is also the most items of a list.
_MAX_SIZE = _MAX_ITEMS = 1 << 16
# (Pattern of a number's name in a configuration, smallest value, largest value). The first match counts. None: as
# large as the largest dimension of a tensor.
_RANGES: tuple[tuple[str, float, float | None], ...] = (
    (r"((num_)?(hidden|decoder|encoder)_|n_|num_)layers|n_layer|(num_)?blocks|block_count", 0, 1024),
    (r"block_size|slots|fc_norm|(num_)?speculative_tokens", 0, 1024),
    (r".*(heads|head_count|head_count_kv|experts|expert_count|expert_used_count)|n_head", 0, 4096),
    (r".*(_size|_dim|rank|vocabulary|taps|group|top_k|feed_forward_length|embedding_length|(key|value)_length)", -1,
     None),
    (r".*(inner_size|state_size|conv_kernel|dimension_count|group_count|time_step_rank|l_cache)", 0, 1 << 24),
    (r".*(_eps|_epsilon)", 0, 1),
    (r".*(theta|freq_base|freq_base_swa)", 1e-6, 1e15),
    (r".*(factor|logit_scale|scaling|softcap|softcapping)", 0, 1e6),
    (r"time_step_limit", -math.inf, math.inf),
    (r"model_max_length", -1e300, 1e300),
    (r"max_position_embeddings|context_length|n_positions|n_ctx", 0, 1 << 31),
    (r".*(window|_length)", -1, 1 << 31),
    (r".*", -1e300, 1e300),
)  # fmt: skip


def require_regular(path: Path, max_bytes: int | None = None) -> Path:
    """Returns the path if it is a regular file, a folder or missing.

    Raises:
        CheckpointError: it is a device, a pipe or a socket, or a file of more than ``max_bytes``.
    """
    try:
        status = path.stat()
    except OSError:
        return path  # opening it raises the error
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CheckpointError(f"{path} is a device, a pipe or a socket: give a file.")
    if max_bytes is not None and status.st_size > max_bytes and stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} has {status.st_size:,} bytes, at most {max_bytes:,} are read: fetch it again.")
    return path


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        CheckpointError: the file holds no JSON object in UTF-8, is not regular, or has more than ``max_bytes``.
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "There is no such file", str(path))
    with file_errors(path, f"{path} is not a valid JSON file", "Fetch it again."):
        value = json.loads(require_regular(path, max_bytes).read_bytes().decode("utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        return value


def read_weight_index(path: Path) -> dict[str, Path]:
    """Reads a weight index: name of a tensor -> its file, in the index's folder.

    Raises:
        CheckpointError: the file is no weight index, or names files outside its folder.
    """
    with file_errors(path, f"{path} is not a weight index", "Fetch it again."):
        files = {name: path.parent / file for name, file in read_json(path, MAX_TEXT_BYTES)["weight_map"].items()}
        if outside := [file for file in files.values() if ".." in file.parts or not file.is_relative_to(path.parent)]:
            raise ValueError(f"it names {outside[0]}, which is not in its folder")
        return files


def check_numbers(values: Any, file: Path | str, max_size: int = 1 << 24) -> None:
    """Checks the numbers of a configuration, also in lists and mappings, before anything is built from them.

    Args:
        max_size: the largest dimension of a tensor of the same model.

    Raises:
        CheckpointError: a number is outside its range or not finite, or a list is too long.
    """
    todo: list[tuple[str, Any]] = [("", values)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            if len(value) > _MAX_ITEMS:
                raise CheckpointError(f"{file} has {name[:99]} with {len(value):,} items, of at most {_MAX_ITEMS:,}.")
            todo += [(name, item) for item in value]
        elif isinstance(value, int | float):
            low, high = _range(name.rpartition(".")[2])
            high = max(max_size, _MAX_SIZE) if high is None else high
            if not low <= value <= high:
                printed = f"{value:g}" if isinstance(value, float) else str(value)[:40]
                raise CheckpointError(
                    f"{file} has {name[:99]} {printed}, which is not from {low:g} to {high:g}: correct it."
                )


@functools.lru_cache(1024)
def _range(name: str) -> tuple[float, float | None]:
    return next((low, high) for pattern, low, high in _RANGES if re.fullmatch(pattern, name, re.DOTALL))


@contextmanager
def prefix_errors_with(file: Path | str) -> Iterator[None]:
    """Context that puts the file's name in front of the messages of longdraft's errors, unless they contain it."""
    try:
        yield
    except LongdraftError as error:
        if Path(file).name in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error


@contextmanager
def file_errors(
    file: Path | str, failure: str, remedy: str = "", kind: type[LongdraftError] = CheckpointError
) -> Iterator[None]:
    """Context of a reader, which turns any error that a bad file causes into an error of longdraft.

    Args:
        file: the file that is read; every error names it.
        failure: beginning of the message, before the reason.
        remedy: end of the message: what to do.
        kind: class of the errors.
    """
    try:
        with prefix_errors_with(file):
            yield
    except LongdraftError:
        raise
    except BaseException as error:  # safetensors and tokenizers are in Rust, whose panics are no Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
            raise
        if lacks_memory(error):
            raise MemoryBudgetError(f"{failure}: there is not enough memory.") from error
        raise kind(f"{failure}: {reason_of(error)}. {remedy}".rstrip()) from error


def reports_file_errors(subject: str, remedy: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a reader that adds :func:`file_errors`, for the file or folder in its first str or path argument."""

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            file = next(str(x) for x in (*args, *kwargs.values()) if isinstance(x, str | os.PathLike))
            with file_errors(file, f"{subject} {file} cannot be read", remedy):
                return read(*args, **kwargs)

        return wrapped

    return decorate


@contextmanager
def open_safetensors(path: Path, remedy: str) -> Iterator[Any]:
    """Opens a safetensors file. :func:`file_errors` applies to all that is read from it inside the context."""
    from safetensors import safe_open

    with file_errors(path, f"{path} cannot be read", remedy), safe_open(require_regular(path), framework="pt") as file:
        yield file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and then moves that file to ``path``. So ``path`` is never incomplete.

    Raises:
        CheckpointError: the file cannot be written. An earlier file at ``path`` stays.
    """
    from safetensors import SafetensorError

    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # several processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except CheckpointError:  # already names its file
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}. An earlier file stays as it is.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
