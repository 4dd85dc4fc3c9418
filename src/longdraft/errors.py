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
    """A setting of a run has an unusable value, such as no new tokens."""


class ArgumentError(RequestError, TypeError):
    """A call has an unknown argument, or lacks a required one."""


class MemoryBudgetError(LongdraftError, MemoryError):
    """The request's KV cache does not fit the free memory."""


class UnsupportedModelError(LongdraftError, ValueError):
    """The target cannot be hosted exactly."""


class CheckpointError(LongdraftError, OSError):
    """A model, draft or snapshot file is missing, truncated, or made for something else."""


class UnknownMethodError(LongdraftError, ValueError):
    """No method has that name."""


class NumericalError(LongdraftError, ArithmeticError):
    """The target returned NaN logits."""


class CapabilityError(LongdraftError, RuntimeError):
    """A feature is not available on this machine or not supported."""


class ConfigError(LongdraftError, ValueError):
    """A training configuration has an unknown setting or an unusable value."""


def reason_of(error: BaseException) -> str:
    """The first line of another library's message without its full stop; the error's type if there is no message."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, pickle.UnpicklingError):  # torch's message advises to unpickle the file anyway
        return "its .bin file is damaged or holds more than weights, and only weights are unpickled"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


@contextmanager
def values_checked(
    kind: type[LongdraftError] = RequestError, instead_of: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Context around the use of a user's value. It turns errors of the types ``instead_of`` into errors of ``kind``."""
    try:
        yield
    except LongdraftError:
        raise
    except instead_of as error:
        message = str(error).rstrip(".")
        raise kind(message if message.endswith("?") else f"{message}.") from error


# What torch, oneDNN, C++ and file readers say if memory runs out.
_NO_MEMORY = re.compile("allocate memory|out of memory|bad_alloc|could not create a primitive$", re.IGNORECASE)


def lacks_memory(error: BaseException) -> bool:
    """True if an error, or one of its causes, reports that memory ran out."""
    cause: BaseException | None = error
    seen: list[BaseException] = []  # causes may form a cycle
    while cause is not None and cause not in seen:
        seen.append(cause)
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        if _NO_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def memory_checked() -> Iterator[None]:
    """Turns errors that report a lack of memory into MemoryBudgetError. So a file that could not be mapped is not
    reported as damaged."""
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
