"""TargetRunner: one forward of the target over a block of tokens, a chain or a tree, for every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from transformers import PreTrainedModel

from longdraft.attention import dispatch, prefix
from longdraft.attention.block import Block
from longdraft.attention.transfer import on_device
from longdraft.errors import NumericalError, UnsupportedModelError
from longdraft.few_rows import FewRowsModule
from longdraft.kv import offload as offloading
from longdraft.kv.offload import Offload
from longdraft.kv.store import KVStore
from longdraft.target import hosting
from longdraft.target.fused import FusedLayers
from longdraft.target.graphs import Computed, Graphs
from longdraft.target.parts import SharedParts, shared_parts


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
            are all full attention. It is used as it is and left as it was.
        offload: where its stores keep keys and values; see :func:`longdraft.kv.offload.parse`.

    Attributes:
        attention_path: name of the attention path that this machine uses.
        prefix_attend: attention of a drafter's queries to committed KV, on the same path.

    Raises:
        UnsupportedModelError: when it cannot be hosted exactly, naming what stands in the way.
        CapabilityError: when its device cannot offload that way.
    """

    def __init__(self, model: PreTrainedModel, offload: Offload = None) -> None:
        hosting.check_supported(model)
        offloading.check(offload, model.device)
        self.offload = offload
        self.model = model.eval()
        self.kv_shape = hosting.kv_shape(model)
        self.context_length = hosting.context_length(model)
        self.device: torch.device = model.device
        self._few_rows = FewRowsModule(model)
        self._fused = FusedLayers(model)
        self.attention_path, self._attend = dispatch.resolve(self.device, self.kv_shape.dtype, self.kv_shape.head_dim)
        self.prefix_attend: prefix.PrefixAttend = prefix.resolve(self.attention_path)
        self._graphs = Graphs.on(self.device, self.attention_path)

    @cached_property
    def parts(self) -> SharedParts:
        """What a trained draft shares with this target.

        Raises:
            UnsupportedModelError: where the target takes no trained drafts.
        """
        return shared_parts(self.model)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def fingerprint(self) -> str:
        """Names this target in snapshots."""
        return hosting.fingerprint(self.model)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the model's generation config; empty when it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            return frozenset()
        return frozenset(int(i) for i in ids) if isinstance(ids, (list, tuple)) else frozenset({int(ids)})

    def new_store(
        self, slots: int, capacity: int, feature_layers: tuple[int, ...] = (), resident: bool = False
    ) -> KVStore:
        """An empty KV store of this target's shape, laid out as its attention path likes it.

        Args:
            feature_layers: decoder layers whose output hidden states every forward shall leave in it.
            resident: keep it on the device even where stores are offloaded: a small one that every round reads.

        Raises:
            MemoryBudgetError: when it does not fit.
            CheckpointError: no file can be made in the folder to offload to.
        """
        self._fused.look()
        transposed = dispatch.prefers_transposed_keys(self.attention_path, self.kv_shape.dtype)
        size = int(hosting.decoder_config(self.model).hidden_size)
        offload = None if resident else self.offload
        return offloading.new_store(
            offload,
            self.kv_shape,
            slots,
            capacity + self._graphs.padding,
            self.device,
            transposed,
            feature_layers,
            size,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[Sequence[int]] | torch.Tensor,
        store: KVStore,
        slots: Sequence[int],
        *,
        bases: Sequence[int] | None = None,
        depths: Sequence[Sequence[int]] | None = None,
        mask: torch.Tensor | None = None,
        behind: int = 0,
        logits: Literal["all", "last", "none"] = "all",
        taps: Taps = NO_TAPS,
        check: bool = True,
    ) -> TargetOutput:
        """One forward. Writes the block's KV, and the features that the store keeps, behind each slot's prefix.

        Nothing of it is committed.

        Args:
            tokens: B rows of T token ids; a tensor (B, T) need not come from the device.
            slots: each row's slot; its prefix length is the slot's committed length.
            bases: position of each sequence's first row; None: its prefix length. They differ where a store holds a
                selection of the text's KV (SpecPV, section 3.2).
            depths: B rows of T depths in the tree; a node's position is its sequence's base + depth. None: a chain.
            mask: (B, T, behind + T) bool, the tree's ancestor mask. None: a chain.
            behind: rows of the same tree that earlier forwards have written behind the prefix: the block's lie behind
                them. A tree can so be fed level by level, each node once.
            logits: which rows' logits to compute.
            check: look for NaN, which waits for the device. A drafter's logits may be anything, and
            :func:`~longdraft.verify.acceptance.accept` looks for itself.

        Raises:
            NumericalError: when a computed logit is NaN.
        """
        size = len(tokens[0])
        store.check_room(slots, behind + size)
        lengths = [store.lengths[slot] for slot in slots]
        block = Block.make(slots, lengths, size, mask, self.device, behind)
        chain = range(behind, behind + size)
        starts = lengths if bases is None else bases
        positions = [[n + d for d in (chain if depths is None else depths[b])] for b, n in enumerate(starts)]
        ids, places = on_device(tokens, self.device), on_device(positions, self.device)
        kept = Taps(tuple(sorted({*taps.hidden, *store.feature_layers})), taps.queries)

        def compute(block: Block, ids: torch.Tensor, places: torch.Tensor) -> Computed:
            return self._compute(store, block, ids, places, logits, kept)

        found = None
        if logits == "all":
            # With the weights' place: those of a model that was moved lie elsewhere.
            kind = (kept, self.model.get_input_embeddings().weight.data_ptr())
            found = self._graphs.run(store, block, ids, places, kind, compute)
        found_logits, hidden, queries = found or compute(block, ids, places)
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
        ids: torch.Tensor,
        places: torch.Tensor,
        logits: Literal["all", "last", "none"],
        taps: Taps,
    ) -> Computed:
        """Logits in the model's dtype, hidden states and queries of a block of ids (B, T) at places (B, T).

        Raises:
            UnsupportedModelError: not all layers go through the attention interface.
        """
        hosted = hosting.Hosted(store, block, self._attend, frozenset(taps.queries))
        inputs = {"input_ids": ids, "position_ids": places, "use_cache": False, "longdraft_hosted": hosted}
        found = None
        with (
            hosting.hosting(self.model),
            self._few_rows.serving(ids.numel()),
            self._fused.serving(hosted),
            hosting.tapped(self.model, taps.hidden) as hidden,
        ):
            if logits == "none":
                self.model.get_decoder()(**inputs)
            else:
                # The model's own head: scaled or capped logits come out as the model means them.
                keep = 1 if logits == "last" else 0
                found = self.model(**inputs, logits_to_keep=keep).logits
        if hosted.layers_seen != self.kv_shape.layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} sent {hosted.layers_seen} of its {self.kv_shape.layers} layers through "
                "the attention interface; the others (linear attention, state space?) cannot be hosted exactly."
            )
        return found, hidden, hosted.queries
