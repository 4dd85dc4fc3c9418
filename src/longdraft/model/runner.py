"""TargetRunner runs the target on batches that have a chain or a tree of tokens for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Literal
from weakref import ref

import torch
from transformers import PreTrainedModel

from longdraft.attention import dispatch, fixed_order, prefix
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefill_window import with_prefill_window
from longdraft.attention.quantized_kv import accept_quantized_kv
from longdraft.errors import CapabilityError
from longdraft.files import prefix_errors_with
from longdraft.memory import memory_info
from longdraft.memory import offload as offloading
from longdraft.memory.buffer_arena import BufferArena
from longdraft.memory.offload import Offload
from longdraft.memory.store import KVStore, StoreConfig
from longdraft.model import fingerprint, hosting, support
from longdraft.model.execution_model import ExecutionModel, host_model
from longdraft.model.gpu.captured_forwards import ForwardResults, RoundFn, RoundInputs
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.gpu.deterministic import make_fixed_rows
from longdraft.model.load.eos_tokens import config_eos_ids
from longdraft.model.model_parts import context_length, decoder_config, decoder_layers
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput, nan_logits_error
from longdraft.model.quant import stored, stored_model
from longdraft.model.round_profiler import RoundProfiler
from longdraft.model.shared_parts import SharedParts
from longdraft.model.tensor_parallel import tp_rank_of


class TargetRunner:
    """Hosts a transformers model as the target.

    Args:
        model: a decoder-only transformers model. It is never changed: a copy computes (:mod:`.execution_model`).
        offload: where keys and values are kept; see :func:`longdraft.memory.offload.parse`.
        kv_dtype: dtype of keys and values; None takes :attr:`default_kv_dtype`.
        deterministic: True gives plain steps and verifications equal bits on a GPU too (:mod:`.gpu.deterministic`).
        prefill_window: tokens that most tokens of a prompt attend to (:mod:`longdraft.attention.prefill_window`); None:
            all.

    Attributes:
        held_model: the user's model; set it to None to hold only a weak reference.
        num_layers: number of decoder layers.
        device: the model's device.
        attention_path: name of the attention implementation on this machine (:mod:`longdraft.attention.dispatch`).
        allows_fusion: False if fused layers would compute another attention path, or the environment turns them off.
        attend: the attention function of this path; may be replaced.
        prefix_attend: computes attention of a drafter's queries to the target's committed KV, on this path.
        graphs: CUDA graphs of the target, and of drafts that read the target's KV; may be replaced.
        tp_rank: this process's rank if the target is tensor parallel; else None.
        lock: a thread holds it in every forward and decoding round, so one thread at a time uses the model.
        context_length: longest sequence, in tokens, that the configuration allows.
        kv_shape: shape of the stores' KV (of this process's heads), with the dtype in which the model computes KV.
        kv_dtype: dtype of keys and values in the stores.
        default_kv_dtype: the ``kv_dtype`` that ``arithmetic`` implies.
        arithmetic: "int8", or the name of the dtype in which the model computes.
        has_recurrent_layers: True if the model has recurrent layers, so that each branch of a tree takes a state.
        profiler: times the phases of rounds, without fused layers and CUDA graphs; None for no profiling.

    Raises UnsupportedModelError, with the reason, if the model cannot be hosted exactly, and CapabilityError if the
    device does not support this offload or kv_dtype."""

    def __init__(
        self,
        model: PreTrainedModel,
        offload: Offload = None,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        prefill_window: int | None = None,
    ) -> None:
        self.offload, self.prefill_window = offload, prefill_window
        self.held_model: PreTrainedModel | None = model
        self._model_ref = ref(model)
        self.tp_rank = tp_rank_of(model)
        with prefix_errors_with(getattr(model, "name_or_path", "")):
            memory_info.check_process_limits()
            support.check_supported(model)
            support.check_functions(model)
            support.check_autocast(model.device)
            offloading.check(offload, model.device)
            self._host = host_model(model)
            self.lock = self._host.lock
            shape = self.execution_model.layout.shape
            self.num_layers = len(decoder_layers(model))
        self.kv_shape = shape if self.tp_rank is None else self.tp_rank.local_kv_shape(shape)
        self.context_length = context_length(model)
        self.device: torch.device = model.device
        self.profiler: RoundProfiler | None = None
        self.attention_path, self.attend = dispatch.resolve(self.device, self.kv_shape.dtype, self.kv_shape.head_dim)
        if self.device.type == "cuda":
            self.attend = accept_quantized_kv(self.attend)
        self.prefix_attend: prefix.PrefixAttentionFunction = prefix.make_prefix_attention(self.attend)
        if self.tp_rank is not None:
            self.prefix_attend = self.tp_rank.gathered_attention(self.prefix_attend)
        self.arithmetic = stored_model.arithmetic_of(model)
        # As in llama.cpp, int8 arithmetic comes with KV in 16 bits.
        kv_in_16_bits = self.arithmetic == "int8" and self.can_round_kv and offload is None
        self.default_kv_dtype = torch.bfloat16 if kv_in_16_bits else self.kv_shape.dtype
        self.kv_dtype = kv_dtype or self.default_kv_dtype
        if self.kv_is_rounded:
            support.check_kv_dtype(self, "kv_dtype", self.kv_dtype)
        if prefill_window is not None and self.device.type != "cpu":
            raise CapabilityError(
                f"prefill_window is for models on a CPU, and this one is on {self.device}: leave it out."
            )
        self.has_recurrent_layers = bool(self.execution_model.layout.recurrent)
        layout = self.execution_model.layout
        # A CUDA graph cannot capture collectives, sliding window caches, or a loop over tokens.
        self.allows_fusion = dispatch.allows_fusion(self.device, self.attention_path)
        can_capture = self.allows_fusion and self.tp_rank is None and not (layout.windows or layout.recurrent)
        self.graphs = CudaGraphs.for_device(self.device, self.attention_path) if can_capture else CudaGraphs(None)
        # Resident stores have their own arena, so that they do not take buffers of stores that use offload.
        self._arena, self._resident_arena = BufferArena(), BufferArena()
        self._structure, self._first_compat_key = fingerprint.structure_of(model), self.store_compat_key
        self._fixed_rows = make_fixed_rows(self) if deterministic else None

    @property
    def fixed_batch_rows(self) -> int | None:
        """Number of tokens, with padding, in each forward of :meth:`verify`; None without padding."""
        return None if self._fixed_rows is None else self._fixed_rows.batch_rows

    @property
    def model(self) -> PreTrainedModel:
        """The user's model."""
        model = self._model_ref()
        assert model is not None
        return model

    @property
    def buffer_arena(self) -> BufferArena | None:
        """Reuses buffers for new stores, as CUDA graphs contain the buffers' addresses. None without CUDA graphs."""
        return self._arena if self.graphs.enabled else None

    @property
    def execution_model(self) -> ExecutionModel:
        """The copy that computes in place of the user's model."""
        return self._host.execution_model

    @property
    def is_stale(self) -> bool:
        """True if the model was moved, cast or restructured after this runner was made, so a new runner is needed."""
        return (
            fingerprint.structure_of(self.model) != self._structure or self.store_compat_key != self._first_compat_key
        )

    def sync_with_model(self) -> None:
        """Adopts the changes that the user made to the model since the last run.

        Raises:
            CapabilityError: the model's dtype, device or KV layout changed.
            UnsupportedModelError: the model can no longer be copied, or calls a user's attention function.
            CheckpointError: a file that the weights are mapped from was written to."""
        support.check_functions(self.model)
        fingerprint.check_mapped_files(self.model)
        self._host.sync_with_model(self.model)
        if self.store_compat_key != self._first_compat_key:
            raise CapabilityError(
                f"The model is {self.model.dtype} on {self.model.device} now, and this run was started for "
                f"{self.kv_shape.dtype} on {self.device}, or with other layers. Start the run again: move, cast or "
                "change the model between runs only."
            )

    @property
    def shared_parts(self) -> SharedParts:
        """The modules and sizes that trained drafts share with this target.
        Raises UnsupportedModelError if the target lacks a part that trained drafts need."""
        return self.execution_model.shared_parts

    @property
    def vocab_size(self) -> int:
        """Number of the LM head's rows."""
        return stored.weight_shape(self.model.get_output_embeddings())[0]

    def max_context_length(self, prompt_len: int) -> int:
        """Returns the largest length, in tokens, of a sequence with such a prompt. LongRoPE's switch may limit it."""
        switch = self.execution_model.rope_switch
        return self.context_length if switch is None or prompt_len > switch else switch

    def rope_regime(self, length: int) -> str:
        """Returns "long" if a prompt of ``length`` tokens gets LongRoPE's long factors, else "".
        Cached KV is valid for one of the two only."""
        switch = self.execution_model.rope_switch
        return "long" if switch is not None and length > switch else ""

    @property
    def fingerprint(self) -> str:
        """Identifies this target's KV in snapshots and prompt caches, by weights, settings, arithmetic and KV dtype."""
        name = fingerprint.fingerprint_of(self.model) + fingerprint.hooks_suffix(self.model)
        if self.tp_rank is not None:
            name += f", share {self.tp_rank.rank + 1} of {self.tp_rank.world_size}"
        if self.arithmetic == "int8":
            name += ", int8 arithmetic"
        if self.prefill_window is not None:
            name += f", prompts read in windows of {self.prefill_window}"
        return f"{name}, KV in {self.kv_dtype}" if self.kv_dtype != self.kv_shape.dtype else name

    def synced_fingerprint(self) -> str:
        """Returns :attr:`fingerprint` after :meth:`sync_with_model`. Raises the errors of :meth:`sync_with_model`."""
        with self.lock:
            self.sync_with_model()
            return self.fingerprint

    @property
    def kv_is_rounded(self) -> bool:
        """True if :attr:`kv_dtype` differs from :attr:`default_kv_dtype`, which changes the outputs."""
        return self.kv_dtype != self.default_kv_dtype

    @property
    def is_approximate(self) -> bool:
        """True if an option changes the outputs: rounded KV, or prompts read in windows."""
        return self.kv_is_rounded or self.prefill_window is not None

    @property
    def drafts_in_eight_bits(self) -> bool:
        """True for a model on a GPU with few bits a weight, beside which a draft in 16 bits would be slow."""
        return self.device.type == "cuda" and stored_model.has_stored_weights(self.model)

    @property
    def can_round_kv(self) -> bool:
        """True if the attention path reads KV in any dtype, as our CPU kernels do for models in float32."""
        return self.attention_path == "cpu" and self.kv_shape.dtype == torch.float32

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of the model's generation config; empty if it has none."""
        return frozenset(config_eos_ids(self.model.generation_config))

    @property
    def store_compat_key(self) -> object:
        """The ``compat_key`` of new stores of this target. A run may use only stores whose key equals it."""
        layout = self.execution_model.layout
        return layout, self.model.device, self.model.dtype, self.kv_dtype, self.offload, self.prefill_window

    def new_store(
        self,
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        resident: bool = False,
        dtype: torch.dtype | None = None,
        with_states: bool = True,
    ) -> KVStore:
        """Makes an empty KV store for this target, in the layout of the attention path.

        Args:
            slots: number of sequences.
            capacity: number of KV entries of each sequence.
            feature_layers: decoder layers whose output hidden states every forward writes into the store.
            resident: True keeps the store on the device even with offload, for a small store that is read often.
            dtype: dtype of keys and values in a resident store; None takes :attr:`kv_dtype`.
            with_states: False leaves out window caches and recurrent states, for a store that uses another store's.

        Raises CapabilityError if no attention path of this machine reads KV of that dtype, and MemoryBudgetError if the
        store does not fit into memory."""
        self.sync_with_model()
        transposed = dispatch.prefers_transposed_keys(self.attention_path, self.kv_shape.dtype)
        hidden_size = int(decoder_config(self.model).hidden_size)
        dtype = dtype or self.kv_dtype
        if dtype != self.kv_dtype:
            support.check_kv_dtype(self, "view_dtype", dtype)
        capacity = capacity + self.graphs.extra_kv_entries(slots) + (self.fixed_batch_rows or 0)
        arena = self._resident_arena if resident and self.buffer_arena is not None else self.buffer_arena
        is_rounded = dtype != self.kv_shape.dtype
        offload = None if resident or is_rounded else self.offload
        keys_transposed = transposed or (is_rounded and self.can_round_kv)
        config = StoreConfig(keys_transposed, feature_layers, hidden_size, dtype)
        store = offloading.new_store(offload, self.kv_shape, slots, capacity, self.device, config, arena)
        store.compat_key = self.store_compat_key
        if with_states and (self.execution_model.layout.windows or self.has_recurrent_layers):
            window_dtype = dtype if dtype.is_floating_point else self.kv_shape.dtype
            windows_transposed = transposed or window_dtype != self.kv_shape.dtype
            hosting.attach_states(store, self.execution_model.layout, windows_transposed, window_dtype)
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
        """Runs one forward. It writes KV and features into the store as uncommitted entries, behind the committed ones.

        Args:
            batch: made by :meth:`~longdraft.memory.store.KVStore.make_forward_batch`.
            store: the store that ``batch`` was made for.
            logits: the tokens whose logits are computed; a number n means the last n tokens of each sequence.
            taps: further results to return.
            check_nan: True raises for NaN logits, which waits for the device. Drafts need no check, and
                :func:`~longdraft.engine.accept.accept` checks verifications.
            fixed_order: True sums attention up in an order that depends only on each token's position.

        Raises:
            NumericalError: a computed logit is NaN.
            CapabilityError: :meth:`sync_with_model` raises it."""
        if self.prefill_window is not None and batch.prompt_len:
            batch = with_prefill_window(batch, self.prefill_window)
        with self.lock:
            self._sync_if_moved()
            all_taps = self._with_feature_layers(taps, store)
            # Batches with a fixed order have few sizes, so a graph is captured at the first use of a size.
            replayed = self._replay(store, batch, all_taps, fixed_order, fixed_order) if logits == "all" else None
            computed_logits, hidden, queries = replayed or self._compute(store, batch, logits, all_taps, fixed_order)
            out = TargetOutput(None if computed_logits is None else computed_logits.float(), queries=queries)
            store.write_features(hidden, batch)
            out.hidden = {layer: hidden[layer] for layer in taps.hidden}
            # The maximum is NaN if any logit is NaN. -inf is allowed, for models that mask a part of the vocabulary.
            if check_nan and out.logits is not None and bool(torch.isnan(out.logits.amax())):
                raise nan_logits_error(self.model)
            return out

    def _sync_if_moved(self) -> None:
        """Calls :meth:`sync_with_model` if another runner of the same model may have replaced the model's copy."""
        if self.execution_model.was_moved or self.store_compat_key != self._first_compat_key:
            self.sync_with_model()

    @torch.inference_mode()
    def replay_round(
        self,
        owner: object,
        key: Hashable,
        make_inputs: Callable[[], RoundInputs],
        make_compute: Callable[[], RoundFn],
    ) -> torch.Tensor | None:
        """Replays a round that drafts and verifies, see :meth:`.CudaGraphs.run_round`; None without a graph.
        The round runs the target by :meth:`compute_captured`."""
        with self.lock:
            self._sync_if_moved()
            if self.profiler is not None or self._fixed_rows is not None:
                return None
            # A graph contains addresses of weights, so its key has the version of the model's copy.
            key = key, self.execution_model.version
            return self.graphs.run_round(owner, key, make_inputs, make_compute, self.device)

    def compute_captured(self, store: KVStore, batch: ForwardBatch) -> torch.Tensor:
        """Computes logits (B, T, vocabulary) as a part of a captured round, and writes KV and features."""
        logits, hidden, _ = self._compute(store, batch, "all", self._with_feature_layers(NO_TAPS, store))
        store.write_features(hidden, batch)
        assert logits is not None
        return logits

    def verify(
        self, batch: ForwardBatch, store: KVStore, taps: Taps = NO_TAPS, logits_to_keep: int | None = None
    ) -> TargetOutput:
        """Runs a plain step or a verification, in forwards of :attr:`fixed_batch_rows` tokens if that is set.

        ``logits_to_keep``: number of each sequence's last tokens whose logits are needed; None for all. CUDA graphs
        compute all logits. NaN logits do not raise here."""
        if self._fixed_rows is not None:
            output = TargetOutput(None)
            for sequences, tokens, padded in self._fixed_rows.split(batch):
                part = self.forward(padded, store, taps=taps, check_nan=False, fixed_order=True)
                output.scatter_from(part, batch, sequences, tokens)
            return output
        if logits_to_keep is None or logits_to_keep >= batch.query_len or self.graphs.enabled:
            return self.forward(batch, store, taps=taps, check_nan=False)
        return self.forward(batch, store, logits=logits_to_keep, taps=taps, check_nan=False)

    def _with_feature_layers(self, taps: Taps, store: KVStore) -> Taps:
        """Adds the layers whose hidden states the store keeps."""
        return Taps(tuple(sorted({*taps.hidden, *store.feature_layers})), taps.queries)

    def _replay(
        self, store: KVStore, batch: ForwardBatch, taps: Taps, fixed_order: bool, capture_now: bool
    ) -> ForwardResults | None:
        """Replays a CUDA graph. Returns None if there is none for this batch; ``capture_now`` captures it first."""
        if self.profiler is not None:
            return None

        def compute(store: KVStore, batch: ForwardBatch) -> ForwardResults:
            return self._compute(store, batch, "all", taps, fixed_order)

        # A graph contains addresses of weights, so its key has the version of the model's copy.
        key = taps, self.execution_model.version, fixed_order
        return self.graphs.run(store, batch, key, compute, capture_now)

    @torch.inference_mode()
    def capture_graphs(
        self,
        store: KVStore,
        max_tokens: int,
        taps: Taps = NO_TAPS,
        on_progress: Callable[[float], None] = lambda fraction: None,
    ) -> int:
        """Captures CUDA graphs in advance, for forwards of up to ``max_tokens`` tokens. Returns the number of graphs.

        Args:
            store: the later forwards' store, as graphs contain addresses of it. Uncommitted entries are overwritten.
            max_tokens: largest number of new tokens of a sequence in one forward.
            taps: the taps of the later forwards.
            on_progress: called with the fraction of the work that is done."""
        with self.lock:
            sizes = self.graphs.capture_sizes(store, self.fixed_batch_rows or max_tokens)
            all_taps = self._with_feature_layers(taps, store)
            if self.fixed_batch_rows is not None:
                sizes = [size for size in sizes if size[0] * size[1] == self.fixed_batch_rows]
            for i, (batch_size, query_len, prefix_len) in enumerate(sizes):
                on_progress(i / len(sizes))
                zeros, prefix_lens = [[0] * query_len] * batch_size, [prefix_len] * batch_size
                inputs: dict[str, Any] = {"token_ids": zeros, "positions": zeros}
                batch = ForwardBatch.make(range(batch_size), prefix_lens, query_len, device=self.device, **inputs)
                self._replay(store, batch, all_taps, self.fixed_batch_rows is not None, capture_now=True)
            on_progress(1.0)
            return len(sizes)

    def _compute(
        self,
        store: KVStore,
        batch: ForwardBatch,
        logits: int | Literal["all", "last", "none"],
        taps: Taps,
        use_fixed_order: bool = False,
    ) -> ForwardResults:
        """Computes a batch without CUDA graphs: logits in the model's dtype, hidden states and queries."""
        model, attend = self.execution_model, fixed_order.attend if use_fixed_order else self.attend
        ctx = hosting.ForwardContext(
            store,
            replace(batch),  # a copy without cached metadata, so that a graph captures the computation of metadata
            attend if self.profiler is None else self.profiler.profiled_attention(attend),
            model.layout,
            frozenset(taps.queries),
            frozenset(taps.hidden),
            self.profiler is None and self.allows_fusion and model.fused.can_run(store, batch),
        )
        if ctx.fused and model.fused.stack is not None:
            return model.fused.run(ctx, logits), ctx.hidden, ctx.queries
        if logits == "none":
            model.run(ctx, head=False)
            return None, ctx.hidden, ctx.queries
        num_last = logits if isinstance(logits, int) else int(logits == "last")  # 0 for all, as in transformers
        out = model.run(ctx, head=True, logits_to_keep=num_last)
        # The slice is for models that ignore logits_to_keep.
        return out.logits[:, -num_last:], ctx.hidden, ctx.queries
