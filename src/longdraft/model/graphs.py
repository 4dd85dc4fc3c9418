"""CUDA graphs: forwards of few rows, verifications and levels of drafts, recorded once a size and replayed.

A forward of a few rows asks the device for some hundred small computations, and asking takes the host longer than the
device needs for them. A recorded forward is asked for at once. What it reads stays where it was recorded: tokens,
positions, mask, slots and lengths lie in buffers that are filled anew before each replay, and trees and levels are
padded to one of a few sizes. Nobody sees a padded row, and nothing of it is handed out.

Only a forward whose shapes do not follow from lengths on the host can be recorded, so only with an attention path that
reads lengths on the device. Whatever fails here, the forward is computed as it is without.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from longdraft.attention.block import Block
from longdraft.attention.dispatch import CAPTURABLE
from longdraft.errors import reason_of
from longdraft.memory.store import KVStore

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_GRAPHS"
# Rows that trees are padded to. LongSpec's tree has 69; larger blocks keep the device busy without a graph.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96)
# A size that comes up less often than this in a store is not worth recording: that takes two forwards.
USES = 2
# Recorded sizes of one store, or of a draft's window. Each holds its outputs, the logits above all; what it computes
# with is shared.
MOST = 16

# Logits (B, T, V), hidden states by layer (B, T, hidden) and queries by layer (B, Hq, T, d) of a block.
Computed = tuple[torch.Tensor | None, dict[int, torch.Tensor], dict[int, torch.Tensor]]
# What a forward computes of a block.
Compute = Callable[[Block], Computed]
# What a draft's forward computes of its inputs.
ComputeLevel = Callable[..., tuple[torch.Tensor, ...]]
Out = TypeVar("Out")


class Recorder(Protocol):
    """What records and replays; a stand-in in tests."""

    def capture(self, compute: Callable[[], Out]) -> Callable[[], Out]:
        """Runs ``compute`` to warm it up, and records it.

        Returns:
            Replays it: the same work on what the tensors hold by then. The results lie in the same tensors each time.
        """


class CudaRecorder:
    """Records on a GPU. All recordings share their memory: they are never replayed side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all: libraries keep a workspace for each.
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, compute: Callable[[], Out]) -> Callable[[], Out]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
            stream, present = self._stream, torch.cuda.current_stream(self._device)
            stream.wait_stream(present)
            with torch.cuda.stream(stream):
                compute()  # kernels are compiled and libraries take their memory now: neither may be recorded
            present.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads ask of the device meanwhile is their own business.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                out = compute()

        def replay() -> Out:
            graph.replay()
            return out

        return replay


def unavailable(device: torch.device, path: str) -> str | None:
    """Why forwards are not recorded here; None when they are.

    Args:
        path: name of the attention path in use.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 switches them off"
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, the model is on {device}"
    if path not in CAPTURABLE:
        return f"the {path} attention takes lengths from the host; LONGDRAFT_ATTENTION={CAPTURABLE[0]} does not"
    return None


class Graphs:
    """The recorded forwards of one target.

    Args:
        recorder: what records them; None: nothing is recorded.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        # By what the recordings read and write, and go with: how often a size came up, or its recording.
        self._known: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()

    @classmethod
    def on(cls, device: torch.device, path: str) -> Graphs:
        """Those of a target on a device; see :func:`unavailable`."""
        reason = unavailable(device, path)
        if device.type == "cuda":
            logger.info("CUDA graphs: %s", "verifications are recorded" if reason is None else f"none, {reason}")
        return cls(CudaRecorder(device) if reason is None else None)

    @property
    def recording(self) -> bool:
        """Whether forwards are recorded."""
        return self._recorder is not None

    @property
    def padding(self) -> int:
        """Rows more that a slot should have, so that the largest trees still fit when they are padded."""
        return 0 if self._recorder is None else max(b - a - 1 for a, b in itertools.pairwise(BUCKETS))

    def run(
        self,
        store: KVStore,
        block: Block,
        kind: Hashable,
        compute: Compute,
    ) -> Computed | None:
        """A forward over a block, replayed; or None where it has to be computed without.

        Args:
            block: with its numbers on the host.
            kind: all else that ``compute`` depends on: what it brings back, and which weights it reads.
            compute: the forward. It must depend on nothing else that changes.

        Returns:
            As ``compute`` does, logits in float32; tensors of the caller's own.
        """
        rows = next((b for b in BUCKETS if b >= block.size), None)
        # A store that moves keys and values about while a forward runs does so by the host's numbers.
        if self._recorder is None or rows is None or type(store) is not KVStore:
            return None
        # Behind earlier levels a recording is of one place: a chain's places come again, those of trees seldom.
        if not block.batch or (block.offset and block.size > 1):
            return None
        if any(n + block.offset + rows > store.capacity for n in block.lengths):
            return None
        key = (block.batch, rows, block.offset, kind, store.keys.data_ptr(), store.values.data_ptr())
        found: _Recorded | None = self._find(
            store, key, lambda recorder: _Recorded(recorder, store, rows, block, compute)
        )
        return None if found is None else found(block)

    def rows(self, width: int) -> int | None:
        """How many rows a draft's level of ``width`` is padded to; None: it is not recorded."""
        return None if self._recorder is None else next((b for b in BUCKETS if b >= width), None)

    def level(
        self, holder: object, kind: Hashable, rows: int, inputs: Sequence[torch.Tensor], compute: ComputeLevel
    ) -> tuple[torch.Tensor, ...] | None:
        """A draft's forward over a level, replayed; or None where it has to be computed without.

        Args:
            holder: what it reads and writes beside its inputs, in tensors that stay where they are as long as it lives.
            kind: all else that ``compute`` depends on.
            rows: as :meth:`rows` has it for the level's width.
            inputs: the first (B, W, ...), and others with W rows, which are padded; or of any other shape.
            compute: of such tensors, the forward: tensors (B, W, ...).

        Returns:
            As ``compute`` does; tensors of the caller's own.
        """
        key = (kind, rows, *(x.shape[:1] + x.shape[2:] for x in inputs))
        found: _Level | None = self._find(holder, key, lambda recorder: _Level(recorder, rows, inputs, compute))
        return None if found is None else found(inputs)

    def _find(self, holder: object, key: Hashable, record: Callable[[Recorder], Any]) -> Any | None:
        """What has been recorded of a size, now or before; None where it comes up too seldom, or recording fails."""
        if self._recorder is None:
            return None
        sizes = self._known.setdefault(holder, {})
        found = sizes.pop(key, 0)  # and put back behind the others: the first is the one not used for longest
        if isinstance(found, int) and found < USES:
            sizes[key] = found + 1
            return None
        if isinstance(found, int):
            try:
                found = record(self._recorder)
            except Exception as error:  # whatever a model, a driver or a library may not like about it
                logger.warning("CUDA graphs are off for this model (%s): it runs without.", reason_of(error))
                self._recorder = None
                self._known.clear()
                return None
        sizes[key] = found
        recorded = [k for k, x in sizes.items() if not isinstance(x, int)]
        for old in recorded[: max(0, len(recorded) - MOST)]:
            del sizes[old]
        return found


