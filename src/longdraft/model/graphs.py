"""CUDA graphs: records forwards of few rows (verifications, levels of drafts) once for each size and replays them.

A forward of a few rows launches some hundred small kernels, which takes the host longer than the device needs to run
them. A recorded forward is one launch. It reads tokens, positions, mask, slots and lengths from buffers that are filled
before each replay. Trees and levels are padded to one of a few sizes; no row attends to padded rows, and their results
are cut off.

A forward can be recorded only with an attention path that reads lengths on the device. If recording fails, the forward
is computed as usual.
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
# Numbers of rows that trees are padded to. LongSpec's tree has 69; larger blocks keep the device busy anyway.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96)
# A size is recorded after this number of uses, as recording takes two forwards.
USES = 2
# Largest number of recordings of one store: each keeps its outputs, mostly logits.
MOST = 16

# Logits (B, T, V), hidden states by layer (B, T, hidden) and queries by layer (B, Hq, T, d) of a block.
Computed = tuple[torch.Tensor | None, dict[int, torch.Tensor], dict[int, torch.Tensor]]
# A forward over a block.
Compute = Callable[[Block], Computed]
# A draft's forward over its inputs.
ComputeLevel = Callable[..., tuple[torch.Tensor, ...]]
Out = TypeVar("Out")


class Recorder(Protocol):
    """Records and replays; tests have a stand-in."""

    def capture(self, compute: Callable[[], Out]) -> Callable[[], Out]:
        """Runs ``compute`` to warm it up, and records it.

        Returns:
            A function that repeats the work on the tensors' present contents, with results in the same tensors.
        """


class CudaRecorder:
    """Records on a GPU. All recordings share their memory, as they are never replayed side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all, as libraries keep a workspace for each.
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, compute: Callable[[], Out]) -> Callable[[], Out]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
            stream, present = self._stream, torch.cuda.current_stream(self._device)
            stream.wait_stream(present)
            with torch.cuda.stream(stream):
                compute()  # compiles kernels and lets libraries allocate memory, neither of which may be recorded
            present.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                out = compute()

        def replay() -> Out:
            graph.replay()
            return out

        return replay


