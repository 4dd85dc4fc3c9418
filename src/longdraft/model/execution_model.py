"""ExecutionModel: a copy that computes in place of the user's model, which longdraft never changes.

The copy's modules share the model's parameters and buffers. They have longdraft's attention, kernels and hooks, and are
always in eval mode. The user's model stays free to train, generate and serve other threads. Only the thread that holds
the model's lock (:func:`model_lock`) uses the copy.
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
from longdraft.model import hosting, positions, support
from longdraft.model.called_functions import replaced_functions
from longdraft.model.fingerprint import placement_of, same_signature, signature
from longdraft.model.layers import experts
from longdraft.model.layers.batch_invariant import BatchInvariantMode
from longdraft.model.layers.fused import FusedLayers
from longdraft.model.layout import config_layout, has_non_full_attention
from longdraft.model.linear_attention import mixers
from longdraft.model.model_copy import copy_model
from longdraft.model.model_parts import decoder_of
from longdraft.model.probes.tokens import validate_hosting
from longdraft.model.quant import external
from longdraft.model.shared_parts import SharedParts, shared_parts
from longdraft.model.tensor_parallel import tp_rank_of
from longdraft.native import kernels


class ExecutionModel:
    """A copy of a user's model, patched and validated so that it computes the same logits.

    Attributes:
        model: the copy.
        version: a number that no other copy in this process has.
        rope_switch: length, in tokens, of the longest prompt that gets LongRoPE's short factors (:mod:`.positions`);
            None if the model has no LongRoPE.
        fused: the model's layers for fused kernels, if the kernels can compute the layers.
        layout: where the KV of each attention call lies."""

    _versions = itertools.count()

    def __init__(self, model: PreTrainedModel) -> None:
        self.version = next(self._versions)
        self.model = copy_model(model)
        external.remove_wrappers(self.model)
        hosting.set_attention(self.model)
        positions.patch_position_ids(self.model)
        self.rope_switch = positions.patch_longrope(self.model)
        mixers.patch_mixers(self.model)
        is_sharded, has_windows_or_states = tp_rank_of(model) is not None, has_non_full_attention(model)
        if is_sharded and has_windows_or_states:
            raise UnsupportedModelError("Models with windows or recurrent layers need one process, without torchrun.")
        layout = validate_hosting(model) if has_windows_or_states else None
        self.fused = FusedLayers(self.model, layout)
        # If the model is a causal decoder with a head and no more, FusedLayers has compared all that it computes.
        is_causal = all(getattr(module, "is_causal", True) for module in model.modules())
        is_decoder_with_head = is_causal and decoder_of(model) is model.base_model
        is_validated = self.fused.stack is not None and is_decoder_with_head and not replaced_functions(model)
        if layout is None and not (is_validated or is_sharded):
            layout = validate_hosting(model)
        self.layout = layout or config_layout(self.model)
        external.make_batch_invariant(self.model)
        experts.make_batch_invariant(self.model)
        self._batch_invariant = kernels() is not None and self.model.device.type == "cpu"
        self._layers_with_hooks: set[int] = set()
        self._placement = placement_of(model)

    @cached_property
    def shared_parts(self) -> SharedParts:
        """The parts that trained drafts share with the model. Raises what :func:`.shared_parts.shared_parts` raises."""
        return shared_parts(self.model)

    @property
    def was_moved(self) -> bool:
        """True if the model was moved or cast since the copy was made (:func:`placement_of`)."""
        return placement_of(self.model) != self._placement

    def run(self, ctx: hosting.ForwardContext, head: bool, **kwargs: Any) -> Any:
        """Runs the model, or only the decoder if ``head`` is False. ``ctx`` receives hidden states and queries.

        The caller holds the model's lock. ``kwargs`` go to the model's forward.
        Raises UnsupportedModelError if the model calls attention more or less often than in earlier forwards."""
        for layer in ctx.hidden_layers - self._layers_with_hooks:
            hosting.add_hidden_hook(self.model, layer)
            self._layers_with_hooks.add(layer)
        module = self.model if head else decoder_of(self.model)
        make_invariant = self._batch_invariant and not ctx.batch.is_prefill
        with BatchInvariantMode() if make_invariant else nullcontext():
            out = hosting.run(module, ctx, **kwargs)
        if ctx.num_attention_calls != len(self.layout.locations):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} called the attention interface {ctx.num_attention_calls} times, and "
                f"{len(self.layout.locations)} times before: longdraft needs the same layers in every forward."
            )
        return out


_locks: WeakKeyDictionary[PreTrainedModel, AbstractContextManager[bool]] = WeakKeyDictionary()
# Guards _locks. It is re-entrant because garbage collection may run code in the same thread that takes it again.
# A thread that holds it waits for nothing else, so no deadlock is possible.
_locks_guard = threading.RLock()


def model_lock(model: PreTrainedModel) -> AbstractContextManager[bool]:
    """Returns the one lock of a model. A thread holds it during every forward and every decoding round."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


class HostedModel:
    """A model's lock and :class:`ExecutionModel`, without a reference to the user's model, which can thus be freed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = model_lock(model)
        # Computed before the copy is made, so that the next sync notices a change during copying.
        self._signature = self._compute_signature(model)
        self.execution_model = ExecutionModel(model)

    def sync_with_model(self, model: PreTrainedModel) -> None:
        """Makes a new copy if the model has changed.
        Raises UnsupportedModelError if the model can no longer be hosted exactly, or copied."""
        with self.lock:
            new_signature = self._compute_signature(model)
            if not same_signature(self._signature, new_signature):
                support.check_supported(model)
                self.execution_model = ExecutionModel(model)
                self._signature = new_signature

    @staticmethod
    def _compute_signature(model: PreTrainedModel) -> list[Any]:
        """Lists what the copy depends on: the model, and the kernels, which environment variables can switch off."""
        return [kernels(), custom_ops.triton_enabled(), *signature(model)]


# References to values are weak too. A copy may hold a user's hook that refers to the model, and would keep it alive.
_hosted_models: WeakKeyDictionary[PreTrainedModel, ref[HostedModel]] = WeakKeyDictionary()


def host_model(model: PreTrainedModel) -> HostedModel:
    """Returns the model's :class:`HostedModel`: all callers get one object, as long as one of them holds it.
    Raises UnsupportedModelError if the model cannot be copied."""
    with model_lock(model):
        external.decompress(model)
        weak_ref = _hosted_models.get(model)
        hosted_model = None if weak_ref is None else weak_ref()
        if hosted_model is None:
            hosted_model = HostedModel(model)
            _hosted_models[model] = ref(hosted_model)
        else:
            hosted_model.sync_with_model(model)
        return hosted_model
