"""ExecutionModel: the copy that computes in the user's model's place, so that longdraft never writes to the model.

The copy has modules of its own that share the model's parameters and buffers. It has our attention, kernels and hooks,
and is always in eval mode. Meanwhile the model can train, generate and serve other threads. One thread at a time uses
the copy, and holds the model's lock.
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
from longdraft.model import custom_attention, experts, external_quant, hosting, positions, recurrent, stored, support
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
    """A copy of a model that computes for it.

    Attributes:
        model: the copy. version: its number, unique in this process.
        rope_switch: longest text, in tokens, with LongRoPE's short factors; a longer one has the long factors at every
            position. None if rotations do not depend on the text's length.
    """

    _versions = itertools.count()

    def __init__(self, model: PreTrainedModel) -> None:
        self.version = next(self._versions)
        self.model = copy_model(model)
        traced_layouts.pop(model, None)  # the model may have changed since
        external_quant.remove_wrappers(self.model)
        hosting.set_attention(self.model)
        positions.patch_position_ids(self.model)
        self.rope_switch = positions.patch_longrope(self.model)
        recurrent.patch_mixers(self.model)
        is_sharded, partial = tp_rank_of(model) is not None, has_non_full_attention(model)
        if is_sharded and partial:
            raise UnsupportedModelError("Models with windows cannot be shared among processes.")
        if partial:
            self._validate(model)
        self.fused = FusedLayers(self.model)
        # FusedLayers validates a causal decoder with nothing but a head around it.
        causal = all(getattr(module, "is_causal", True) for module in model.modules())
        is_plain_lm = causal and hosting.decoder_of(model) is model.base_model
        validated = self.fused.stack is not None and is_plain_lm and not replaced_functions(model)
        if not (validated or is_sharded or partial):
            self._validate(model)
        self.layout = layout_of(self.model)
        external_quant.make_batch_invariant(self.model)
        experts.make_batch_invariant(self.model)
        self._batch_invariant = kernels() is not None and self.model.device.type == "cpu"
        self._hooked_layers: set[int] = set()
        self._placement = placement_of(model)

    def _validate(self, model: PreTrainedModel) -> None:
        layout = traced_layouts[model] = traced_layouts[self.model] = validate_hosting(model)
        if layout.custom_cache_layers:
            hosting.set_attention(self.model, hosting.decoder_config(model)._attn_implementation)

    @cached_property
    def shared_parts(self) -> SharedParts:
        """The parts that trained drafts share with the model; raises as the function :func:`shared_parts`."""
        return shared_parts(self.model)

    @property
    def was_moved(self) -> bool:
        """True if the model was moved or cast since: checks the device, the dtype, the embedding and the head."""
        return placement_of(self.model) != self._placement

    def run(self, ctx: hosting.ForwardContext, head: bool, **kwargs: Any) -> Any:
        """A forward of the model, or without ``head`` of its decoder. The caller holds the lock.

        ``ctx`` receives hidden states and queries.

        Raises:
            UnsupportedModelError: not all layers use the attention interface.
        """
        for layer in ctx.hidden_layers - self._hooked_layers:
            hosting.add_hidden_hook(self.model, layer)
            self._hooked_layers.add(layer)
        module = self.model if head else hosting.decoder_of(self.model)
        is_custom = bool(self.layout.custom_cache_layers)
        invariant = self._batch_invariant and not ctx.batch.is_prefill
        with BatchInvariantMode(products=not is_custom) if invariant else nullcontext():
            out = (custom_attention.run if is_custom else hosting.run)(module, ctx, **kwargs)
        if not is_custom and ctx.num_attention_calls != len(self.layout.locations):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} called the attention interface {ctx.num_attention_calls} times, and "
                f"{len(self.layout.locations)} before: its layers change from one forward to the next."
            )
        return out


_locks: WeakKeyDictionary[PreTrainedModel, AbstractContextManager[bool]] = WeakKeyDictionary()
# Re-entrant: the garbage collector may run any code while it is held. No other lock is awaited inside.
_locks_guard = threading.RLock()


def model_lock(model: PreTrainedModel) -> AbstractContextManager[bool]:
    """The one lock of a model, held during every forward and every step of a run."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


class HostedModel:
    """A model's lock and its current :class:`ExecutionModel`. Holds no reference to the user's model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = model_lock(model)
        # Read before the copy is made, so that a change in between is noticed.
        self._signature = self._current(model)
        self.execution_model = ExecutionModel(model)

    def sync_with_model(self, model: PreTrainedModel) -> None:
        """Makes a new copy if the model has changed.

        Raises:
            UnsupportedModelError: the model can no longer be hosted exactly, or copied.
        """
        with self.lock:
            current = self._current(model)
            if not same_signature(self._signature, current):
                support.check_supported(model)
                self.execution_model = ExecutionModel(model)
                self._signature = current

    @staticmethod
    def _current(model: PreTrainedModel) -> list[Any]:
        # Environment variables can switch kernels off.
        return [kernels(), custom_ops.triton_enabled(), *signature(model)]


# Weak references: runners hold what they use, and a user's hook in a copy may refer to the model.
_hosted_models: WeakKeyDictionary[PreTrainedModel, ref[HostedModel]] = WeakKeyDictionary()


def host_model(model: PreTrainedModel) -> HostedModel:
    """The model's :class:`HostedModel`: one object for all callers, as long as one of them holds it.

    Raises:
        UnsupportedModelError: the model cannot be copied.
    """
    with model_lock(model):
        external_quant.decompress(model)
        reference = _hosted_models.get(model)
        hosted_model = None if reference is None else reference()
        if hosted_model is None:
            hosted_model = HostedModel(model)
            _hosted_models[model] = ref(hosted_model)
        else:
            hosted_model.sync_with_model(model)
        return hosted_model


def placement_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Device and dtype of a model, and the storage of its embedding and head."""
    weights = [stored.weight_storage(m) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    return model.device, model.dtype, *((w.data_ptr(), w.shape, w.dtype) for w in weights)


def structure_of(model: PreTrainedModel) -> tuple[object, ...]:
    """A model's placement, configuration, modules and shapes: if these change, a new runner is needed."""
    modules = [(type(m), *(p.shape for p in m._parameters.values() if p is not None)) for m in model.modules()]
    return placement_of(model), str(hosting.decoder_config(model)), modules
