"""CUDA graphs: records forwards of few rows (verifications, levels of drafts) once for each size and replays them.

A forward of a few rows launches some hundred small kernels, which takes the host longer than the device needs to run
them. A recorded forward is one launch. It reads tokens, positions, mask, slots and lengths from buffers that are filled
before each replay. A size is a number of sequences, a number of rows, and an upper bound on the texts' lengths, by
which attention kernels split their work. Each is rounded up, so that there are few sizes:

    rows        one of :data:`CAPTURE_SIZES`; no row attends to padded rows, and their results are cut off
    sequences   a power of two, or all slots; added ones see the first rows of another and write where nobody reads
    bound       a power of two, so that the work follows the text and not the store's capacity

A forward can be recorded only with an attention path that reads lengths on the device. If recording a size fails, that
size is computed as usual. Models with windows or recurrent states are never recorded: their rows move, or are computed
one after another, by numbers of the host.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from longdraft.attention.dispatch import CAPTURABLE_PATH
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.transfer import copy_to_buffer
from longdraft.errors import reason_of
from longdraft.memory.store import KVStore

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_GRAPHS"
# Numbers of rows that trees are padded to. LongSpec's tree has 69; larger blocks keep the device busy anyway.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96)
# A size is recorded after this number of uses, as recording takes two forwards.
USES_BEFORE_CAPTURE = 2
# Most recordings of one store, and bytes of their results together, mostly logits: each keeps its own.
MAX_GRAPHS, MAX_OUTPUT_BYTES = 64, 1 << 30
# The smallest bound on texts' lengths: shorter ones keep a GPU no busier.
MIN_KV_BOUND = 4096

# Logits (B, T, V), hidden states by layer (B, T, hidden) and queries by layer (B, Hq, T, d) of a block.
ForwardResults = tuple[torch.Tensor | None, dict[int, torch.Tensor], dict[int, torch.Tensor]]
# A forward over a block, on a store.
ForwardFn = Callable[[KVStore, ForwardBatch], ForwardResults]
# A draft's forward over its inputs.
DraftForwardFn = Callable[..., tuple[torch.Tensor, ...]]
Out = TypeVar("Out")


class GraphBackend(Protocol):
    """Records and replays; tests have a stand-in."""

    def capture(self, forward: Callable[[], Out]) -> Callable[[], Out]:
        """Runs ``forward`` to warm it up, and records it.

        Returns:
            A function that repeats the work on the tensors' present contents, with results in the same tensors.
        """


class CudaGraphBackend:
    """Records on a GPU. All recordings share their memory, as they are never replayed side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all, as libraries keep a workspace for each.
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, forward: Callable[[], Out]) -> Callable[[], Out]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
            stream, present = self._stream, torch.cuda.current_stream(self._device)
            stream.wait_stream(present)
            with torch.cuda.stream(stream):
                forward()  # compiles kernels and lets libraries allocate memory, neither of which may be recorded
            present.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                out = forward()

        def replay() -> Out:
            graph.replay()
            return out

        return replay


