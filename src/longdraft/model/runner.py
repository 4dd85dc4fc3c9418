"""TargetRunner: a forward of the target over a block, which is a chain or a tree of tokens for every sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal
from weakref import ref

import torch
from transformers import PreTrainedModel

from longdraft.attention import dispatch, fixed_order, prefix
from longdraft.attention.block import Block
from longdraft.attention.scaled import or_scaled
from longdraft.errors import CapabilityError
from longdraft.files import named
from longdraft.memory import offload as offloading
from longdraft.memory import sizes
from longdraft.memory.offload import Offload
from longdraft.memory.rooms import Rooms
from longdraft.memory.store import KVStore
from longdraft.model import fingerprints, hosting, stored, stored_model, support
from longdraft.model.clock import Clock
from longdraft.model.ends import stated_ends
from longdraft.model.gpu import deterministic as one_bucket
from longdraft.model.gpu.graphs import Computed, Graphs
from longdraft.model.layout import layout_of
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput, not_a_number
from longdraft.model.sharded import share_of
from longdraft.model.shared_parts import SharedParts
from longdraft.model.twin import Twin, host, structure_of


class TargetRunner:
    """Hosts a transformers decoder.

    Args:
        model: a decoder-only model of transformers that uses its attention interface. It
            is never changed: its twin computes (:mod:`longdraft.model.twin`).
        offload: place of the keys and values; see :func:`longdraft.memory.offload.parse`.
        kv_dtype: dtype that keys and values are rounded to; None for the arithmetic's own.
        deterministic: plain steps and verifications agree to the bit on a GPU too (:mod:`.gpu.deterministic`).

    Attributes:
        kept: the model; None lets it go when nobody else has it.
        attention_path: name of the attention path on this machine. attend: its function, which may be replaced.
        graphs: recorded forwards of the target and of the drafts that read it; may be replaced as well.
        share: this process's share of the target if several processes share it; None for all of it.
        lock: held during every forward and every step of a run: one thread at a time uses a model through longdraft.
        depth: number of decoder layers.
        kv_shape: shape of the stores, with this process's heads, and dtype of the rows that are written.
        arithmetic: "int8", or the dtype that the model computes in (``stored_model.arithmetic_of``).
        rows: rows of every forward of :meth:`verify`; None: as many as there are.
        recurrent: the model has recurrent layers.
        forks_cost: a branch of a tree costs more than its rows: a state of its own, or a forward of its own.
        own_kv_dtype: dtype of keys and values in that arithmetic.
        prefix_attend: attention of a drafter's queries to committed KV, on the same path.
        clock: takes the time of a round's parts; layers are then computed part by part. None: no profile is made.

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
        self.kept: PreTrainedModel | None = model
        self._model = ref(model)
        self.share = share_of(model)
        with named(getattr(model, "name_or_path", "")):
            sizes.check_limits()
            support.check_supported(model)
            support.check_functions(model)
            support.check_autocast(model.device)
            offloading.check(offload, model.device)
            self._host = host(model)
            self.lock = self._host.lock
            shape = layout_of(model).shape
            self.depth = len(hosting.decoder_layers(model))
        self.kv_shape = shape if self.share is None else self.share.of_heads(shape)
        self.context_length = hosting.context_length(model)
        self.device: torch.device = model.device
        self.clock: Clock | None = None
        self.attention_path, self.attend = dispatch.resolve(self.device, self.kv_shape.dtype, self.kv_shape.head_dim)
        if self.device.type == "cuda":
            self.attend = or_scaled(self.attend)
        attend = prefix.before(self.attend)
        self.prefix_attend: prefix.PrefixAttend = attend if self.share is None else self.share.attending(attend)
        self.arithmetic = stored_model.arithmetic_of(model)
        # Int8 arithmetic keeps keys and values in 16 bits.
        halves = self.arithmetic == "int8" and self.can_round_kv and offload is None
        self.own_kv_dtype = torch.bfloat16 if halves else self.kv_shape.dtype
        self.kv_dtype = kv_dtype or self.own_kv_dtype
        if self.kv_is_rounded:
            support.check_kv_dtype(self, self.kv_dtype, "kv_dtype")
        # Graphs cannot record what processes exchange within a forward.
        # A recording cannot move the rows of windows either, nor compute rows one after another.
        self.recurrent = bool(self.twin.layout.recurrent)
        self.forks_cost = self.recurrent or self.attends_itself
        layout = self.twin.layout
        recorded = self.share is None and not (layout.windows or layout.recurrent or layout.own)
        self.graphs = Graphs.on(self.device, self.attention_path) if recorded else Graphs(None)
        # Of stores of whole texts and windows, and of views, which would take each other's.
        self._rooms, self._resident = Rooms(), Rooms()
        self._structure, self._made_for = structure_of(model), self.store_kind
        self.rows = one_bucket.rows_for(self) if deterministic else None

    @property
    def model(self) -> PreTrainedModel:
        """The user's model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def rooms(self) -> Rooms | None:
        """Memory that stores and windows take, so that recorded forwards outlive them; None if none are recorded."""
        return self._rooms if self.graphs.recording else None

    @property
    def twin(self) -> Twin:
        """The copy that computes in the model's place."""
        return self._host.twin

    @property
    def attends_itself(self) -> bool:
        """True if the model attends with code of its own (:mod:`longdraft.model.own_code`)."""
        return bool(self.twin.layout.own)

    @property
    def outdated(self) -> bool:
        """True if the model was moved or cast, or got other layers, sizes or settings: it needs a new runner."""
        return structure_of(self.model) != self._structure or self.store_kind != self._made_for

    def refresh(self) -> None:
        """Adopts changes that the user made to the model since the last run.

        Raises:
            CapabilityError: the model has another dtype, device or layout of its layers now.
            UnsupportedModelError: it can no longer be copied, or attends with a function of the user's now.
            CheckpointError: the file that its weights are mapped from was written to.
        """
        support.check_functions(self.model)
        stored_model.check_unchanged(self.model)
        self._host.refresh(self.model)
        if self.store_kind != self._made_for:
            raise CapabilityError(
                f"The model is {self.model.dtype} on {self.model.device} now, and what decodes it was made for "
                f"{self.kv_shape.dtype} on {self.device}, or for layers that attend otherwise. Start the run again: "
                "the model may be moved, cast or given other layers between runs."
            )

    @property
    def parts(self) -> SharedParts:
        """The parts that a trained draft shares with this target.

        Raises:
            UnsupportedModelError: the target takes no trained drafts.
        """
        return self.twin.parts

    @property
    def vocab_size(self) -> int:
        return stored.weight_shape(self.model.get_output_embeddings())[0]

    def longest_text(self, prompt: int) -> int:
        """Tokens of the longest text that may begin with a prompt of so many: one that crosses the switch would have to
        be read anew."""
        switch = self.twin.rope_switch
        return self.context_length if switch is None or prompt > switch else switch

    def rows_kind(self, length: int) -> str:
        """Names the rows of a text of ``length`` tokens: texts of two kinds share none, even if they begin alike."""
        switch = self.twin.rope_switch
        return "long" if switch is not None and length > switch else ""

    @property
    def fingerprint(self) -> str:
        """The name of this target in snapshots."""
        name = fingerprints.of(self.model) + fingerprints.of_hooks(self.model)
        if self.share is not None:
            name += f", share {self.share.rank + 1} of {self.share.size}"
        if self.arithmetic == "int8":
            name += ", int8 arithmetic"
        return f"{name}, KV in {self.kv_dtype}" if self.kv_dtype != self.kv_shape.dtype else name

    def refreshed_fingerprint(self) -> str:
        """:attr:`fingerprint` of the target as it is now, its adapters included. Raises as :meth:`refresh`."""
        with self.lock:
            self.refresh()
            return self.fingerprint

    @property
    def kv_is_rounded(self) -> bool:
        """True if keys and values are rounded to fewer bytes than the arithmetic's own, which changes the model."""
        return self.kv_dtype != self.own_kv_dtype

    @property
    def can_round_kv(self) -> bool:
        """True if the CPU's attention path reads keys and values rounded to any dtype."""
        return not self.attends_itself and self.attention_path == "cpu" and self.kv_shape.dtype == torch.float32

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the model's generation config; empty if it has none."""
        return frozenset(stated_ends(self.model.generation_config))

    @property
    def store_kind(self) -> object:
        """The :attr:`KVStore.kind` of the stores of texts: it follows from the model as it is now."""
        return self.twin.layout, self.model.device, self.model.dtype, self.kv_dtype, self.offload

    def new_store(
        self,
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        resident: bool = False,
        dtype: torch.dtype | None = None,
        states: bool = True,
    ) -> KVStore:
        """An empty KV store of this target's shape, in the layout of its attention path.

        Args:
            feature_layers: decoder layers whose output hidden states every forward writes into the store.
            resident: keep the store on the device even if others are offloaded, for a small one that is read often.
            dtype: dtype of keys and values in a resident store; None takes :attr:`kv_dtype`.
            states: make states of layers that keep no rows of the whole text; a store that shares another's needs none.

        Raises:
            CapabilityError: no attention path here reads keys and values of that dtype.
            MemoryBudgetError: the store does not fit the memory.
        """
        self.refresh()
        transposed = dispatch.prefers_transposed_keys(self.attention_path, self.kv_shape.dtype)
        size = int(hosting.decoder_config(self.model).hidden_size)
        dtype = dtype or self.kv_dtype
        if dtype != self.kv_dtype:
            support.check_kv_dtype(self, dtype, "view_dtype")
        rows = capacity + self.graphs.padding(slots) + (self.rows or 0)
        rooms = self._resident if resident and self.rooms is not None else self.rooms
        small = dtype != self.kv_shape.dtype
        place, turned = None if resident or small else self.offload, transposed or (small and self.can_round_kv)
        store = offloading.new_store(
            *(place, self.kv_shape, slots, rows, self.device, turned, feature_layers, size, rooms, dtype)
        )
        store.kind = self.store_kind
        if states and (self.twin.layout.windows or self.recurrent):
            of_windows = dtype if dtype.is_floating_point else self.kv_shape.dtype
            packed = transposed or of_windows != self.kv_shape.dtype
            store.keep_states(*hosting.new_states(self.twin.model, slots, rows, packed, of_windows))
        return store

    @torch.inference_mode()
    def forward(
        self,
        block: Block,
        store: KVStore,
        *,
        logits: int | Literal["all", "last", "none"] = "all",
        taps: Taps = NO_TAPS,
        check: bool = True,
        fixed: bool = False,
    ) -> TargetOutput:
        """One forward. Writes the block's KV and features into the store behind each slot's prefix, uncommitted.

        Args:
            block: made by the store's :meth:`~longdraft.memory.store.KVStore.block`.
            logits: the rows whose logits are computed; a number: so many of each sequence's last.
            check: look for NaN, which waits for the device. Not needed for drafts, nor before
                :func:`~longdraft.engine.accept.accept`, which checks for itself.
            fixed: attend in an order that depends on each row's rank alone.

        Raises:
            NumericalError: a computed logit is NaN.
            CapabilityError: queries are wanted of a model that does not show them; or as :meth:`refresh`.
        """
        if taps.queries and self.attends_itself:
            raise CapabilityError(
                f"{type(self.model).__name__} attends with code of its own, which does not show its queries: take a "
                "method that does not choose rows by attention scores, such as prompt-lookup or small-lm."
            )
        with self.lock:
            if self.twin.moved or self.store_kind != self._made_for:  # by a runner with the same twin
                self.refresh()
            kept = self._kept(taps, store)
            # A padded plain step is recorded at once: there are few sizes.
            replayed = self._replay(store, block, kept, fixed, fixed) if logits == "all" else None
            computed, hidden, queries = replayed or self._compute(store, block, logits, kept, fixed)
            out = TargetOutput(None if computed is None else computed.float(), queries=queries)
            store.write_features(hidden, block)
            out.hidden = {layer: hidden[layer] for layer in taps.hidden}
            # One reduction: a maximum is NaN if any term is. (-inf, as in a masked vocabulary, is allowed.)
            if check and out.logits is not None and bool(torch.isnan(out.logits.amax())):
                raise not_a_number(self.model)
            return out

    def verify(self, block: Block, store: KVStore, taps: Taps = NO_TAPS, last: int | None = None) -> TargetOutput:
        """One forward whose logits decide tokens: a plain step or a verification. Logits are not checked for NaN.

        With :attr:`rows`, forwards of that many rows, one or several.

        Args:
            last: of each sequence only so many rows, its last ones, need logits. Recorded forwards have those of all.
        """
        if self.rows is not None:
            return one_bucket.verify(self, block, store, taps)
        every = last is None or last >= block.size or self.graphs.recording
        return self.forward(block, store, logits="all" if every or last is None else last, taps=taps, check=False)

    def _kept(self, taps: Taps, store: KVStore) -> Taps:
        return Taps(tuple(sorted({*taps.hidden, *store.feature_layers})), taps.queries)

    def _replay(
        self, store: KVStore, block: Block, kept: Taps, now: bool = False, fixed: bool = False
    ) -> Computed | None:
        """A recorded forward over a block, recorded now if need be; None if there is none."""
        if self.clock is not None:
            return None

        def compute(store: KVStore, block: Block) -> Computed:
            return self._compute(store, block, "all", kept, fixed)

        # A recording holds the addresses of one twin's weights.
        return self.graphs.run(store, block, (kept, self.twin.number, fixed), compute, now)

    @torch.inference_mode()
    def record(
        self, store: KVStore, rows: int, taps: Taps = NO_TAPS, done: Callable[[float], None] = lambda share: None
    ) -> int:
        """Records forwards of up to ``rows`` rows before they are needed, where forwards are recorded.

        Args:
            store: its memory is recorded for; rows behind the committed ones are overwritten.
            taps: as the forwards will have.
            done: called with the share of the work that is over.

        Returns:
            The number of sizes.
        """
        with self.lock:
            sizes, kept = self.graphs.sizes(store, self.rows or rows), self._kept(taps, store)
            if self.rows is not None:
                sizes = [size for size in sizes if size[0] * size[1] == self.rows]
            for i, (batch, size, length) in enumerate(sizes):
                done(i / len(sizes))
                zeros = [[0] * size] * batch
                slots, lengths = range(batch), [length] * batch
                block = Block.make(slots, lengths, size, device=self.device, tokens=zeros, positions=zeros)
                self._replay(store, block, kept, True, self.rows is not None)
            done(1.0)
            return len(sizes)

    def _compute(
        self,
        store: KVStore,
        block: Block,
        logits: int | Literal["all", "last", "none"],
        taps: Taps,
        fixed: bool = False,
    ) -> Computed:
        """Logits in the model's dtype, hidden states and queries of a block."""
        attend = fixed_order.attend if fixed else self.attend
        hosted = hosting.Hosted(
            store,
            replace(block),  # a copy: a recording must contain what attention derives from the block
            attend if self.clock is None else self.clock.attending(attend),
            self.twin.layout,
            frozenset(taps.queries),
            frozenset(taps.hidden),
            self.clock is None and self.twin.fused.take(store, block),
        )
        if hosted.fused and self.twin.fused.stack is not None:
            return self.twin.fused.run(hosted, logits), hosted.hidden, hosted.queries
        if logits == "none":
            self.twin.run(hosted, head=False)
            return None, hosted.hidden, hosted.queries
        last = logits if isinstance(logits, int) else int(logits == "last")  # 0: all of them
        out = self.twin.run(hosted, head=True, logits_to_keep=0 if last > 1 and self.attends_itself else last)
        # Some models do not know logits_to_keep.
        return out.logits[:, -last:], hosted.hidden, hosted.queries
