"""The twin: what longdraft runs in a model's place, so that nothing of the model itself is ever written to.

A twin has modules of its own on the model's very parameters and buffers. Our attention, our kernels and our taps are
put into it for good, and it is in evaluation mode whatever the model is in. So the model can train, decode by other
means and be used by other threads meanwhile. A twin is used by one thread at a time, who holds the lock of its model.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedModel

from longdraft.model import hosting, packing, row_activations, stored
from longdraft.model.few_rows import MOST, FewRowsModule
from longdraft.model.fused import FusedLayers
from longdraft.model.lock import lock_of
from longdraft.model.model_copy import copy_of, signature, unchanged
from longdraft.model.shared_parts import SharedParts, shared_parts
from longdraft.native import kernels


class Twin:
    """One copy of a model as it was when the copy was made.

    Attributes:
        model: the copy. number: another one for every twin that is made.
    """

    _numbers = itertools.count()

    def __init__(self, model: PreTrainedModel) -> None:
        self.number = next(self._numbers)
        self.model = copy_of(model)
        hosting.switch_on(self.model)
        # First: whether they agree is seen against the layers' own products.
        self.fused = FusedLayers(self.model)
        self.few_rows = FewRowsModule(self.model)
        row_activations.install(self.model, lambda: self.few_rows.most is None)
        self._tapped: set[int] = set()
        self._place = _place(model)

    @cached_property
    def parts(self) -> SharedParts:
        """What a trained draft shares with the model.

        Raises:
            UnsupportedModelError: where it takes no trained drafts.
        """
        return shared_parts(self.model)

    @property
    def moved(self) -> bool:
        """Whether the weights lie elsewhere by now, as far as a quick look can tell."""
        return _place(self.model) != self._place

    def run(self, hosted: hosting.Hosted, inputs: dict[str, Any], head: bool) -> Any:
        """A forward: what the model returns, or its decoder alone.

        Args:
            head: compute logits.
        """
        for layer in hosted.hidden_layers - self._tapped:
            hosting.tap(self.model, layer)
            self._tapped.add(layer)
        # While text is decoded, one product serves any number of rows: see Block.prompt.
        self.few_rows.most = MOST if hosted.block.prompt else None
        run = self.model if head else self.model.get_decoder()
        try:
            return run(**inputs, longdraft_hosted=hosted)
        finally:
            self.few_rows.forget()


class HostedModel:
    """A model, its lock, and its twin of now.

    Attributes:
        lock: held by whoever uses the twin, and what else runs on one model share.
        twin: the newest.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = lock_of(model)
        self._model = model
        # Before the copy: what changes in between is found to have changed.
        self._signature = self._look()
        self.twin = Twin(model)

    def refresh(self) -> None:
        """Makes a new twin if the model has been changed since: for the beginning of a run.

        Raises:
            UnsupportedModelError: it can no longer be copied.
        """
        with self.lock:
            now = self._look()
            if not unchanged(self._signature, now):
                self.twin = Twin(self._model)
                self._signature = now

    def _look(self) -> list[Any]:
        # What may compute can be switched by the environment.
        return [kernels(), packing.available(), *signature(self._model)]


# Weakly: runners keep what they use, and a hook of a user's in a twin may lead back to the model.
_hosted: WeakKeyDictionary[PreTrainedModel, ref[HostedModel]] = WeakKeyDictionary()


def host(model: PreTrainedModel) -> HostedModel:
    """A model with its twin; the same for all who ask as long as one of them keeps it.

    Raises:
        UnsupportedModelError: it cannot be copied.
    """
    with lock_of(model):
        known = _hosted.get(model)
        found = None if known is None else known()
        if found is None:
            found = HostedModel(model)
            _hosted[model] = ref(found)
        else:
            found.refresh()
        return found


def _place(model: PreTrainedModel) -> tuple[int, torch.dtype, torch.device]:
    weight = stored.weight_place(model.get_input_embeddings())
    return weight.data_ptr(), model.dtype, weight.device
