"""TargetRunner: one forward of the target over a block of tokens, a chain or a tree, for every sequence."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from longdraft.attention import dispatch, prefix
from longdraft.attention.block import Block
from longdraft.errors import CapabilityError, NumericalError, UnsupportedModelError
from longdraft.memory import offload as offloading
from longdraft.memory.offload import Offload
from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVStore
from longdraft.model import hosting, stored, support
from longdraft.model.graphs import Computed, Graphs
from longdraft.model.lock import FairLock
from longdraft.model.sharded import share_of
from longdraft.model.shared_parts import SharedParts
from longdraft.model.twin import Twin, host


@dataclass(frozen=True)
class Taps:
    """What a forward brings back besides logits.

    Attributes:
        hidden: indices of decoder layers whose output hidden states are kept (0 is the first layer).
        queries: indices of layers whose queries, after RoPE, are kept. The KV of any layer lies in the store.
    """

    hidden: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()


NO_TAPS = Taps()
# Whose keys and values can be rounded.
_ROUNDED = "in float32 on a CPU with its own attention path"


@dataclass
class TargetOutput:
    """Attributes:
    logits: (B, T, vocabulary), or (B, 1, vocabulary) of the last row, or None; float32.
    hidden: layer index -> (B, T, hidden size).
    queries: layer index -> (B, query heads, T, head size).
    """

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)


def not_a_number() -> NumericalError:
    """What to raise where a target's logits are NaN."""
    return NumericalError(
        "The target returned NaN logits. A float16 overflow or a damaged checkpoint is the usual cause: "
        "load the model with dtype='bfloat16' or 'float32', or check its files."
    )