def unavailable_reason(device: torch.device, path: str) -> str | None:
    """The reason why forwards are not recorded with this attention path; None if they are."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 switches them off"
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, the model is on {device}"
    if path != CAPTURABLE_PATH:
        return f"the {path} attention takes lengths from the host; LONGDRAFT_ATTENTION={CAPTURABLE_PATH} does not"
    return None


class CudaGraphs:
    """The recorded forwards of one target.

    Args:
        recorder: records them; with None nothing is recorded.
        uses: number of uses after which a size is recorded.
        most: largest number of recordings of one store, or of a draft's window.
        shortest: the smallest bound on lengths.
    """

    def __init__(
        self,
        backend: GraphBackend | None,
        uses_before_capture: int = USES_BEFORE_CAPTURE,
        max_graphs: int = MAX_GRAPHS,
        min_kv_bound: int = MIN_KV_BOUND,
    ) -> None:
        self._recorder, self._uses, self._most, self._shortest = backend, uses_before_capture, max_graphs, min_kv_bound
        # What owns the tensors that recordings use -> size -> its recording, or number of uses so far.
        self._known: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()

    @classmethod
    def for_device(cls, device: torch.device, path: str) -> CudaGraphs:
        """The graphs of a target on a device; see :func:`unavailable_reason`."""
        reason = unavailable_reason(device, path)
        if device.type == "cuda":
            logger.info("CUDA graphs: %s", "verifications are recorded" if reason is None else f"none, {reason}")
        return cls(CudaGraphBackend(device) if reason is None else None)

    @property
    def enabled(self) -> bool:
        """True if forwards are recorded."""
        return self._recorder is not None

    def extra_kv_entries(self, slots: int) -> int:
        """Additional rows of a slot, so that padded trees fit, and rows of padded sequences behind them."""
        if self._recorder is None:
            return 0
        return max(b - a - 1 for a, b in itertools.pairwise(CAPTURE_SIZES)) + (CAPTURE_SIZES[-1] if slots > 2 else 0)

    def padded_query_len(self, query_len: int) -> int | None:
        """The number of rows that ``query_len`` rows are padded to; None if they are not recorded."""
        return None if self._recorder is None else next((b for b in CAPTURE_SIZES if b >= query_len), None)

    def kv_bound(self, max_kv_len: int, capacity: int) -> int:
        """The bound on the lengths of texts of up to ``max_kv_len`` rows, in slots of ``capacity`` rows."""
        return min(max(self._shortest, 1 << max(0, max_kv_len - 1).bit_length()), capacity)

    def run(
        self, store: KVStore, block: ForwardBatch, kind: Hashable, forward: ForwardFn, capture_now: bool = False
    ) -> ForwardResults | None:
        """Replays a forward over a block; None if it has to be computed as usual.

        Args:
            kind: everything else that ``forward`` depends on, such as its results and weights.
            capture_now: record it if it is not recorded yet, however rarely it was used.
            forward: the forward. A recording outlives the store, whose memory the next one takes.

        Returns:
            The results of ``forward``, in new tensors, with logits in float32.
        """
        found = self._size(store, block)
        if found is None:
            return None
        batch, rows, bound = found
        key = (batch, rows, bound, block.tree_offset, kind, store.keys.data_ptr(), store.values.data_ptr())
        recording: _Recorded | None = self._find(
            store.arena_buffers or store,
            key,
            0 if capture_now else self._uses,
            lambda recorder: _Recorded(recorder, store, batch, rows, bound, block, forward),
        )
        return None if recording is None else recording(block)

    def capture_sizes(self, store: KVStore, max_query_len: int) -> list[tuple[int, int, int]]:
        """Sequences, rows and text length of all sizes of up to ``padded_query_len`` rows, as many as are kept.

        Short texts come first, and of those the largest forwards: smaller ones then use the same memory again.
        """
        if self._recorder is None or not store.is_resident:
            return []
        most = self.padded_query_len(min(max_query_len, CAPTURE_SIZES[-1])) or 0
        buckets = [b for b in CAPTURE_SIZES if b <= most]
        longest = store.capacity - 2 * most
        bounds = [self.kv_bound(1, store.capacity)]
        while bounds[-1] < longest:
            bounds.append(self.kv_bound(bounds[-1] + 1, store.capacity))
        found = itertools.product(bounds, reversed(batch_sizes(store.slots)), reversed(buckets))
        return [(batch, size, max(0, min(bound, longest))) for bound, batch, size in found][: self._most]

    def _size(self, store: KVStore, block: ForwardBatch) -> tuple[int, int, int] | None:
        """Sequences, rows and bound of the recording for a block; None if there is none."""
        rows = self.padded_query_len(block.query_len)
        # Other stores move keys and values during a forward, by lengths on the host.
        if rows is None or not store.is_resident:
            return None
        # A recording is for one offset. Chains repeat their offsets, trees rarely do.
        if not block.batch_size or (block.tree_offset and block.query_len > 1):
            return None
        longest = max(block.prefix_lens)
        end = longest + block.tree_offset + rows
        if end > store.capacity:
            return None
        # The last rows of a slot take what padded sequences write.
        batch = block.batch_size if end + rows > store.capacity else padded_batch_size(block.batch_size, store.slots)
        return batch, rows, self.kv_bound(longest, store.capacity)

    def run_draft(
        self,
        owner: object,
        kind: Hashable,
        size: tuple[int, int],
        make_inputs: Callable[[], Sequence[torch.Tensor]],
        forward: DraftForwardFn,
    ) -> tuple[torch.Tensor, ...] | None:
        """Replays a draft's forward over a level; None if it has to be computed as usual.

        Args:
            holder: owns the other tensors that ``forward`` reads and writes, and never replaces them.
            kind: everything else that ``forward`` depends on.
            size: sequences and rows that the level is padded to.
            inputs: makes the inputs. The first is (B, W, ...); others may have more sequences or rows already.
            compute: the forward, from tensors like the inputs, of the padded size, to tensors (B, W, ...).

        Returns:
            The results of ``forward``, of the size of the first input, in new tensors.
        """
        given: list[torch.Tensor] = []

        def record(recorder: GraphBackend) -> _Level:
            given.extend(make_inputs())
            return _Level(recorder, size, given, forward)

        recording: _Level | None = self._find(owner, (kind, size), self._uses, record)
        return None if recording is None else recording(given or make_inputs())

    def _find(self, holder: object, key: Hashable, uses: int, record: Callable[[GraphBackend], Any]) -> Any | None:
        """The recording of a size, old or new; None if the size was used too rarely, or could not be recorded."""
        if self._recorder is None:
            return None
        sizes = self._known.setdefault(holder, {})
        recording = sizes.pop(key, 0)  # and put back at the end, so that the least recently used comes first
        if isinstance(recording, int):
            recording = recording + 1 if recording < uses else _recorded(self._recorder, record)
        sizes[key] = recording
        made = [(old, each) for old, each in sizes.items() if isinstance(each, _Level | _Recorded)]
        while len(made) > 1 and (len(made) > self._most or sum(each.bytes for _, each in made) > MAX_OUTPUT_BYTES):
            del sizes[made.pop(0)[0]]
        return None if isinstance(recording, int) else recording


def _recorded(recorder: GraphBackend, record: Callable[[GraphBackend], Any]) -> Any | None:
    """A new recording; None if it fails, and then this size is not tried again."""
    try:
        return record(recorder)
    except Exception as error:  # a model, a driver or a library can raise any type
        logger.warning("A forward could not be recorded as a CUDA graph (%s): its size runs without.", reason_of(error))
        return None


def padded_batch_size(batch: int, slots: int) -> int:
    """The number of sequences that ``batch`` are padded to: a power of two, ``slots`` at most."""
    return min(1 << (batch - 1).bit_length(), max(batch, slots))


def batch_sizes(slots: int) -> list[int]:
    """All numbers that :func:`padded_batch_size` returns, the smallest first."""
    return sorted({padded_batch_size(n, slots) for n in range(1, slots + 1)})


class _Level:
    """The recording of one size of a draft's level, with its input buffers.

    Attributes:
        bytes: size of the results that it keeps.
    """

    bytes = 0

    def __init__(
        self, recorder: GraphBackend, size: tuple[int, int], inputs: Sequence[torch.Tensor], compute: DraftForwardFn
    ) -> None:
        batch, rows = size
        width = inputs[0].shape[1]
        self._inputs = [
            x.new_zeros(batch, *((rows, *x.shape[2:]) if x.dim() > 1 and x.shape[1] == width else x.shape[1:]))
            for x in inputs
        ]
        self._fill(inputs)  # before the first forward, which writes keys and values at the places in the buffers

        def computed() -> tuple[torch.Tensor, ...]:
            out = compute(*self._inputs)
            self.bytes = _bytes_of(out)
            return out

        self._replay = recorder.capture(computed)

    def _fill(self, inputs: Sequence[torch.Tensor]) -> None:
        for buffer, x in zip(self._inputs, inputs, strict=True):
            part = buffer[: x.shape[0]]
            (part if x.dim() == 1 else part[:, : x.shape[1]]).copy_(x)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._fill(inputs)
        batch, width = inputs[0].shape[:2]
        # Copies, as the next replay overwrites the results.
        return tuple(x[:batch, :width].clone() for x in self._replay())


class _Recorded:
    """The recording of one size of a block, with its input buffers, made with a first block.

    Attributes:
        bytes: size of the results that it keeps.
    """

    bytes = 0

    def __init__(
        self,
        recorder: GraphBackend,
        store: KVStore,
        batch: int,
        rows: int,
        bound: int,
        block: ForwardBatch,
        compute: ForwardFn,
    ) -> None:
        device = store.device
        self._tokens, self._positions = torch.zeros(2, batch, rows, dtype=torch.long, device=device)
        diagonal = torch.eye(rows, dtype=torch.bool, device=device)
        self._diagonal = torch.nn.functional.pad(diagonal, (block.tree_offset, 0))
        self._mask = self._diagonal.repeat(batch, 1, 1)
        self._numbers = torch.zeros(3, batch, dtype=torch.int32, device=device)
        self._spare = store.capacity - rows
        slots_t, lengths_t, into_t = self._numbers.unbind()
        self._block = ForwardBatch(
            # Slots that do not exist, so that an attention path that reads numbers on the host fails.
            slots=(-1,) * batch,
            prefix_lens=(min(bound, store.capacity - block.tree_offset - rows),) * batch,
            query_len=rows,
            mask=self._mask,
            slots_t=slots_t,
            prefix_lens_t=lengths_t,
            token_ids=self._tokens,
            positions=self._positions,
            tree_offset=block.tree_offset,
            is_captured=True,
            write_starts_t=into_t,
        )
        self._fill(block)  # before the first forward, which writes keys and values at the places in the buffers

        memory = copy(store)  # the same tensors; the store itself, and at last its room, are free to go
        memory.arena_buffers = None

        def computed() -> ForwardResults:
            logits, hidden, queries = out = compute(memory, self._block)
            self.bytes = _bytes_of(x for x in (logits, *hidden.values(), *queries.values()) if x is not None)
            return out

        self._replay = recorder.capture(computed)

    def _fill(self, block: ForwardBatch) -> None:
        count, size = block.batch_size, block.query_len
        assert block.token_ids is not None and block.positions is not None
        # Padded rows and sequences may have any tokens and positions.
        self._tokens[:count, :size] = block.token_ids
        self._positions[:count, :size] = block.positions
        self._mask.copy_(self._diagonal)
        mask = block.tree_mask(0, self._mask.device) if block.mask is None else block.mask
        self._mask[:count, :size, : block.tree_len] = mask
        # Padded sequences see the first rows of the first one, for these have numbers; and no prefix.
        more = len(self._tokens) - count
        slots, lengths = [*block.slots, *block.slots[:1] * more], [*block.prefix_lens, *(0,) * more]
        into = [*(n + block.tree_offset for n in block.prefix_lens), *(self._spare,) * more]
        copy_to_buffer(self._numbers, [slots, lengths, into])

    def __call__(self, block: ForwardBatch) -> ForwardResults:
        self._fill(block)
        logits, hidden, queries = self._replay()
        batch, size = block.batch_size, block.query_len
        # Copies, as the next replay overwrites the results.
        return (
            None if logits is None else logits[:batch, :size].to(torch.float32, copy=True),
            _copied({layer: h[:batch, :size] for layer, h in hidden.items()}),
            _copied({layer: q[:batch, :, :size] for layer, q in queries.items()}),
        )


def _copied(results: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies of the layers' results, in one launch if all have one shape."""
    if len({x.shape for x in results.values()}) != 1:
        return {layer: x.clone() for layer, x in results.items()}
    return dict(zip(results, torch.stack(list(results.values())).unbind(), strict=True))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
