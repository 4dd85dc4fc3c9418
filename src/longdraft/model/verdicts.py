"""Keeps the verdict on a model that was tried out (:mod:`.trial`), as long as the model lives and stays as it was.

A trial takes some forwards of the model, and a twin is made anew whenever a model's last user has gone.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model import fingerprints
from longdraft.model.calls import Recorded
from longdraft.model.model_copy import PLAIN, signature
from longdraft.model.trial import try_out

# What a model was like when it was tried, and what was recorded, or why it was refused.
_verdicts: WeakKeyDictionary[PreTrainedModel, tuple[list[Any], Recorded | str]] = WeakKeyDictionary()


def tried(model: PreTrainedModel) -> Recorded:
    """Tries a model out, unless it was tried before and has not changed since: the records of its forward.

    Raises:
        UnsupportedModelError: longdraft cannot host it exactly.
    """
    now = [fingerprints.of(model), *map(_weakly, signature(model))]
    known = _verdicts.get(model)
    if known is None or known[0] != now:
        found: Recorded | str
        try:
            found = try_out(model)
        except UnsupportedModelError as error:
            found = f"{model.name_or_path}: {error}" if model.name_or_path else str(error)
        known = _verdicts[model] = (now, found)
    if isinstance(known[1], str):
        raise UnsupportedModelError(known[1])
    return known[1]


class _Object:
    """Stands for an object without keeping it; equal to another one of the same object while that lives."""

    def __init__(self, value: Any) -> None:
        self._ref = ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Object) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def _weakly(part: Any) -> Any:
    """A part of a signature, in a form that does not keep the model."""
    if isinstance(part, PLAIN):
        return type(part), part
    try:
        return _Object(part)
    except TypeError:  # a list or a dict, whose modules are parts of their own
        return id(part)