class _Level:
    """One recorded size of a draft's level, with the buffers that it reads."""

    def __init__(self, recorder: Recorder, rows: int, inputs: Sequence[torch.Tensor], compute: ComputeLevel) -> None:
        width = inputs[0].shape[1]
        self._inputs = [
            x.new_zeros(x.shape[0], rows, *x.shape[2:]) if x.dim() > 1 and x.shape[1] == width else torch.empty_like(x)
            for x in inputs
        ]
        self._fill(inputs)  # before anything is computed: a forward writes keys and values where they say
        self._replay = recorder.capture(lambda: compute(*self._inputs))

    def _fill(self, inputs: Sequence[torch.Tensor]) -> None:
        for own, x in zip(self._inputs, inputs, strict=True):
            (own if own.shape == x.shape else own[:, : x.shape[1]]).copy_(x)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._fill(inputs)
        # Copies: the next replay overwrites what this one brought.
        return tuple(x[:, : inputs[0].shape[1]].clone() for x in self._replay())


class _Recorded:
    """One recorded size, with the buffers that it reads; the arguments are the first block it is recorded with."""

    def __init__(
        self,
        recorder: Recorder,
        store: KVStore,
        rows: int,
        block: Block,
        compute: Compute,
    ) -> None:
        device = store.device
        self._tokens, self._positions = torch.zeros(2, block.batch, rows, dtype=torch.long, device=device)
        itself = torch.eye(rows, dtype=torch.bool, device=device)
        self._itself = torch.nn.functional.pad(itself, (block.offset, 0))
        self._mask = self._itself.repeat(block.batch, 1, 1)
        own = Block(
            # Slots that do not exist: who reads the host's numbers must not get by.
            slots=(-1,) * block.batch,
            lengths=(store.capacity - block.offset - rows,) * block.batch,
            size=rows,
            mask=self._mask,
            slots_t=torch.empty_like(block.slots_t),
            lengths_t=torch.empty_like(block.lengths_t),
            tokens=self._tokens,
            positions=self._positions,
            offset=block.offset,
            captured=True,
        )
        self._block = own
        # Before anything is computed: a forward writes keys and values where the buffers say.
        self._fill(block)
        self._replay = recorder.capture(lambda: compute(own))

    def _fill(self, block: Block) -> None:
        size = block.size
        assert block.tokens is not None and block.positions is not None
        # Padded rows keep tokens and positions of some earlier block: any will do.
        self._tokens[:, :size] = block.tokens
        self._positions[:, :size] = block.positions
        self._mask.copy_(self._itself)
        mask = block.block_mask(0, self._mask.device) if block.mask is None else block.mask
        self._mask[:, :size, : block.width] = mask
        self._block.slots_t.copy_(block.slots_t)
        self._block.lengths_t.copy_(block.lengths_t)

    def __call__(self, block: Block) -> Computed:
        self._fill(block)
        logits, hidden, queries = self._replay()
        size = block.size
        # Copies: the next replay overwrites what this one brought.
        return (
            None if logits is None else logits[:, :size].to(torch.float32, copy=True),
            {layer: h[:, :size].clone() for layer, h in hidden.items()},
            {layer: q[:, :, :size].clone() for layer, q in queries.items()},
        )
