"""The kernels as methods that take tensors."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.native.boundary import CPU_FLOAT32, CPU_INT64, address, allocate_bytes
from longdraft.native.build import LEVELS, UnsupportedPlatformError, library_file_name, load_library, supported_levels
from longdraft.native.draft import DraftBlock, DraftLevelInput
from longdraft.native.header import FUNCTIONS, STRUCTURES, Pointer
from longdraft.native.int8_kv import KV_DTYPE_IDS, KVTensor
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.native.structures import (
    AttentionMetadata,
    DecoderLayer,
    DecoderStack,
    HasStruct,
    KVCache,
    LinearWeights,
    Matrix,
    SoftmaxParams,
    kv_struct,
    matrix_struct,
)

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_NATIVE"
# The cost of having no kernels (docs/cpu.md).
NO_KERNELS_COST = "Decoding takes 1.5 to 4.5 times as long, the most where weights are stored in few bits"
# Head sizes are multiples of it.
HEAD_DIM_MULTIPLE = 16


class Kernels:
    """The compiled kernels. Tensors are float32 on the CPU, except keys and values. There are no gradients.

    A row's result has the same bits whatever rows are beside it, and with any number of threads.

    Attributes:
        level: the instruction set.
        lanes: floats in a vector.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        self._functions: dict[str, Callable[..., None]] = {}
        for name, arguments in FUNCTIONS.items():
            function = getattr(library, f"longdraft_{name}")
            function.restype, function.argtypes, function.errcheck = ctypes.c_int, arguments, _checked
            self._functions[name] = function
        self.lanes = int(library.longdraft_lanes())
        library.longdraft_threads.argtypes = [Pointer]
        library.longdraft_threads(_parallel_entry())

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of :data:`~longdraft.native.header.FUNCTIONS` with torch's number of threads, its last
        argument. A profiler of torch's shows it by its name, such as ``longdraft::stack``.

        Raises:
            MemoryBudgetError: it got no memory to work in.
        """
        profiled = torch._C._autograd._profiler_enabled()
        with torch.profiler.record_function(f"longdraft::{name}") if profiled else nullcontext():
            self._functions[name](*arguments, torch.get_num_threads())

    def linear(self, x: torch.Tensor, weights: Sequence[LinearWeights], prompt: bool = False) -> list[torch.Tensor]:
        """x (..., in) times several matrices (out, in), plus their biases -> (..., out) for each matrix.

        Args:
            prompt: the rows are a prompt's. Where there are tiles, products in int8 arithmetic are in bfloat16 then.
        """
        x = x.contiguous()
        size = x.shape[-1]
        outs = [torch.empty(*x.shape[:-1], w.shape[0], **CPU_FLOAT32) for w, _ in weights]
        matrices = (Matrix * len(outs))(*(matrix_struct(w, out, size) for w, out in zip(weights, outs, strict=True)))
        self.call("linear", address(x), x.numel() // size, size, matrices, len(outs), prompt)
        return outs

    def dequantize(self, weights: QuantizedMatrix) -> torch.Tensor:
        """Stored weights as float32 (out, in)."""
        out = torch.empty(weights.shape, **CPU_FLOAT32)
        data = weights.data
        places = (
            address(data, torch.uint8, strided_rows=True),
            weights.format_id,
            *weights.shape,
            data.stride(0),
            address(out),
        )
        self.call("unpack", *places)
        return out

    def can_repack(self, weights: QuantizedMatrix, out_features: int | None = None) -> bool:
        """True if these weights can be laid out by :meth:`repack`: their outputs fill whole vectors.

        Args:
            outs: outputs of each matrix, where several lie one behind the other; None for one matrix.
        """
        return weights.is_quantized and (out_features or weights.shape[0]) % self.lanes == 0

    def repack(self, weights: QuantizedMatrix, out: torch.Tensor | None = None) -> QuantizedMatrix:
        """Stored weights with a copy that int8 arithmetic reads faster: a vector's worth of rows beside one another.

        Args:
            weights: such as :meth:`can_repack` allows.
            place: memory for the copy, as many bytes as the weights have; None takes some.
        """
        data, (rows, size) = weights.data, weights.shape
        out = allocate_bytes(data.numel()) if out is None else out
        places = address(data, torch.uint8, strided_rows=True), weights.format_id, rows, size, data.stride(0)
        self.call("weave", *places, address(out, torch.uint8, data.numel()))
        return replace(weights, repacked=out.view(rows // self.lanes, self.lanes, data.shape[1]))

    def attend(
        self,
        q: torch.Tensor,
        k: KVTensor,
        v: KVTensor,
        tree_mask: torch.Tensor | None,
        scale: float,
        *,
        prefill: bool = False,
        window_start: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of folded rows, or of a chunk of a prompt.

        Args:
            q: (Hkv, G*T, d), d a multiple of 16; row g*T + t of a KV head is query head g of its group, row t. Of a
                chunk (Hq, T, d).
            k, v: (Hkv, n, d). Keys are stored column-wise (float32 keys may also be stored by row), values by row. The
                last T are those of the chunk itself.
            tree_mask: (T, W) bool, True where a row sees one of the last W keys; it sees all keys before them. None if every
                row sees every key, and for a chunk.
            prefill: attention is causal.
            window_start: (T,) int32, the first rank that a row sees: keys before the last W rank by number, then come those
                on the row's path. None if rows see their path from its start.
            softcap: scores s become softcap * tanh(s / softcap).
            sinks: (Hq,) a score for each query head that joins the softmax's denominator and has no value.

        Returns:
            Output shaped like q.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        heads, rows, d = q.shape
        tree_mask, window_start, sinks = (
            _laid_out(tree_mask),
            _laid_out(window_start, torch.int32),
            _laid_out(sinks, torch.float32),
        )
        text = kv_struct(k[None, None], v[None, None]), 0
        results = SoftmaxParams(scale, softcap or 0.0, address(sinks)), address(out)
        if prefill:
            sizes = heads, heads // k.shape[0], rows, d, k.shape[1]
            self.call("attend_chunk", address(q), *text, *sizes, address(window_start, torch.int32, rows), *results)
            return out
        size = rows if sinks is None else rows * heads // len(sinks)
        size = next((len(x) for x in (tree_mask, window_start) if x is not None), size)
        mask = (
            address(tree_mask, torch.bool),
            size,
            0 if tree_mask is None else tree_mask.shape[1],
            address(window_start, torch.int32),
        )
        self.call("attend", address(q), *text, heads, rows, d, k.shape[1], *mask, *results)
        return out

    def run_stack(
        self,
        stack: DecoderStack,
        metadata: AttentionMetadata,
        keys: KVTensor,
        values: KVTensor,
        x: torch.Tensor,
        *,
        query_layers: Collection[int] = (),
        hidden_layers: Collection[int] = (),
        logits: int | Literal["all", "last", "none"] = "none",
        topk: int = 0,
        more_kv_groups: Sequence[tuple[AttentionMetadata, KVTensor, KVTensor]] = (),
        recurrent: HasStruct | None = None,
    ) -> StackOutput:
        """Runs decoder layers, and writes the rows' keys and values.

        Args:
            rows, keys, values: for layers of the first kind; keys and values (layers, slots, kv_heads, capacity, d).
            x: (B, T, hidden), overwritten by the last layer's output.
            queries, hidden: indices of layers whose queries and outputs are returned.
            logits: the rows whose logits are computed; a number: so many of each sequence's last.
            best: return only so many of the likeliest tokens of these rows; 0 for all logits.
            more: the same rows, keys and values for each further kind of layer.
            recurrent: the rows of the recurrent layers (:class:`~longdraft.native.delta.DeltaRows`).
        """
        batch, size, _ = x.shape
        out, topk = StackOutput(), min(topk, stack.vocab_size)
        for i in query_layers:
            layer = stack.layers[i]
            assert isinstance(layer, DecoderLayer), "a recurrent layer has no queries"
            out.queries[i] = torch.empty(batch, layer.num_heads, size, layer.head_dim, **CPU_FLOAT32)
        out.hidden = {i: torch.empty_like(x) for i in hidden_layers}
        rows_each = logits if isinstance(logits, int) else size if logits == "all" else 1
        if topk:
            out.topk_logprobs, out.topk_indices = (
                torch.empty(batch, rows_each, topk, **kind) for kind in (CPU_FLOAT32, CPU_INT64)
            )
        elif logits != "none":
            out.logits = torch.empty(batch, rows_each, stack.vocab_size, **CPU_FLOAT32)
        kept = [(Pointer * len(stack.layers))() for _ in range(2)]
        for places, tensors in zip(kept, (out.queries, out.hidden), strict=True):
            for i, tensor in tensors.items():
                places[i] = address(tensor)
        kinds = [(metadata, keys, values), *more_kv_groups]
        last = 0 if logits == "all" else rows_each
        batches = (STRUCTURES["Batch"] * len(kinds))(*(each.struct for each, _, _ in kinds))
        kv = (KVCache * len(kinds))(*(kv_struct(k, v) for _, k, v in kinds))
        self.call(
            *("stack", stack.struct, batches, kv, None if recurrent is None else recurrent.struct),
            *(address(x, min_numel=batch * size * stack.layers[0].hidden_size), *kept, last),
            *(address(out.logits), topk, address(out.topk_logprobs), address(out.topk_indices, torch.long)),
        )
        return out

    def draft_level(
        self,
        block: DraftBlock,
        batch: DraftLevelInput,
        draft_kv: tuple[torch.Tensor, torch.Tensor],
        target_kv: tuple[torch.Tensor, torch.Tensor] | None,
        topk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs one level of a draft: its block, its head and the choice of tokens. Writes all rows' keys and values.

        Args:
            own: the draft's keys and values (slots, kv_heads, capacity, d).
            text: keys and values of the target's last layer for LongSpec; None for EAGLE-3.
            best: number of likeliest tokens of each row; 0 to return logits instead.

        Returns:
            For the last W rows of each sequence: the block's output (rows, hidden) before the last norm; logits (rows,
            vocabulary), empty if best > 0; log-probabilities and places in the head (rows, best), the likeliest first.
        """
        topk = min(topk, block.vocab_size)
        out = torch.empty(batch.num_queries, block.hidden_size, **CPU_FLOAT32)
        logits = torch.empty(0 if topk else batch.num_queries, block.vocab_size, **CPU_FLOAT32)
        logprobs, places = (
            torch.empty(batch.num_queries, topk, **CPU_FLOAT32),
            torch.empty(batch.num_queries, topk, **CPU_INT64),
        )
        caches = [None if kv is None else kv_struct(kv[0][None], kv[1][None]) for kv in (draft_kv, target_kv)]
        results = (*map(address, (out, logits, logprobs)), address(places, torch.long))
        self.call("draft", block.struct, batch.struct, *caches, topk, *results)
        return out, logits, logprobs, places


