"""The twin: a copy that computes in a model's place, so that longdraft never writes to the model itself.

A twin has modules of its own with the model's very parameters and buffers. It contains our attention, our kernels and
our hooks, and is always in evaluation mode. Meanwhile the model can train, generate and serve other threads. One
thread at a time uses a twin, and holds the lock of its model.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

from transformers import PreTrainedModel

from longdraft.attention import custom_ops
from longdraft.errors import UnsupportedModelError
from longdraft.model import custom_attention, experts, hosting, positions, quantised, recurrent, stored, support
from longdraft.model.batch_invariant import BatchInvariantMode
from longdraft.model.called_functions import replaced_functions
from longdraft.model.fused import FusedLayers
from longdraft.model.layout import has_non_full_attention, layout_of, traced_layouts
from longdraft.model.model_copy import copy_model, same_signature, signature
from longdraft.model.shared_parts import SharedParts, shared_parts
from longdraft.model.tensor_parallel import tp_rank_of
from longdraft.model.validation import validate_hosting
from longdraft.native import kernels


class ExecutionModel:
    """A copy of a model (``model``), with a number of its own.

    Attributes:
        rope_switch: tokens of the longest text with LongRoPE's short factors: all rows of a longer one have the long
            factors. None if rows do not depend on how long their text is.
    """

    _numbers = itertools.count()

    def __init__(self, model: PreTrainedModel) -> None:
        self.version = next(self._numbers)
        self.model = copy_model(model)
        traced_layouts.pop(model, None)  # of before a change
        quantised.remove_wrappers(self.model)
        hosting.set_attention(self.model)
        positions.patch_position_ids(self.model)
        self.rope_switch = positions.patch_longrope(self.model)
        recurrent.patch_mixers(self.model)
        # A bare decoder of full attention whose layers our kernels compute, which is compared too, needs no trial.
        shared, windows = tp_rank_of(model) is not None, has_non_full_attention(model)
        if shared and windows:
            raise UnsupportedModelError("Models with windows cannot be shared among processes.")
        if windows:
            self._try(model)
        self.fused = FusedLayers(self.model)
        # Nothing but a head surrounds it, and no row sees those behind it.
        causal = all(getattr(module, "is_causal", True) for module in model.modules())
        bare = causal and hosting.decoder_of(model) is model.base_model
        compared = self.fused.stack is not None and bare and not replaced_functions(model)
        if not (compared or shared or windows):
            self._try(model)
        self.layout = layout_of(self.model)
        # While text is decoded, a row's bits must not depend on the rows beside it.
        quantised.make_batch_invariant(self.model)
        experts.make_batch_invariant(self.model)
        self._by_row = kernels() is not None and self.model.device.type == "cpu"
        self._tapped: set[int] = set()
        self._place = placement_of(model)

    def _try(self, model: PreTrainedModel) -> None:
        found = traced_layouts[model] = traced_layouts[self.model] = validate_hosting(model)
        if found.custom_cache_layers:
            hosting.set_attention(self.model, hosting.decoder_config(model)._attn_implementation)

    @cached_property
    def shared_parts(self) -> SharedParts:
        """The parts that a trained draft shares with the model; raises as :func:`shared_parts`."""
        return shared_parts(self.model)

    @property
    def was_moved(self) -> bool:
        """True if the model was moved or cast since, as far as a quick look can tell."""
        return placement_of(self.model) != self._place

    def run(self, hosted: hosting.ForwardContext, head: bool, **more: Any) -> Any:
        """A forward of the model, or of its decoder alone without ``head``. The caller holds the lock.

        Args:
            hosted: the state of the forward; hidden states and queries are left in it.
            more: further arguments of the model.

        Raises:
            UnsupportedModelError: not all layers use the attention interface.
        """
        for layer in hosted.hidden_layers - self._tapped:
            hosting.add_hidden_hook(self.model, layer)
            self._tapped.add(layer)
        run = self.model if head else hosting.decoder_of(self.model)
        own = bool(self.layout.custom_cache_layers)
        # While text is decoded, one kind of product computes any number of rows: see Block.prompt.
        with BatchInvariantMode(products=not own) if self._by_row and not hosted.batch.is_prefill else nullcontext():
            out = (custom_attention.run if own else hosting.run)(run, hosted, **more)
        if not own and hosted.num_attention_calls != len(self.layout.locations):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} sent {hosted.num_attention_calls} layers through the attention interface, and "
                f"{len(self.layout.locations)} before: its layers change from one forward to the next."
            )
        return out


_locks: WeakKeyDictionary[PreTrainedModel, AbstractContextManager[bool]] = WeakKeyDictionary()
# Re-entrant, as the garbage collector may run any code while it is held. No other lock is awaited inside.
_registering = threading.RLock()


def model_lock(model: PreTrainedModel) -> AbstractContextManager[bool]:
    """The one lock of a model, held during every forward and every step of a run."""
    with _registering:
        return _locks.setdefault(model, threading.RLock())


class HostedModel:
    """A model's lock, held by users of the twin, and its newest twin. The model itself may be forgotten meanwhile."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = model_lock(model)
        # Before the copy, so that a change in between is noticed.
        self._signature = self._current(model)
        self.execution_model = ExecutionModel(model)

    def sync_with_model(self, model: PreTrainedModel) -> None:
        """Makes a new twin if the model has been changed.

        Raises:
            UnsupportedModelError: the model can no longer be hosted exactly, or copied.
        """
        with self.lock:
            now = self._current(model)
            if not same_signature(self._signature, now):
                support.check_supported(model)
                self.execution_model = ExecutionModel(model)
                self._signature = now

    @staticmethod
    def _current(model: PreTrainedModel) -> list[Any]:
        # The environment can switch kernels off.
        return [kernels(), custom_ops.triton_enabled(), *signature(model)]


# Weak references: runners keep what they use, and a user's hook in a twin may refer to the model.
_hosted: WeakKeyDictionary[PreTrainedModel, ref[HostedModel]] = WeakKeyDictionary()


def host_model(model: PreTrainedModel) -> HostedModel:
    """A model with its twin: one object for all callers, as long as one of them keeps it.

    Raises:
        UnsupportedModelError: the model cannot be copied.
    """
    with model_lock(model):
        quantised.decompress(model)
        known = _hosted.get(model)
        hosted = None if known is None else known()
        if hosted is None:
            hosted = HostedModel(model)
            _hosted[model] = ref(hosted)
        else:
            hosted.sync_with_model(model)
        return hosted


def placement_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Device and dtype of a model, and the storage of its embedding and head."""
    ends = [stored.weight_storage(m) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    return model.device, model.dtype, *((w.data_ptr(), w.shape, w.dtype) for w in ends)


def structure_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Returns a model's place, configuration, modules and their shapes, on which methods, plans and stores depend."""
    modules = [(type(m), *(p.shape for p in m._parameters.values() if p is not None)) for m in model.modules()]
    return placement_of(model), str(hosting.decoder_config(model)), modules
