"""Keeps the verdict on a model that was tried out (:mod:`.trial`), as long as the model lives and stays as it was.

A trial takes some forwards of the model, and a twin is made anew whenever a model's last user has gone.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model import fingerprints
from longdraft.model.calls import Recorded
from longdraft.model.trial import try_out

# What a model was like when it was tried, and what was recorded, or why it was refused.
_verdicts: WeakKeyDictionary[PreTrainedModel, tuple[object, Recorded | str]] = WeakKeyDictionary()


def tried(model: PreTrainedModel) -> Recorded:
    """Tries a model out, unless it was tried before and has not changed since: the records of its forward.

    Raises:
        UnsupportedModelError: longdraft cannot host it exactly.
    """
    forwards = [(id(type(m).forward), id(vars(m).get("forward"))) for m in model.modules()]
    now = fingerprints.of(model), forwards, model.config._attn_implementation
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
