"""Captures forwards of few tokens (verifications, draft levels, rounds) as CUDA graphs, and replays them by size.

A forward of few tokens launches hundreds of small kernels, and launching takes the host longer than the device needs to
run them. A replayed graph is one launch. It reads token ids, positions, mask, slots and lengths from buffers that are
filled before each replay. A size is (batch_size, query_len, KV bound), rounded up so that there are few graphs:

    query_len   one of :data:`CAPTURE_QUERY_LENS`; no token attends to padding tokens, whose results are cut off
    batch_size  a power of two, or all slots; padding sequences read the first sequence's slot, and write to scratch
    KV bound    2^k or 1.5 * 2^k, at or above the longest KV length; attention kernels split their work by it

Capture needs an attention path that reads lengths on the device. A size whose capture fails runs without a graph; if
it failed for lack of memory, it is tried again later.
Models with windows or recurrent states run without graphs, because their forwards depend on numbers on the host.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from longdraft.attention.dispatch import CAPTURABLE_PATH
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import reason_of
from longdraft.memory.store import KVStore
from longdraft.model.gpu.captured_forwards import (
    DraftForwardFn,
    DraftGraph,
    ForwardFn,
    ForwardResults,
    GraphBackend,
    Output,
    RoundFn,
    RoundGraph,
    RoundInputs,
    TargetGraph,
)
from longdraft.native.quantized_kv import KVTensor, QuantizedKV

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_GRAPHS"  # environment variable; 0: no graphs
# query_len of graphs, close together around LongSpec's tree of 69 nodes. More tokens keep the device busy anyway.
CAPTURE_QUERY_LENS = (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96)
USES_BEFORE_CAPTURE = 2  # uses of a size without a graph, because a capture takes the time of two forwards
USES_BEFORE_RETRY = 64  # uses of a size without a graph after a capture that lacked memory
# Limits for one store: the number of graphs, and bytes of the graphs' outputs (mostly logits), which stay allocated.
# One sequence up to 64K tokens has 9 KV bounds with 11 query_lens each.
MAX_GRAPHS, MAX_OUTPUT_BYTES = 128, 1 << 30
MIN_KV_BOUND = 4096  # the smallest KV bound: splitting fewer entries would not keep a GPU busier


class CudaGraphBackend:
    """Captures torch.cuda.CUDAGraph. All graphs share a memory pool, because they never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all captures, because libraries such as cuBLAS keep a workspace for each stream.
        self._stream: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def capture(self, forward: Callable[[], Output]) -> Callable[[], Output]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            stream, current = self._stream, torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                forward()  # kernels are compiled and libraries allocate here: a capture allows neither
            current.wait_stream(stream)
            # The pool ends with its last graph. Then the next graph makes a new one.
            pool = next((graph.pool() for graph in self._graphs), None)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the device during the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                out = forward()
            self._graphs.add(graph)

        def replay() -> Output:
            graph.replay()
            return out

        return replay


