"""TargetRunner: a forward of the target over a block, which is a chain or a tree of tokens for every sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal
from weakref import ref

import torch
from transformers import PreTrainedModel

from longdraft.attention import dispatch, fixed_order, prefix
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.int8_kv import accept_int8_kv
from longdraft.errors import CapabilityError
from longdraft.files import errors_name
from longdraft.memory import memory_info
from longdraft.memory import offload as offloading
from longdraft.memory.buffer_arena import BufferArena
from longdraft.memory.offload import Offload
from longdraft.memory.store import KVStore
from longdraft.model import fingerprints, hosting, stored, stored_model, support
from longdraft.model.eos_tokens import config_eos_ids
from longdraft.model.execution_model import ExecutionModel, host_model, structure_of
from longdraft.model.gpu import deterministic as one_bucket
from longdraft.model.gpu.cuda_graphs import CudaGraphs, ForwardResults
from longdraft.model.layout import layout_of
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput, nan_logits_error
from longdraft.model.round_profiler import RoundProfiler
from longdraft.model.shared_parts import SharedParts
from longdraft.model.tensor_parallel import tp_rank_of


class TargetRunner:
    """Hosts a transformers decoder.

    Args:
        model: a decoder-only model of transformers that uses its attention interface. It
            is never changed: its twin computes (:mod:`longdraft.model.execution_model`).
        offload: place of the keys and values; see :func:`longdraft.memory.offload.parse`.
        kv_dtype: dtype that keys and values are rounded to; None for the arithmetic's own.
        deterministic: plain steps and verifications agree to the bit on a GPU too (:mod:`.gpu.deterministic`).

    Attributes:
        held_model: the model; None lets it go when nobody else has it.
        attention_path: name of the attention path on this machine. attend: its function, which may be replaced.
        graphs: recorded forwards of the target and of the drafts that read it; may be replaced as well.
        tp_rank: this process's share of the target if several processes share it; None for all of it.
        lock: held during every forward and every step of a run: one thread at a time uses a model through longdraft.
        num_layers: number of decoder layers.
        kv_shape: shape of the stores, with this process's heads, and dtype of the rows that are written.
        arithmetic: "int8", or the dtype that the model computes in (``stored_model.arithmetic_of``).
        fixed_batch_rows: rows of every forward of :meth:`verify`; None: as many as there are.
        has_recurrent_layers: the model has recurrent layers.
        branching_is_expensive: a branch of a tree costs more than its rows: a state of its own, or a forward of its own.
        default_kv_dtype: dtype of keys and values in that arithmetic.
        prefix_attend: attention of a drafter's queries to committed KV, on the same path.
        profiler: takes the time of a round's parts; layers are then computed part by part. None: no profile is made.

    Raises:
        UnsupportedModelError: the model cannot be hosted exactly; the message says why.
        CapabilityError: the device cannot offload that way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        offload: Offload = None,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        self.offload = offload
        self.held_model: PreTrainedModel | None = model
        self._model = ref(model)
        self.tp_rank = tp_rank_of(model)
        with errors_name(getattr(model, "name_or_path", "")):
            memory_info.check_process_limits()
            support.check_supported(model)
            support.check_functions(model)
            support.check_autocast(model.device)
            offloading.check(offload, model.device)
            self._host = host_model(model)
            self.lock = self._host.lock
            shape = layout_of(model).shape
            self.num_layers = len(hosting.decoder_layers(model))
        self.kv_shape = shape if self.tp_rank is None else self.tp_rank.local_kv_shape(shape)
        self.context_length = hosting.context_length(model)
        self.device: torch.device = model.device
        self.profiler: RoundProfiler | None = None
        self.attention_path, self.attend = dispatch.resolve(self.device, self.kv_shape.dtype, self.kv_shape.head_dim)
        if self.device.type == "cuda":
            self.attend = accept_int8_kv(self.attend)
        attend = prefix.make_prefix_attention(self.attend)
        self.prefix_attend: prefix.PrefixAttentionFunction = (
            attend if self.tp_rank is None else self.tp_rank.gathered_attention(attend)
        )
        self.arithmetic = stored_model.arithmetic_of(model)
        # Int8 arithmetic keeps keys and values in 16 bits.
        halves = self.arithmetic == "int8" and self.can_round_kv and offload is None
        self.default_kv_dtype = torch.bfloat16 if halves else self.kv_shape.dtype
        self.kv_dtype = kv_dtype or self.default_kv_dtype
        if self.kv_is_rounded:
            support.check_kv_dtype(self, self.kv_dtype, "kv_dtype")
        # Graphs cannot record what processes exchange within a forward.
        # A recording cannot move the rows of windows either, nor compute rows one after another.
        self.has_recurrent_layers = bool(self.execution_model.layout.recurrent)
        self.branching_is_expensive = self.has_recurrent_layers or self.has_custom_attention
        layout = self.execution_model.layout
        recorded = self.tp_rank is None and not (layout.windows or layout.recurrent or layout.custom_cache_layers)
        self.graphs = CudaGraphs.for_device(self.device, self.attention_path) if recorded else CudaGraphs(None)
        # Of stores of whole texts and windows, and of views, which would take each other's.
        self._rooms, self._resident = BufferArena(), BufferArena()
        self._structure, self._made_for = structure_of(model), self.store_kind
        self.fixed_batch_rows = one_bucket.fixed_batch_rows_for(self) if deterministic else None

    @property
    def model(self) -> PreTrainedModel:
        """The user's model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def buffer_arena(self) -> BufferArena | None:
        """Memory that stores and windows take, so that recorded forwards outlive them; None if none are recorded."""
        return self._rooms if self.graphs.enabled else None

    @property
    def execution_model(self) -> ExecutionModel:
        """The copy that computes in the model's place."""
        return self._host.execution_model

    @property
    def has_custom_attention(self) -> bool:
        """True if the model attends with code of its own (:mod:`longdraft.model.custom_attention`)."""
        return bool(self.execution_model.layout.custom_cache_layers)

    @property
    def is_stale(self) -> bool:
        """True if the model was moved or cast, or got other layers, sizes or settings: it needs a new runner."""
        return structure_of(self.model) != self._structure or self.store_kind != self._made_for

    def sync_with_model(self) -> None:
        """Adopts changes that the user made to the model since the last run.

        Raises:
            CapabilityError: the model has another dtype, device or layout of its layers now.
            UnsupportedModelError: it can no longer be copied, or attends with a function of the user's now.
            CheckpointError: the file that its weights are mapped from was written to.
        """
        support.check_functions(self.model)
        stored_model.check_mapped_files(self.model)
        self._host.sync_with_model(self.model)
        if self.store_kind != self._made_for:
            raise CapabilityError(
                f"The model is {self.model.dtype} on {self.model.device} now, and what decodes it was made for "
                f"{self.kv_shape.dtype} on {self.device}, or for layers that attend otherwise. Start the run again: "
                "the model may be moved, cast or given other layers between runs."
            )

    @property
    def shared_parts(self) -> SharedParts:
        """The parts that a trained draft shares with this target.

        Raises:
            UnsupportedModelError: the target takes no trained drafts.
        """
        return self.execution_model.shared_parts

    @property
    def vocab_size(self) -> int:
        return stored.weight_shape(self.model.get_output_embeddings())[0]

    def max_context_length(self, prompt_len: int) -> int:
        """Tokens of the longest text that may begin with a prompt of so many: one that crosses the switch would have to
        be read anew."""
        switch = self.execution_model.rope_switch
        return self.context_length if switch is None or prompt_len > switch else switch

    def rope_regime(self, length: int) -> str:
        """Names the rows of a text of ``length`` tokens: texts of two kinds share none, even if they begin alike."""
        switch = self.execution_model.rope_switch
        return "long" if switch is not None and length > switch else ""

    @property
    def fingerprint(self) -> str:
        """The name of this target in snapshots."""
        name = fingerprints.fingerprint_of(self.model) + fingerprints.hooks_suffix(self.model)
        if self.tp_rank is not None:
            name += f", share {self.tp_rank.rank + 1} of {self.tp_rank.world_size}"
        if self.arithmetic == "int8":
            name += ", int8 arithmetic"
        return f"{name}, KV in {self.kv_dtype}" if self.kv_dtype != self.kv_shape.dtype else name

    def synced_fingerprint(self) -> str:
        """:attr:`fingerprint` of the target as it is now, its adapters included. Raises as :meth:`sync_with_model`."""
        with self.lock:
            self.sync_with_model()
            return self.fingerprint

    @property
    def kv_is_rounded(self) -> bool:
        """True if keys and values are rounded to fewer bytes than the arithmetic's own, which changes the model."""
        return self.kv_dtype != self.default_kv_dtype

    @property
    def can_round_kv(self) -> bool:
        """True if the CPU's attention path reads keys and values rounded to any dtype."""
        return not self.has_custom_attention and self.attention_path == "cpu" and self.kv_shape.dtype == torch.float32

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the model's generation config; empty if it has none."""
        return frozenset(config_eos_ids(self.model.generation_config))

    @property
    def store_kind(self) -> object:
        """The :attr:`KVStore.kind` of the stores of texts: it follows from the model as it is now."""
        return self.execution_model.layout, self.model.device, self.model.dtype, self.kv_dtype, self.offload

    def new_store(
        self,
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        resident: bool = False,
        dtype: torch.dtype | None = None,
        with_states: bool = True,
    ) -> KVStore:
        """An empty KV store of this target's shape, in the layout of its attention path.

        Args:
            feature_layers: decoder layers whose output hidden states every forward writes into the store.
            resident: keep the store on the device even if others are offloaded, for a small one that is read often.
            dtype: dtype of keys and values in a resident store; None takes :attr:`kv_dtype`.
            with_states: make states of layers that keep no rows of the whole text; a store that shares another's needs none.

        Raises:
            CapabilityError: no attention path here reads keys and values of that dtype.
            MemoryBudgetError: the store does not fit the memory.
        """
        self.sync_with_model()
        transposed = dispatch.prefers_transposed_keys(self.attention_path, self.kv_shape.dtype)
        size = int(hosting.decoder_config(self.model).hidden_size)
        dtype = dtype or self.kv_dtype
        if dtype != self.kv_dtype:
            support.check_kv_dtype(self, dtype, "view_dtype")
        rows = capacity + self.graphs.extra_kv_entries(slots) + (self.fixed_batch_rows or 0)
        rooms = self._resident if resident and self.buffer_arena is not None else self.buffer_arena
        small = dtype != self.kv_shape.dtype
        place, turned = None if resident or small else self.offload, transposed or (small and self.can_round_kv)
        store = offloading.new_store(
            *(place, self.kv_shape, slots, rows, self.device, turned, feature_layers, size, rooms, dtype)
        )
        store.compat_key = self.store_kind
        if with_states and (self.execution_model.layout.windows or self.has_recurrent_layers):
            of_windows = dtype if dtype.is_floating_point else self.kv_shape.dtype
            packed = transposed or of_windows != self.kv_shape.dtype
            store.attach_states(*hosting.new_layer_states(self.execution_model.model, slots, rows, packed, of_windows))
        return store

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        store: KVStore,
        *,
        logits: int | Literal["all", "last", "none"] = "all",
        taps: Taps = NO_TAPS,
        check_nan: bool = True,
        fixed_order: bool = False,
    ) -> TargetOutput:
        """One forward. Writes the block's KV and features into the store behind each slot's prefix, uncommitted.

        Args:
            batch: made by the store's :meth:`~longdraft.memory.store.KVStore.block`.
            logits: the rows whose logits are computed; a number: so many of each sequence's last.
            check_nan: look for NaN, which waits for the device. Not needed for drafts, nor before
                :func:`~longdraft.engine.accept.accept`, which checks for itself.
            fixed_order: attend in an order that depends on each row's rank alone.

        Raises:
            NumericalError: a computed logit is NaN.
            CapabilityError: queries are wanted of a model that does not show them; or as :meth:`sync_with_model`.
        """
        if taps.queries and self.has_custom_attention:
            raise CapabilityError(
                f"{type(self.model).__name__} attends with code of its own, which does not show its queries: take a "
                "method that does not choose rows by attention scores, such as prompt-lookup or small-lm."
            )
        with self.lock:
            if self.execution_model.was_moved or self.store_kind != self._made_for:  # by a runner with the same twin
                self.sync_with_model()
            kept = self._kept(taps, store)
            # A padded plain step is recorded at once: there are few sizes.
            replayed = self._replay(store, batch, kept, fixed_order, fixed_order) if logits == "all" else None
            computed, hidden, queries = replayed or self._compute(store, batch, logits, kept, fixed_order)
            out = TargetOutput(None if computed is None else computed.float(), queries=queries)
            store.write_features(hidden, batch)
            out.hidden = {layer: hidden[layer] for layer in taps.hidden}
            # One reduction: a maximum is NaN if any term is. (-inf, as in a masked vocabulary, is allowed.)
            if check_nan and out.logits is not None and bool(torch.isnan(out.logits.amax())):
                raise nan_logits_error(self.model)
            return out

    def verify(
        self, batch: ForwardBatch, store: KVStore, taps: Taps = NO_TAPS, logits_to_keep: int | None = None
    ) -> TargetOutput:
        """One forward whose logits decide tokens: a plain step or a verification. Logits are not checked for NaN.

        With :attr:`fixed_batch_rows`, forwards of that many rows, one or several.

        Args:
            logits_to_keep: of each sequence only so many rows, its last ones, need logits. Recorded forwards have those of all.
        """
        if self.fixed_batch_rows is not None:
            return one_bucket.forward_fixed_batches(self, batch, store, taps)
        every = logits_to_keep is None or logits_to_keep >= batch.query_len or self.graphs.enabled
        return self.forward(
            batch,
            store,
            logits="all" if every or logits_to_keep is None else logits_to_keep,
            taps=taps,
            check_nan=False,
        )

    def _kept(self, taps: Taps, store: KVStore) -> Taps:
        return Taps(tuple(sorted({*taps.hidden, *store.feature_layers})), taps.queries)

    def _replay(
        self, store: KVStore, block: ForwardBatch, kept: Taps, now: bool = False, fixed: bool = False
    ) -> ForwardResults | None:
        """A recorded forward over a block, recorded now if need be; None if there is none."""
        if self.profiler is not None:
            return None

        def compute(store: KVStore, block: ForwardBatch) -> ForwardResults:
            return self._compute(store, block, "all", kept, fixed)

        # A recording holds the addresses of one twin's weights.
        return self.graphs.run(store, block, (kept, self.execution_model.version, fixed), compute, now)

    @torch.inference_mode()
    def capture_graphs(
        self,
        store: KVStore,
        max_tokens: int,
        taps: Taps = NO_TAPS,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> int:
        """Records forwards of up to ``fixed_batch_rows`` rows before they are needed, where forwards are recorded.

        Args:
            store: its memory is recorded for; rows behind the committed ones are overwritten.
            taps: as the forwards will have.
            done: called with the share of the work that is over.

        Returns:
            The number of sizes.
        """
        with self.lock:
            sizes, kept = self.graphs.capture_sizes(store, self.fixed_batch_rows or max_tokens), self._kept(taps, store)
            if self.fixed_batch_rows is not None:
                sizes = [size for size in sizes if size[0] * size[1] == self.fixed_batch_rows]
            for i, (batch, size, length) in enumerate(sizes):
                on_progress(i / len(sizes))
                zeros = [[0] * size] * batch
                slots, lengths = range(batch), [length] * batch
                block = ForwardBatch.make(slots, lengths, size, device=self.device, token_ids=zeros, positions=zeros)
                self._replay(store, block, kept, True, self.fixed_batch_rows is not None)
            on_progress(1.0)
            return len(sizes)

    def _compute(
        self,
        store: KVStore,
        block: ForwardBatch,
        logits: int | Literal["all", "last", "none"],
        taps: Taps,
        fixed: bool = False,
    ) -> ForwardResults:
        """Logits in the model's dtype, hidden states and queries of a block."""
        attend = fixed_order.attend if fixed else self.attend
        hosted = hosting.ForwardContext(
            store,
            replace(block),  # a copy: a recording must contain what attention derives from the block
            attend if self.profiler is None else self.profiler.profiled_attention(attend),
            self.execution_model.layout,
            frozenset(taps.queries),
            frozenset(taps.hidden),
            self.profiler is None and self.execution_model.fused.can_run(store, block),
        )
        if hosted.fused and self.execution_model.fused.stack is not None:
            return self.execution_model.fused.run(hosted, logits), hosted.hidden, hosted.queries
        if logits == "none":
            self.execution_model.run(hosted, head=False)
            return None, hosted.hidden, hosted.queries
        last = logits if isinstance(logits, int) else int(logits == "last")  # 0: all of them
        out = self.execution_model.run(
            hosted, head=True, logits_to_keep=0 if last > 1 and self.has_custom_attention else last
        )
        # Some models do not know logits_to_keep.
        return out.logits[:, -last:], hosted.hidden, hosted.queries
