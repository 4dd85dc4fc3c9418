"""Every error that longdraft raises on purpose. Each message says what to do next."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager


class LongdraftError(Exception):
    """Base class of all errors that longdraft raises on purpose."""


class PromptError(LongdraftError, ValueError):
    """The prompt cannot be used: empty, unreadable, not text."""


class ContextError(LongdraftError, ValueError):
    """Prompt and new tokens together do not fit the model's context."""


class RequestError(LongdraftError, ValueError):
    """A setting of a run has an unusable value, such as ``max_new_tokens=0``."""


class ArgumentError(RequestError, TypeError):
    """A call has an unknown argument, or lacks a required one."""


class MemoryBudgetError(LongdraftError, MemoryError):
    """The request's KV cache does not fit the free memory."""


class UnsupportedModelError(LongdraftError, ValueError):
    """longdraft cannot run the target (the model that is accelerated) without a change of its output."""


class CheckpointError(LongdraftError, OSError):
    """A file of a model, of a draft or of saved work is missing, truncated, or made for something else."""


class UnknownMethodError(LongdraftError, ValueError):
    """No method has that name."""


class NumericalError(LongdraftError, ArithmeticError):
    """The target returned NaN logits."""


class CapabilityError(LongdraftError, RuntimeError):
    """A feature is not available on this machine or not supported."""


class ConfigError(LongdraftError, ValueError):
    """A training configuration has an unknown setting or an unusable value."""


def reason_of(error: BaseException) -> str:
    """Returns the reason that an error gives, for a longer message: mostly the first line of the error's text."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, pickle.UnpicklingError):  # torch's text advises an unsafe way to load the file
        return "its .bin file is damaged or holds more than weights, and only weights are unpickled"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


@contextmanager
def values_checked(
    error_type: type[LongdraftError] = RequestError, caught_types: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Turns errors of ``caught_types``, raised while a user's value is checked, into errors of ``error_type``."""
    try:
        yield
    except LongdraftError:
        raise
    except caught_types as error:
        message = str(error).rstrip(".")
        # "did you mean ...?" ends a sentence too.
        raise error_type(message if message.endswith("?") else f"{message}.") from error


@contextmanager
def needs_extra(extra: str, problem: str) -> Iterator[None]:
    """Turns an ImportError into a CapabilityError: the ``problem``, and how to install an extra of this package."""
    try:
        yield
    except ImportError as error:
        raise CapabilityError(f'{problem} ({error}): pip install "longdraft[{extra}]".') from error


# Messages of torch, oneDNN, C++ and file readers if memory runs out.
_OUT_OF_MEMORY = re.compile("allocate memory|out of memory|bad_alloc|could not create a primitive$", re.IGNORECASE)


def lacks_memory(error: BaseException) -> bool:
    """True if an error, or one of its causes, reports that memory ran out."""
    cause: BaseException | None = error
    seen: list[BaseException] = []  # causes may form a cycle
    while cause is not None and cause not in seen:
        seen.append(cause)
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        if _OUT_OF_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def memory_checked() -> Iterator[None]:
    """Turns errors that report a lack of memory into MemoryBudgetError."""
    try:
        yield
    except MemoryBudgetError:
        raise
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise MemoryBudgetError(
            f"Memory does not suffice ({reason_of(error)}). Shorten the prompt, lower the batch, take a smaller model, "
            "or raise the limit of this process (ulimit -v) or container."
        ) from error