def unavailable(device: torch.device, path: str) -> str | None:
    """The reason why forwards are not recorded with this attention path; None if they are."""
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
        recorder: records them; with None nothing is recorded.
        uses: number of uses after which a size is recorded.
        most: largest number of recordings of one store, or of a draft's window.
    """

    def __init__(self, recorder: Recorder | None, uses: int = USES, most: int = MOST) -> None:
        self._recorder, self._uses, self._most = recorder, uses, most
        # Store or window, whose tensors the recordings use -> size -> its recording, or number of uses so far.
        self._known: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()

    @classmethod
    def on(cls, device: torch.device, path: str) -> Graphs:
        """The graphs of a target on a device; see :func:`unavailable`."""
        reason = unavailable(device, path)
        if device.type == "cuda":
            logger.info("CUDA graphs: %s", "verifications are recorded" if reason is None else f"none, {reason}")
        return cls(CudaRecorder(device) if reason is None else None)

    @property
    def recording(self) -> bool:
        """True if forwards are recorded."""
        return self._recorder is not None

    @property
    def padding(self) -> int:
        """Additional rows of a slot, so that padded trees fit."""
        return 0 if self._recorder is None else max(b - a - 1 for a, b in itertools.pairwise(BUCKETS))

    def run(self, store: KVStore, block: Block, kind: Hashable, compute: Compute) -> Computed | None:
        """Replays a forward over a block; None if it has to be computed as usual.

        Args:
            kind: everything else that ``compute`` depends on, such as its results and weights.
            compute: the forward.

        Returns:
            The results of ``compute``, in new tensors, with logits in float32.
        """
        rows = self.rows(block.size)
        # Other stores move keys and values during a forward, by lengths on the host.
        if self._recorder is None or rows is None or type(store) is not KVStore:
            return None
        # A recording is for one offset. Chains repeat their offsets, trees rarely do.
        if not block.batch or (block.offset and block.size > 1):
            return None
        if any(n + block.offset + rows > store.capacity for n in block.lengths):
            return None
        key = (block.batch, rows, block.offset, kind, store.keys.data_ptr(), store.values.data_ptr())
        recording: _Recorded | None = self._find(store, key, lambda r: _Recorded(r, store, rows, block, compute))
        return None if recording is None else recording(block)

    def rows(self, width: int) -> int | None:
        """The number of rows that ``width`` rows are padded to; None if they are not recorded."""
        return None if self._recorder is None else next((b for b in BUCKETS if b >= width), None)

    def level(
        self, holder: object, kind: Hashable, rows: int, inputs: Sequence[torch.Tensor], compute: ComputeLevel
    ) -> tuple[torch.Tensor, ...] | None:
        """Replays a draft's forward over a level; None if it has to be computed as usual.

        Args:
            holder: owns the other tensors that ``compute`` reads and writes, and never replaces them.
            kind: everything else that ``compute`` depends on.
            rows: :meth:`rows` of the level's width W.
            inputs: the first is (B, W, ...); others with W rows are padded too, and any other shape is allowed.
            compute: the forward, from tensors like the inputs to tensors (B, W, ...).

        Returns:
            The results of ``compute``, in new tensors.
        """
        key = (kind, rows, *(x.shape[:1] + x.shape[2:] for x in inputs))
        recording: _Level | None = self._find(holder, key, lambda r: _Level(r, rows, inputs, compute))
        return None if recording is None else recording(inputs)

    def _find(self, holder: object, key: Hashable, record: Callable[[Recorder], Any]) -> Any | None:
        """The recording of a size, old or new; None if the size was used too rarely, or recording fails."""
        if self._recorder is None:
            return None
        sizes = self._known.setdefault(holder, {})
        recording = sizes.pop(key, 0)  # and put back at the end, so that the least recently used comes first
        if isinstance(recording, int) and recording < self._uses:
            sizes[key] = recording + 1
            return None
        if isinstance(recording, int):
            try:
                recording = record(self._recorder)
            except Exception as error:  # a model, a driver or a library can raise any type
                logger.warning("CUDA graphs are off for this model (%s): it runs without.", reason_of(error))
                self._recorder = None
                self._known.clear()
                return None
        sizes[key] = recording
        recorded = [k for k, x in sizes.items() if not isinstance(x, int)]
        for old in recorded[: max(0, len(recorded) - self._most)]:
            del sizes[old]
        return recording


class _Level:
    """The recording of one size of a draft's level, with its input buffers."""

    def __init__(self, recorder: Recorder, rows: int, inputs: Sequence[torch.Tensor], compute: ComputeLevel) -> None:
        width = inputs[0].shape[1]
        self._inputs = [
            x.new_zeros(x.shape[0], rows, *x.shape[2:]) if x.dim() > 1 and x.shape[1] == width else torch.empty_like(x)
            for x in inputs
        ]
        self._fill(inputs)  # before the first forward, which writes keys and values at the places in the buffers
        self._replay = recorder.capture(lambda: compute(*self._inputs))

    def _fill(self, inputs: Sequence[torch.Tensor]) -> None:
        for buffer, x in zip(self._inputs, inputs, strict=True):
            (buffer if buffer.shape == x.shape else buffer[:, : x.shape[1]]).copy_(x)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._fill(inputs)
        # Copies, as the next replay overwrites the results.
        return tuple(x[:, : inputs[0].shape[1]].clone() for x in self._replay())


class _Recorded:
    """The recording of one size of a block, with its input buffers, made with a first block."""

    def __init__(self, recorder: Recorder, store: KVStore, rows: int, block: Block, compute: Compute) -> None:
        device = store.device
        self._tokens, self._positions = torch.zeros(2, block.batch, rows, dtype=torch.long, device=device)
        diagonal = torch.eye(rows, dtype=torch.bool, device=device)
        self._diagonal = torch.nn.functional.pad(diagonal, (block.offset, 0))
        self._mask = self._diagonal.repeat(block.batch, 1, 1)
        self._block = Block(
            # Slots that do not exist, so that an attention path that reads numbers on the host fails.
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
        self._fill(block)  # before the first forward, which writes keys and values at the places in the buffers
        self._replay = recorder.capture(lambda: compute(self._block))

    def _fill(self, block: Block) -> None:
        size = block.size
        assert block.tokens is not None and block.positions is not None
        # Padded rows may have any tokens and positions.
        self._tokens[:, :size] = block.tokens
        self._positions[:, :size] = block.positions
        self._mask.copy_(self._diagonal)
        mask = block.block_mask(0, self._mask.device) if block.mask is None else block.mask
        self._mask[:, :size, : block.width] = mask
        self._block.slots_t.copy_(block.slots_t)
        self._block.lengths_t.copy_(block.lengths_t)

    def __call__(self, block: Block) -> Computed:
        self._fill(block)
        logits, hidden, queries = self._replay()
        size = block.size
        # Copies, as the next replay overwrites the results.
        return (
            None if logits is None else logits[:, :size].to(torch.float32, copy=True),
            {layer: h[:, :size].clone() for layer, h in hidden.items()},
            {layer: q[:, :, :size].clone() for layer, q in queries.items()},
        )