def unavailable_reason(device: torch.device, path: str) -> str | None:
    """Returns why a device with an attention path cannot use CUDA graphs; None if it can."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 switches them off"
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, the model is on {device}"
    if path != CAPTURABLE_PATH:
        return f"the {path} attention reads lengths on the host; set LONGDRAFT_ATTENTION={CAPTURABLE_PATH}"
    return None


class CudaGraphs:
    """The CUDA graphs of a target and its drafts.

    Args:
        backend: captures the graphs; None disables them.
        uses_before_capture: number of uses of a size before the size is captured.
        max_graphs: limit for the number of graphs of one store, or of one draft's cache.
        min_kv_bound: the smallest KV bound of a size.
    """

    def __init__(
        self,
        backend: GraphBackend | None,
        uses_before_capture: int = USES_BEFORE_CAPTURE,
        max_graphs: int = MAX_GRAPHS,
        min_kv_bound: int = MIN_KV_BOUND,
    ) -> None:
        self._backend, self._uses_before_capture = backend, uses_before_capture
        self._max_graphs, self._min_kv_bound = max_graphs, min_kv_bound
        # Owner of the captured tensors -> size -> graph; before the capture a count of uses (below 0 after one that
        # lacked memory), after one that failed otherwise None.
        self._graphs: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()

    @classmethod
    def for_device(cls, device: torch.device, path: str) -> CudaGraphs:
        """Makes the graphs for a target on a device; disabled if :func:`unavailable_reason` returns a reason."""
        reason = unavailable_reason(device, path)
        if device.type == "cuda":
            logger.info("CUDA graphs: %s", "verifications are captured" if reason is None else f"none, {reason}")
        return cls(CudaGraphBackend(device) if reason is None else None)

    @property
    def enabled(self) -> bool:
        """True if forwards are captured."""
        return self._backend is not None

    @property
    def num_warm_up_uses(self) -> int:
        """Number of uses of a size before its forwards take as long as later ones; 0 without graphs."""
        return self._uses_before_capture + 1 if self.enabled else 0

    def extra_kv_entries(self, slots: int) -> int:
        """Returns how many more KV entries a slot needs: for padding tokens, and as scratch of padding sequences."""
        if self._backend is None:
            return 0
        max_padding = max(longer - shorter - 1 for shorter, longer in itertools.pairwise(CAPTURE_QUERY_LENS))
        return max_padding + (CAPTURE_QUERY_LENS[-1] if slots > 2 else 0)  # 1 or 2 slots have no padding sequences

    def padded_query_len(self, query_len: int) -> int | None:
        """Returns the query_len of the graph that serves ``query_len`` tokens; None if no graph does."""
        return None if self._backend is None else next((n for n in CAPTURE_QUERY_LENS if n >= query_len), None)

    def kv_bound(self, max_kv_len: int, capacity: int) -> int:
        """Returns the KV bound for sequences of up to ``max_kv_len`` KV entries."""
        power = 1 << max(0, max_kv_len - 1).bit_length()
        bound = power * 3 // 4 if max_kv_len <= power * 3 // 4 else power
        return min(max(self._min_kv_bound, bound), capacity)

    def run(
        self, store: KVStore, batch: ForwardBatch, key: Hashable, forward: ForwardFn, capture_now: bool = False
    ) -> ForwardResults | None:
        """Replays a forward of the target. Without a graph, returns None: the caller then runs the forward.

        Args:
            key: all that ``forward`` depends on besides the batch and the store, such as outputs and weights.
            forward: must not refer to the store, because the graph outlives it: the next store takes the memory.
            capture_now: True: capture at once if there is no graph yet.

        Returns:
            The results of ``forward``, in new tensors, with logits in float32.
        """
        size = self._size(store, batch)
        if size is None:
            return None
        full_key = (*size, batch.tree_offset, key, tensor_key(store.keys), tensor_key(store.values))
        owner, min_uses = store.arena_buffers or store, 0 if capture_now else self._uses_before_capture
        graph: TargetGraph | None = self._find(
            owner, full_key, min_uses, lambda backend: TargetGraph(backend, store, size, batch, forward)
        )
        return None if graph is None else graph(batch)

    def capture_sizes(self, store: KVStore, max_query_len: int) -> list[tuple[int, int, int]]:
        """Lists (batch_size, query_len, KV length) of the sizes up to ``max_query_len``, at most ``max_graphs``.
        Short contexts come first. Of one context, large forwards come first: smaller ones then reuse the memory."""
        if self._backend is None or not store.is_resident:
            return []
        largest = self.padded_query_len(min(max_query_len, CAPTURE_QUERY_LENS[-1])) or 0
        query_lens = [n for n in CAPTURE_QUERY_LENS if n <= largest]
        max_kv_len = store.capacity - 2 * largest  # leaves ``largest`` entries for new tokens, and as many for scratch
        bounds = [self.kv_bound(1, store.capacity)]
        while bounds[-1] < max_kv_len:
            bounds.append(self.kv_bound(bounds[-1] + 1, store.capacity))
        sizes = itertools.product(bounds, reversed(batch_sizes(store.slots)), reversed(query_lens))
        return [(size, n, max(0, min(bound, max_kv_len))) for bound, size, n in sizes][: self._max_graphs]

    def _size(self, store: KVStore, batch: ForwardBatch) -> tuple[int, int, int] | None:
        """Returns (batch_size, query_len, KV bound) of the graph that serves a batch; None if no graph does."""
        query_len = self.padded_query_len(batch.query_len)
        # Offloaded stores move KV during a forward, controlled by lengths on the host.
        if query_len is None or not store.is_resident:
            return None
        # A graph is for one tree_offset. Offsets recur for single tokens of chains, but rarely for levels of trees.
        if not batch.batch_size or (batch.tree_offset and batch.query_len > 1):
            return None
        max_prefix_len = max(batch.prefix_lens)
        end = max_prefix_len + batch.tree_offset + query_len
        if end > store.capacity:
            return None
        # Padding sequences write to the last entries of a slot.
        has_scratch = end + query_len <= store.capacity
        batch_size = padded_batch_size(batch.batch_size, store.slots) if has_scratch else batch.batch_size
        return batch_size, query_len, self.kv_bound(max_prefix_len, store.capacity)

    def run_draft(
        self,
        owner: object,
        key: Hashable,
        size: tuple[int, int],
        make_inputs: Callable[[], Sequence[torch.Tensor]],
        forward: DraftForwardFn,
    ) -> tuple[torch.Tensor, ...] | None:
        """Replays a draft's forward over one level of a tree. Without a graph, returns None: the caller then runs it.

        Args:
            owner: holds the other tensors that ``forward`` reads and writes, and never replaces them.
            key: all that ``forward`` depends on besides the inputs and the owner.
            size: the padded (batch_size, query_len).
            make_inputs: returns the inputs. The first one has no padding and gives the level's true size.
            forward: maps the inputs, padded to ``size``, to tensors (batch_size, query_len, ...).

        Returns:
            The results of ``forward``, cut to the true size, in new tensors.
        """
        inputs: list[torch.Tensor] = []

        def capture(backend: GraphBackend) -> DraftGraph:
            inputs.extend(make_inputs())
            return DraftGraph(backend, size, inputs, forward)

        graph: DraftGraph | None = self._find(owner, (key, size), self._uses_before_capture, capture)
        return None if graph is None else graph(inputs or make_inputs())

    def run_round(
        self,
        owner: object,
        key: Hashable,
        make_inputs: Callable[[], RoundInputs],
        make_compute: Callable[[], RoundFn],
        device: torch.device,
    ) -> torch.Tensor | None:
        """Replays a whole round. Without a graph, returns None: the caller then runs the round's parts.

        Args:
            owner: holds the other tensors that the round reads and writes, and never replaces them.
            key: all that the round depends on besides the inputs and the owner.
            make_inputs: returns the inputs. Called only if the round is replayed.
            make_compute: returns the function that computes the round. Called only if the round is captured.

        Returns:
            The results of the round, which the next replay overwrites.
        """
        inputs: list[RoundInputs] = []

        def capture(backend: GraphBackend) -> RoundGraph:
            inputs.append(make_inputs())
            return RoundGraph(backend, inputs[0], make_compute(), device)

        graph: RoundGraph | None = self._find(owner, key, self._uses_before_capture, capture)
        return None if graph is None else graph(inputs[0] if inputs else make_inputs())

    def _find(self, owner: object, key: Hashable, min_uses: int, capture: Callable[[GraphBackend], Any]) -> Any | None:
        """Returns a size's graph, captured after ``min_uses`` uses; None before that, or if the capture failed."""
        if self._backend is None:
            return None
        sizes = self._graphs.setdefault(owner, {})
        graph = sizes.pop(key, 0)  # reinserted below, so that the least recently used size comes first
        if isinstance(graph, int):
            graph = graph + 1 if graph < min_uses else _try_capture(self._backend, capture)
        sizes[key] = graph
        graphs = [(k, g) for k, g in sizes.items() if isinstance(g, DraftGraph | RoundGraph | TargetGraph)]
        while len(graphs) > 1 and (
            len(graphs) > self._max_graphs or sum(g.output_bytes for _, g in graphs) > MAX_OUTPUT_BYTES
        ):
            del sizes[graphs.pop(0)[0]]
        return None if isinstance(graph, int) else graph