@dataclass
class StackOutput:
    """Results of a stack besides its last layer's output.

    Attributes:
        logits: (B, T, vocabulary), (B, 1, vocabulary) for the last rows, or None.
        topk_logprobs, places: (B, T or 1, best) log-probabilities, the largest first, and their rows in the head; or None.
        queries: layer -> (B, heads, T, d) after RoPE.
        hidden: layer -> (B, T, hidden).
    """

    logits: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    topk_indices: torch.Tensor | None = None
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


def _checked(code: int, function: Any, arguments: Any) -> None:
    if code:
        raise MemoryBudgetError(
            "A kernel got no memory to work in: the limit of this process, or the machine's memory, is reached. "
            "Shorten the prompt or lower the batch, use fewer threads, or raise the limit (ulimit -v)."
        )


def _laid_out(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if x is None else x.to(dtype or x.dtype).contiguous()


def supports_attention(q: torch.Tensor, k: KVTensor, v: KVTensor) -> bool:
    """True if :meth:`Kernels.attend` supports the dtypes, device, head size and strides of these tensors."""
    if q.dtype != torch.float32 or any(x.device.type != "cpu" for x in (q, k, v)):
        return False
    if k.dtype != v.dtype or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    readable = k.stride(-2) == 1 or (k.dtype == torch.float32 and k.stride(-1) == 1)
    served = k.dtype in KV_DTYPE_IDS and readable and v.stride(-1) == 1
    return served and q.shape[-1] % HEAD_DIM_MULTIPLE == 0 and k.shape[1] > 0


def kernels(progress: Callable[[str], None] | None = None) -> Kernels | None:
    """The kernels of this machine, compiled at the first call.

    Args:
        progress: called with a line of text before compiling.

    Returns:
        None if they are switched off (LONGDRAFT_NATIVE=0), or if there is no compiler or no suitable processor. The log
        gives the reason.
    """
    return _once(progress)[0]


def unavailable_reason() -> str | None:
    """The reason why there are no kernels here; None if there are."""
    return _once()[1]


def library_name() -> str | None:
    """The name of the kernels' file here, which says the instruction set and changes with the sources; None if there
    are none."""
    found = kernels()
    return None if found is None else library_file_name(found.level)


# The kernels of this process, or the reason why there are none.
known: list[tuple[Kernels | None, str | None]] = []
_lock = threading.Lock()


def _once(progress: Callable[[str], None] | None = None) -> tuple[Kernels | None, str | None]:
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0"
    with _lock:
        if not known:
            try:
                level = _level()
                known.append((Kernels(load_library(level, progress), level), None))
            except (OSError, AttributeError) as error:
                # The user can fix everything except the processor.
                severity = logging.INFO if isinstance(error, UnsupportedPlatformError) else logging.WARNING
                logger.log(
                    severity, "No kernels of our own on this CPU: %s. Torch computes. %s.", error, NO_KERNELS_COST
                )
                known.append((None, str(error)))
        return known[0]


def _level() -> str:
    """The widest instruction set, or the one that LONGDRAFT_NATIVE names (v3, v4, v4-vnni, v4-amx)."""
    executed, wanted = supported_levels(), f"x86-64-{os.environ.get(SWITCH, '1')}"
    if wanted in LEVELS["x86_64"]:
        if wanted not in executed:
            raise OSError(f"{SWITCH}={os.environ[SWITCH]}, which this processor does not execute")
        return wanted
    if not executed:
        raise UnsupportedPlatformError("the processor has no AVX2")
    return executed[0]


@cache
def _parallel_entry() -> int | None:
    """Address of GOMP_parallel in torch's OpenMP library; None if it was not found, and the kernels use one thread."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            match = re.search(r"/\S*/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$", line)
            if match:
                with suppress(OSError, AttributeError):
                    return ctypes.cast(ctypes.CDLL(match[0]).GOMP_parallel, Pointer).value
    logger.warning("torch's OpenMP library was not found: longdraft's kernels run on one thread.")
    return None
