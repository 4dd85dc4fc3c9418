"""Every error that longdraft raises on purpose. Each message says what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LongdraftError(Exception):
    """Base class: catch this to catch all of them."""


class PromptError(LongdraftError, ValueError):
    """The prompt cannot be used: empty, unreadable, not text."""


class ContextError(LongdraftError, ValueError):
    """Prompt and budget together do not fit the model's context."""


class RequestError(LongdraftError, ValueError):
    """A setting of a run has a value that cannot be used, such as a budget of no tokens."""


class ArgumentError(RequestError, TypeError):
    """A call was given an argument that it does not have, or lacks one that it needs."""


class MemoryBudgetError(LongdraftError, MemoryError):
    """The KV cache that the request needs does not fit the memory that is free."""


class UnsupportedModelError(LongdraftError, ValueError):
    """The target has a layer kind that cannot be hosted exactly."""


class CheckpointError(LongdraftError, OSError):
    """A model, draft or snapshot file is missing, truncated, or made for something else."""


class UnknownMethodError(LongdraftError, ValueError):
    """No method goes by that name."""


class NumericalError(LongdraftError, ArithmeticError):
    """The target returned NaN logits."""


class CapabilityError(LongdraftError, RuntimeError):
    """What was asked for is not available on this machine or not supported here."""


class ConfigError(LongdraftError, ValueError):
    """A training configuration has an unknown setting or a value that cannot be used."""


def reason_of(error: Exception) -> str:
    """What another library's error says, for a sentence of ours: its first line, without a full stop; else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


@contextmanager
def values_checked(
    kind: type[LongdraftError] = RequestError, instead_of: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Inside it, an error of these types that is none of ours is about a value that the user gave.

    Raises:
        LongdraftError: of this kind, in its place.
    """
    try:
        yield
    except LongdraftError:
        raise
    except instead_of as error:
        said = str(error).rstrip(".")
        raise kind(said if said.endswith("?") else f"{said}.") from error