def _try_capture(backend: GraphBackend, capture: Callable[[GraphBackend], Any]) -> Any | None:
    """Captures a graph. If memory is short, returns a count of uses below 0, after which the capture is tried again. If
    the capture fails otherwise, returns None: the size then never gets a graph."""
    try:
        return capture(backend)
    except Exception as error:  # a model, a driver or a library can raise any type
        if any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__context__)):
            logger.warning("There is no memory for a CUDA graph (%s): it is tried again later.", reason_of(error))
            return -USES_BEFORE_RETRY
        logger.warning("A forward could not be captured as a CUDA graph (%s): its size runs without.", reason_of(error))
        return None


def tensor_key(tensor: KVTensor) -> Hashable:
    """Returns the part of a graph's key that says which memory the graph reads and writes, in which layout."""
    if isinstance(tensor, QuantizedKV):
        return tuple(map(tensor_key, tensor.tensors))
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def padded_batch_size(batch_size: int, slots: int) -> int:
    """Returns the next power of two, at most ``slots``."""
    return min(1 << (batch_size - 1).bit_length(), max(batch_size, slots))


def batch_sizes(slots: int) -> list[int]:
    """Lists all values of :func:`padded_batch_size`, ascending."""
    return sorted({padded_batch_size(n, slots) for n in range(1, slots + 1)})