class TargetRunner:
    """Hosts a transformers decoder.

    Args:
        model: any decoder-only model of transformers that goes through its attention interface and whose layers
            are all full attention. It is left as it is: what computes is its twin (:mod:`longdraft.model.twin`).
        offload: where its stores keep keys and values; see :func:`longdraft.memory.offload.parse`.
        kv_dtype: what its stores round them to; None: they are kept as they are.

    Attributes:
        model: the model itself, as it was given.
        attention_path: name of the attention path that this machine uses.
        graphs: its recorded forwards, and those of the drafts that read it.
        share: what of the target this process has, where several share it; None: all.
        kv_shape: of its stores, which hold the KV of this process's heads; its dtype is that of the rows written.
        arithmetic: "int8", or the dtype that the model computes in; see :func:`longdraft.model.stored.arithmetic_of`.
        own_kv_dtype: what that arithmetic keeps keys and values as.
        prefix_attend: attention of a drafter's queries to committed KV, on the same path.
        whole_layers: layers are computed in one piece where that can be done: whoever wants to watch a layer's parts
            sets it to False.

    Raises:
        UnsupportedModelError: when it cannot be hosted exactly, naming what stands in the way.
        CapabilityError: when its device cannot offload that way.
    """

    def __init__(self, model: PreTrainedModel, offload: Offload = None, kv_dtype: torch.dtype | None = None) -> None:
        support.check_supported(model)
        offloading.check(offload, model.device)
        self.offload = offload
        self.model = model
        self.share = share_of(model)
        self._host = host(model)
        whole = hosting.kv_shape(model)
        self.kv_shape = whole if self.share is None else self.share.of_heads(whole)
        self.context_length = hosting.context_length(model)
        self.device: torch.device = model.device
        self.whole_layers = True
        self.attention_path, self._attend = dispatch.resolve(self.device, self.kv_shape.dtype, self.kv_shape.head_dim)
        attend = prefix.resolve(self.attention_path)
        self.prefix_attend: prefix.PrefixAttend = attend if self.share is None else self.share.attending(attend)
        self.arithmetic = stored.arithmetic_of(model)
        # Int8 arithmetic keeps keys and values in 16 bits.
        halves = self.arithmetic == "int8" and self.can_round_kv and offload is None
        self.own_kv_dtype = torch.float16 if halves else self.kv_shape.dtype
        self.kv_dtype = kv_dtype or self.own_kv_dtype
        if self.kv_is_rounded and (offload is not None or not self.can_round_kv):
            other = (
                "KV that is not offloaded" if offload is not None else f"models {_ROUNDED}; this one is {self._what}"
            )
            raise CapabilityError(f"kv_dtype={str(self.kv_dtype).removeprefix('torch.')} is for {other}: leave it out.")
        # What processes exchange within a forward is not recorded.
        self.graphs = Graphs.on(self.device, self.attention_path) if self.share is None else Graphs(None)
        self._bound_to = _bound_to(model)

    @property
    def lock(self) -> FairLock:
        """Held for every forward, and for every step of a run: one thread at a time uses a model through longdraft."""
        return self._host.lock

    @property
    def twin(self) -> Twin:
        """What is run in the model's place."""
        return self._host.twin

    @property
    def outdated(self) -> bool:
        """Whether the model was moved or cast since, or has another embedding or head: it needs a new runner then."""
        return _bound_to(self.model) != self._bound_to

    def refresh(self) -> None:
        """Looks at the model again: for the beginning of a run, as it may have been changed since the last one.

        Raises:
            CapabilityError: it is of another dtype now, or on another device.
            UnsupportedModelError: it can no longer be copied.
            CheckpointError: the file that its weights are mapped from was written to.
        """
        stored.check_unchanged(self.model)
        self._host.refresh()
        if (self.model.device, self.model.dtype) != (self.device, self.kv_shape.dtype):
            raise CapabilityError(
                f"The model is {self.model.dtype} on {self.model.device} now, and what decodes it was made for "
                f"{self.kv_shape.dtype} on {self.device}. Start the run again: it may be moved or cast between runs."
            )

    @property
    def parts(self) -> SharedParts:
        """What a trained draft shares with this target.

        Raises:
            UnsupportedModelError: where the target takes no trained drafts.
        """
        return self.twin.parts

    @property
    def vocab_size(self) -> int:
        return stored.weight_shape(self.model.get_output_embeddings())[0]

    @property
    def fingerprint(self) -> str:
        """Names this target in snapshots."""
        name = hosting.fingerprint(self.model)
        if self.share is not None and self.share.heads:
            name += f", share {self.share.rank + 1} of {self.share.size}"
        if self.arithmetic == "int8":
            name += ", int8 arithmetic"
        return f"{name}, KV in {self.kv_dtype}" if self.kv_dtype != self.kv_shape.dtype else name

    @property
    def kv_is_rounded(self) -> bool:
        """Whether keys and values are kept in fewer bytes than the model computes them in: it is another model then."""
        return self.kv_dtype != self.own_kv_dtype

    @property
    def can_round_kv(self) -> bool:
        """Whether its attention reads keys and values that were rounded."""
        return self.attention_path == "cpu" and self.kv_shape.dtype == torch.float32

    @property
    def _what(self) -> str:
        return f"{self.kv_shape.dtype} on {self.device} ({self.attention_path})"

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the model's generation config; empty when it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            return frozenset()
        return frozenset(int(i) for i in ids) if isinstance(ids, (list, tuple)) else frozenset({int(ids)})

    def new_store(
        self,
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        resident: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KVStore:
        """An empty KV store of this target's shape, laid out as its attention path likes it.

        Args:
            feature_layers: decoder layers whose output hidden states every forward shall leave in it.
            resident: keep it on the device even where stores are offloaded: a small one that every round reads.
            dtype: what keys and values are rounded to, in a resident store; None: as those of other stores are.

        Raises:
            CapabilityError: nothing here reads keys and values of that dtype.
            MemoryBudgetError: when it does not fit.
            CheckpointError: no file can be made in the folder to offload to.
        """
        self.refresh()
        transposed = dispatch.prefers_transposed_keys(self.attention_path, self.kv_shape.dtype)
        size = int(hosting.decoder_config(self.model).hidden_size)
        dtype = dtype or self.kv_dtype
        if dtype != self.kv_shape.dtype and not self.can_round_kv:
            raise CapabilityError(
                f"Views in {dtype} are for models {_ROUNDED}; this one is {self._what}: leave view_dtype out; a view "
                "of all rows needs it, so take another."
            )
        with nullcontext() if self.share is None else self.share.room():
            if dtype != self.kv_shape.dtype:
                return PackedStore(self.kv_shape, slots, capacity, dtype, feature_layers, size)
            offload = None if resident else self.offload
            return offloading.new_store(
                offload,
                self.kv_shape,
                slots,
                capacity + self.graphs.padding,
                self.device,
                transposed,
                feature_layers,
                size,
            )

    @torch.inference_mode()
    def forward(
        self,
        block: Block,
        store: KVStore,
        *,
        logits: Literal["all", "last", "none"] = "all",
        taps: Taps = NO_TAPS,
        check: bool = True,
    ) -> TargetOutput:
        """One forward. Writes the block's KV, and the features that the store keeps, behind each slot's prefix.

        Nothing of it is committed.

        Args:
            block: of this store, see :meth:`~longdraft.memory.store.KVStore.block`.
            logits: which rows' logits to compute.
            check: look for NaN, which waits for the device. A drafter's logits may be anything, and
            :func:`~longdraft.engine.accept.accept` looks for itself.

        Raises:
            NumericalError: when a computed logit is NaN.
        """
        with self.lock:
            if self.twin.moved:
                self.refresh()
            if self.share is not None:
                self.share.check_same(block)
            kept = Taps(tuple(sorted({*taps.hidden, *store.feature_layers})), taps.queries)

            def compute(block: Block) -> Computed:
                return self._compute(store, block, logits, kept)

            found = None
            if logits == "all":
                # A recording reads the weights where its twin found them.
                found = self.graphs.run(store, block, (kept, self.twin.number), compute)
            found_logits, hidden, queries = found or compute(block)
            out = TargetOutput(None if found_logits is None else found_logits.float(), queries=queries)
            store.write_features(hidden, block)
            out.hidden = {layer: hidden[layer] for layer in taps.hidden}
            # One reduction: a sum is NaN when any term is. (-inf alone, a masked vocabulary, is allowed.)
            if check and out.logits is not None and bool(torch.isnan(out.logits.amax())):
                raise not_a_number()
            return out

    def _compute(
        self,
        store: KVStore,
        block: Block,
        logits: Literal["all", "last", "none"],
        taps: Taps,
    ) -> Computed:
        """Logits in the model's dtype, hidden states and queries of a block.

        Raises:
            UnsupportedModelError: not all layers go through the attention interface.
        """
        hosted = hosting.Hosted(
            store,
            replace(block),  # a recording shall hold what paths derive of its numbers, not find it there
            self._attend,
            frozenset(taps.queries),
            frozenset(taps.hidden),
            self.whole_layers and self.twin.fused.take(store, block),
        )
        if hosted.whole and self.twin.fused.stack is not None:
            return self.twin.fused.run(hosted, logits), hosted.hidden, hosted.queries
        if logits == "none":
            self.run(hosted, head=False)
            return None, hosted.hidden, hosted.queries
        out = self.run(hosted, head=True, logits_to_keep=1 if logits == "last" else 0)
        return out.logits, hosted.hidden, hosted.queries

    def run(self, hosted: hosting.Hosted, head: bool, **more: Any) -> Any:
        """The model's own code on a block's tokens and positions, for whoever holds :attr:`lock`.

        Args:
            hosted: the block, and what attention does with it; hidden states and queries are left in it.
            head: compute logits, with the model's own head: scaled or capped ones come out as the model means them.
            more: arguments of the model.

        Returns:
            What the model returns, or its decoder alone.

        Raises:
            UnsupportedModelError: not all layers go through the attention interface.
        """
        block = hosted.block
        inputs = {"input_ids": block.tokens, "position_ids": block.positions, "use_cache": False}
        out = self.twin.run(hosted, inputs | more, head)
        if hosted.layers_seen != self.kv_shape.layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} sent {hosted.layers_seen} of its {self.kv_shape.layers} layers through "
                "the attention interface; the others (linear attention, state space?) cannot be hosted exactly."
            )
        return out


def _bound_to(model: PreTrainedModel) -> tuple[object, ...]:
    """What a runner and the drafts on it cannot do without: device, dtype, and where embedding and head lie."""
    ends = [stored.weight_place(m) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    return model.device, model.dtype, *((w.data_ptr(), w.shape, w.dtype) for w in ends)
