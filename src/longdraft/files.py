"""Reads untrusted files: checks their type, size and numbers, and puts the file's name into every error."""

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

# The most bytes that are read of a configuration, and of another text file, such as a tokenizer's vocabulary.
MAX_CONFIG_BYTES, MAX_TEXT_BYTES = 10 << 20, 200 << 20
_ALWAYS_ALLOWED_SIZE = 1 << 16  # dimensions up to this one are accepted even if no tensor is that large
_MAX_LIST_LEN = 1 << 16
# (pattern of a number's name in a configuration, smallest value, largest value); the first match counts. A largest
# value of None stands for the largest dimension of the model's tensors.
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
    """Returns the path, which may be a regular file, a folder or missing.

    Raises:
        CheckpointError: the path is a device, a pipe or a socket, or a file of more than ``max_bytes``.
    """
    try:
        status = path.stat()
    except OSError:
        return path  # the caller gets the error when it opens the file
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
    """Reads the weight index of a sharded checkpoint. Returns {tensor name: file}, files in the index's folder.

    Raises:
        CheckpointError: the file is no weight index, or names a file outside the index's folder.
    """
    with file_errors(path, f"{path} is not a weight index", "Fetch it again."):
        files = {name: path.parent / file for name, file in read_json(path, MAX_TEXT_BYTES)["weight_map"].items()}
        if outside := [file for file in files.values() if ".." in file.parts or not file.is_relative_to(path.parent)]:
            raise ValueError(f"it names {outside[0]}, which is not in its folder")
        return files


def check_numbers(values: Any, file: Path | str, max_size: int = 1 << 24) -> None:
    """Checks all numbers of a configuration, before anything is built from them.

    Args:
        values: the configuration, with nested lists and mappings; ``file`` names it in messages.
        max_size: the largest dimension of the model's tensors; default: a size that no real model exceeds.

    Raises:
        CheckpointError: a number is outside its range or not finite, or a list is too long.
    """
    unchecked: list[tuple[str, Any]] = [("", values)]
    while unchecked:
        name, value = unchecked.pop()
        if isinstance(value, Mapping):
            unchecked += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            if len(value) > _MAX_LIST_LEN:
                raise CheckpointError(f"{file} has {len(value):,} items in {name[:99]}, of at most {_MAX_LIST_LEN:,}.")
            unchecked += [(name, item) for item in value]
        elif isinstance(value, int | float):
            low, high = _allowed_range(name.rpartition(".")[2])
            high = max(max_size, _ALWAYS_ALLOWED_SIZE) if high is None else high
            if not low <= value <= high:
                value_text = f"{value:g}" if isinstance(value, float) else str(value)[:40]
                raise CheckpointError(
                    f"{file} has {name[:99]} {value_text}, which is not from {low:g} to {high:g}: correct it."
                )


@functools.lru_cache(1024)
def _allowed_range(name: str) -> tuple[float, float | None]:
    return next((low, high) for pattern, low, high in _RANGES if re.fullmatch(pattern, name, re.DOTALL))


@contextmanager
def prefix_errors_with(file: Path | str) -> Iterator[None]:
    """Puts the file's name in front of every message of a longdraft error that does not contain it."""
    try:
        yield
    except LongdraftError as error:
        if Path(file).name in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error


@contextmanager
def file_errors(
    file: Path | str, failure: str, remedy: str = "", error_type: type[LongdraftError] = CheckpointError
) -> Iterator[None]:
    """Turns any error that a bad file causes into an error of longdraft. Used as a context around code that reads.

    Args:
        file: the file that is read; every message contains its name.
        failure: beginning of the message, before the reason.
        remedy: end of the message, which says what to do.
        error_type: class of the raised errors.
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
        raise error_type(f"{failure}: {reason_of(error)}. {remedy}".rstrip()) from error


def reports_file_errors(subject: str, remedy: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a reader with :func:`file_errors`: its first str or path is the file, ``subject`` the file's noun."""

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            file = next(str(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, str | os.PathLike))
            with file_errors(file, f"{subject} {file} cannot be read", remedy):
                return read(*args, **kwargs)

        return wrapped

    return decorate


@contextmanager
def open_safetensors(path: Path, remedy: str) -> Iterator[Any]:
    """Opens a safetensors file. :func:`file_errors` also applies to reads inside the context."""
    from safetensors import safe_open

    with file_errors(path, f"{path} cannot be read", remedy), safe_open(require_regular(path), framework="pt") as file:
        yield file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and then renames that file to ``path``. So ``path`` is never incomplete.

    Raises:
        CheckpointError: the file cannot be written. An earlier file at ``path`` stays.
    """
    from safetensors import SafetensorError

    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # several processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except CheckpointError:  # its message names the file already
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}. An earlier file stays as it is.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
