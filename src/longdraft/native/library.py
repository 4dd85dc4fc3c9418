"""Loads the C++ kernels, and wraps them in methods that take tensors."""

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
from longdraft.native.build import (
    LEVELS,
    CompilerError,
    UnsupportedPlatformError,
    library_file_name,
    load_library,
    option_name,
    supported_levels,
)
from longdraft.native.draft import DraftBlock, DraftLevelInput
from longdraft.native.header import FUNCTIONS, STATUSES, STRUCTURES, Pointer
from longdraft.native.quantized_kv import KV_DTYPE_IDS, KVPair, KVTensor
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

NATIVE_ENV = (
    "LONGDRAFT_NATIVE"  # environment variable; 0: no kernels; v3, dotprod, ...: an instruction set (option_name)
)
# For messages: the cost of running without kernels (docs/cpu.md).
NO_KERNELS_COST = "Decoding takes 1.5 to 4.5 times as long, the most where weights are stored in few bits"
HEAD_DIM_MULTIPLE = 16  # attention kernels support head sizes that are multiples of this


class Kernels:
    """The compiled kernels. Tensors are float32 on the CPU, except keys and values; gradients are not computed.

    The bits of an output row depend neither on the other rows nor on the number of threads. In shapes, B is the number
    of sequences, T the number of new tokens of each, and d the size of a head.

    Attributes:
        level: the instruction set, one of :data:`~longdraft.native.build.LEVELS`.
        lanes: number of floats in a SIMD vector.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        self._functions: dict[str, Callable[..., None]] = {}
        for name, arguments in FUNCTIONS.items():
            function = getattr(library, f"longdraft_{name}")
            function.restype, function.argtypes, function.errcheck = ctypes.c_int, arguments, _check_status
            self._functions[name] = function
        self.lanes = int(library.longdraft_lanes())
        library.longdraft_set_parallel_entry.argtypes = [Pointer]
        library.longdraft_set_parallel_entry(_find_gomp_parallel())

    def call(self, name: str, *arguments: Any) -> None:
        """Calls ``longdraft_NAME`` of kernels.h with torch's number of threads; profilers show ``longdraft::NAME``.

        Raises:
            MemoryBudgetError: the kernel could not allocate its buffers.
        """
        profiled = torch._C._autograd._profiler_enabled()
        with torch.profiler.record_function(f"longdraft::{name}") if profiled else nullcontext():
            self._functions[name](*arguments, torch.get_num_threads())

    def linear(self, x: torch.Tensor, weights: Sequence[LinearWeights], prefill: bool = False) -> list[torch.Tensor]:
        """Applies linear layers to one x (..., in); returns (..., out) for each. prefill: True: AMX uses bfloat16."""
        x = x.contiguous()
        in_features = x.shape[-1]
        outs = [torch.empty(*x.shape[:-1], w.shape[0], **CPU_FLOAT32) for w, _ in weights]
        matrices = (Matrix * len(outs))(
            *(matrix_struct(w, out, in_features) for w, out in zip(weights, outs, strict=True))
        )
        self.call("linear", address(x), x.numel() // in_features, in_features, matrices, len(outs), prefill)
        return outs

    def dequantize(self, weights: QuantizedMatrix) -> torch.Tensor:
        """Dequantizes weights to float32 (out, in)."""
        out, data = torch.empty(weights.shape, **CPU_FLOAT32), weights.data
        matrix_fields = address(data, torch.uint8, strided_rows=True), weights.format_id, *weights.shape, data.stride(0)
        self.call("dequantize", *matrix_fields, address(out))
        return out

    def can_repack(self, weights: QuantizedMatrix, out_features: int | None = None) -> bool:
        """Returns True if :meth:`repack` supports the weights. out_features: of one expert; None without experts."""
        return weights.is_quantized and (out_features or weights.shape[0]) % self.lanes == 0

    def repack(self, weights: QuantizedMatrix, out: torch.Tensor | None = None) -> QuantizedMatrix:
        """Adds an interleaved copy (packed_rows.h) for int8 arithmetic to weights. out: memory for it, or None."""
        data = weights.data
        out = allocate_bytes(data.numel()) if out is None else out
        matrix_fields = address(data, torch.uint8, strided_rows=True), weights.format_id, *weights.shape, data.stride(0)
        self.call("repack", *matrix_fields, address(out, torch.uint8, data.numel()))
        return replace(weights, repacked=out.view(len(data) // self.lanes, self.lanes, data.shape[1]))

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
        num_first: int = 0,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of a tree's tokens, or causal attention of a prompt's chunk.

        Args:
            q: queries (KV heads, group_size * T, d), d a multiple of 16. Row g * T + t of a KV head belongs to token t
                and to query head g of the KV head. With prefill (query heads, T, d).
            k, v: (KV heads, entries, d). Keys are stored transposed (float32 keys may be rows too), values as rows.
                With prefill, the last T entries are the chunk's.
            tree_mask: (T, width) bool, True where a token sees one of the last ``width`` entries; tokens see all
                entries before these. None: tokens see all entries. None with prefill.
            scale: factor of the scores q . k.
            prefill: True: causal attention of a prompt's chunk.
            window_start: (T,) int32, the lowest rank that a token sees, where ranks number the entries that it sees
                without a window. None: no window.
            num_first: number of first entries that all tokens also see; for prefill only.
            softcap: replaces scores s by softcap * tanh(s / softcap); None: no cap.
            sinks: (query heads,) additional scores in the softmax's denominator, which have no values; None: none.

        Returns:
            The attention's output, shaped like q.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        heads, rows, d = q.shape
        tree_mask, window_start = _contiguous(tree_mask), _contiguous(window_start, torch.int32)
        sinks = _contiguous(sinks, torch.float32)
        kv_and_slot = kv_struct(k[None, None], v[None, None]), 0
        softmax_and_out = SoftmaxParams(scale, softcap or 0.0, address(sinks)), address(out)
        if prefill:
            sizes = heads, heads // k.shape[0], rows, d, k.shape[1]
            window = address(window_start, torch.int32, rows)
            self.call("attend_prefill", address(q), *kv_and_slot, *sizes, window, num_first, *softmax_and_out)
            return out
        # T: from the mask or window, or from the sinks' number of query heads. Else it does not matter.
        num_tokens = rows if sinks is None else rows * heads // len(sinks)
        num_tokens = next((len(x) for x in (tree_mask, window_start) if x is not None), num_tokens)
        mask_width = 0 if tree_mask is None else tree_mask.shape[1]
        mask = address(tree_mask, torch.bool), num_tokens, mask_width, address(window_start, torch.int32)
        self.call("attend", address(q), *kv_and_slot, heads, rows, d, k.shape[1], *mask, *softmax_and_out)
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
        """Runs decoder layers, and writes the KV of the new tokens.

        Args:
            metadata: the new tokens, for the first KV group.
            keys, values: KV cache of the first KV group (layers, slots, kv_heads, capacity, head_dim).
            x: the first layer's input (B, T, hidden_size), which is overwritten by the last layer's output.
            query_layers, hidden_layers: ids of layers whose queries are returned, and of layers whose outputs are.
            logits: tokens whose logits are computed; a number n means the last n tokens of each sequence.
            topk: return only the top k of these logits; 0: return all logits.
            more_kv_groups: metadata, keys and values of the other KV groups.
            recurrent: the :class:`~longdraft.native.delta.DeltaNetBatch` of recurrent layers, or None.
        """
        batch_size, query_len, _ = x.shape
        out, topk = StackOutput(), min(topk, stack.vocab_size)
        for i in query_layers:
            layer = stack.layers[i]
            assert isinstance(layer, DecoderLayer), "a recurrent layer has no queries"
            out.queries[i] = torch.empty(batch_size, layer.num_heads, query_len, layer.head_dim, **CPU_FLOAT32)
        out.hidden = {i: torch.empty_like(x) for i in hidden_layers}
        num_logits = logits if isinstance(logits, int) else query_len if logits == "all" else 1
        if topk:
            out.topk_logprobs, out.topk_indices = (
                torch.empty(batch_size, num_logits, topk, **options) for options in (CPU_FLOAT32, CPU_INT64)
            )
        elif logits != "none":
            out.logits = torch.empty(batch_size, num_logits, stack.vocab_size, **CPU_FLOAT32)
        layer_outputs = [(Pointer * len(stack.layers))() for _ in range(2)]
        for pointers, tensors in zip(layer_outputs, (out.queries, out.hidden), strict=True):
            for i, tensor in tensors.items():
                pointers[i] = address(tensor)
        groups = [(metadata, keys, values), *more_kv_groups]
        num_last = 0 if logits == "all" else num_logits  # n_last of longdraft_stack, where 0 means all
        structs = (STRUCTURES["AttentionMetadata"] * len(groups))(*(group.struct for group, _, _ in groups))
        kv = (KVCache * len(groups))(*(kv_struct(k, v) for _, k, v in groups))
        self.call(
            "stack", stack.struct, structs, kv, None if recurrent is None else recurrent.struct,
            address(x, min_numel=batch_size * query_len * stack.layers[0].hidden_size), *layer_outputs, num_last,
            address(out.logits), topk, address(out.topk_logprobs), address(out.topk_indices, torch.long),
        )  # fmt: skip
        return out

    def draft_level(
        self, block: DraftBlock, batch: DraftLevelInput, draft_kv: KVPair, target_kv: KVPair | None, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs a draft's block, head and top k for one level of its tree, and writes the KV of the new tokens.

        Args:
            block: the draft's block and head.
            batch: the new tokens.
            draft_kv: the draft's keys and values (slots, kv_heads, capacity, head_dim).
            target_kv: keys and values of the target's last layer for LongSpec; None for EAGLE-3.
            topk: number of tokens to return for each token that has outputs; 0: return logits instead.

        Returns:
            The block's output before the final norm (num_queries, hidden_size).
            The logits (num_queries, vocab_size); with topk (0, vocab_size).
            The largest log-probabilities (num_queries, topk).
            The rows of the head that they belong to (num_queries, topk).
        """
        topk = min(topk, block.vocab_size)
        out = torch.empty(batch.num_queries, block.hidden_size, **CPU_FLOAT32)
        logits = torch.empty(0 if topk else batch.num_queries, block.vocab_size, **CPU_FLOAT32)
        logprobs = torch.empty(batch.num_queries, topk, **CPU_FLOAT32)
        indices = torch.empty(batch.num_queries, topk, **CPU_INT64)
        kv_structs = [None if kv is None else kv_struct(kv[0][None], kv[1][None]) for kv in (draft_kv, target_kv)]
        results = (*map(address, (out, logits, logprobs)), address(indices, torch.long))
        self.call("draft_level", block.struct, batch.struct, *kv_structs, topk, *results)
        return out, logits, logprobs, indices


@dataclass
class StackOutput:
    """The result of :meth:`Kernels.run_stack`, which writes the last layer's output to its argument x.

    Attributes:
        logits: (B, tokens with logits, vocab_size), or None.
        topk_logprobs: the largest log-probabilities (B, tokens with logits, topk), or None.
        topk_indices: rows of the head that belong to topk_logprobs, or None.
        queries: layer -> its queries after RoPE (B, num_heads, T, head_dim).
        hidden: layer -> its output (B, T, hidden_size).
    """

    logits: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    topk_indices: torch.Tensor | None = None
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


def _check_status(status: int, function: Any, arguments: Any) -> None:
    if STATUSES[status] == "INVALID_ARGUMENT":
        raise ValueError(
            f"{function.__name__} got sizes that do not fit each other; this is a bug of longdraft, please report it"
        )
    if STATUSES[status] == "INTERNAL_ERROR":
        raise RuntimeError(f"{function.__name__} ended with an exception; this is a bug of longdraft, please report it")
    if status:
        raise MemoryBudgetError(
            "A kernel could not allocate its buffers: the memory limit of this process or machine is reached. "
            "Shorten the prompt or lower the batch, use fewer threads, or raise the limit (ulimit -v)."
        )


def _contiguous(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if x is None else x.to(dtype or x.dtype).contiguous()


def supports_attention(q: torch.Tensor, k: KVTensor, v: KVTensor) -> bool:
    """Returns True if :meth:`Kernels.attend` supports the dtypes, device, head size and strides of these tensors."""
    if q.dtype != torch.float32 or any(x.device.type != "cpu" for x in (q, k, v)):
        return False
    if k.dtype != v.dtype or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    k_supported = k.stride(-2) == 1 or (k.dtype == torch.float32 and k.stride(-1) == 1)
    kv_supported = k.dtype in KV_DTYPE_IDS and k_supported and v.stride(-1) == 1
    return kv_supported and q.shape[-1] % HEAD_DIM_MULTIPLE == 0 and k.shape[1] > 0


def kernels(progress: Callable[[str], None] | None = None) -> Kernels | None:
    """Returns the kernels for this machine, compiled at the first call; None with LONGDRAFT_NATIVE=0, and without a
    compiler or a supported processor, which is logged. progress: called with a line of text before compiling."""
    return _load_once(progress)[0]


def unavailable_reason() -> str | None:
    """Returns why the kernels are unavailable, or None if they are available."""
    return _load_once()[1]


def library_name() -> str | None:
    """Returns the shared object's file name, which identifies instruction set and sources; None without kernels."""
    loaded = kernels()
    return None if loaded is None else library_file_name(loaded.level)


# Empty before the first call of :func:`_load_once`, then its result: (kernels, None), or (None, why there are none).
load_result: list[tuple[Kernels | None, str | None]] = []
_lock = threading.Lock()


def _load_once(progress: Callable[[str], None] | None = None) -> tuple[Kernels | None, str | None]:
    if os.environ.get(NATIVE_ENV) == "0":
        return None, f"{NATIVE_ENV}=0"
    with _lock:
        if not load_result:
            try:
                load_result.append((_load_widest(progress), None))
            except (OSError, AttributeError) as error:
                # A warning, unless the processor is at fault, which the user cannot change.
                severity = logging.INFO if isinstance(error, UnsupportedPlatformError) else logging.WARNING
                message = "longdraft's kernels are unavailable on this CPU: %s. torch computes instead. %s."
                logger.log(severity, message, error, NO_KERNELS_COST)
                load_result.append((None, str(error)))
        return load_result[0]


def _load_widest(progress: Callable[[str], None] | None) -> Kernels:
    """Loads the kernels for the widest instruction set that the processor has and the compiler knows."""
    levels, errors = _candidate_levels(), list[CompilerError]()
    for level in levels:
        try:
            kernels = Kernels(load_library(level, progress), level)
        except CompilerError as error:
            errors.append(error)
            continue
        if errors:
            message = "Kernels for %s cannot be compiled: %s. Those for %s are used, as with %s=%s."
            titles = [LEVELS[name].title for name in (levels[0], level)]
            logger.warning(message, titles[0], errors[0], titles[1], NATIVE_ENV, option_name(level))
        return kernels
    raise errors[0]


def _candidate_levels() -> list[str]:
    """Returns the instruction set that LONGDRAFT_NATIVE names (v3, dotprod, ...), else all supported, widest first."""
    supported, requested = supported_levels(), os.environ.get(NATIVE_ENV)
    for level in LEVELS:
        if requested == option_name(level):
            if level not in supported:
                raise OSError(f"{NATIVE_ENV}={requested}, which this processor does not execute: unset it")
            return [level]
    if not supported:
        raise UnsupportedPlatformError("the processor has no AVX2")
    return supported


@cache
def _find_gomp_parallel() -> int | None:
    """Returns the address of GOMP_parallel in torch's OpenMP library. None: not found, so kernels use one thread."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            match = re.search(r"/\S*/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$", line)
            if match:
                with suppress(OSError, AttributeError):
                    return ctypes.cast(ctypes.CDLL(match[0]).GOMP_parallel, Pointer).value
    logger.warning("torch's OpenMP library was not found: longdraft's kernels run on one thread.")
    return None
