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
from longdraft.native.boundary import FLOATS, WHOLE, address, memory_of
from longdraft.native.build import LEVELS, UnsupportedError, file_name, levels, loaded
from longdraft.native.draft import DraftBlock, Nodes
from longdraft.native.header import FUNCTIONS, STRUCTURES, Pointer
from longdraft.native.scaled import FORMATS, KeptRows
from longdraft.native.stored import Stored
from longdraft.native.structures import (
    DecoderLayer,
    DecoderStack,
    HasStructure,
    KeysValues,
    Matrix,
    Rows,
    Scoring,
    Weights,
    keys_values,
    matrix,
)

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_NATIVE"
# The cost of having no kernels (docs/cpu.md).
SLOWER = "Decoding takes 1.5 to 4.5 times as long, the most where weights are stored in few bits"
# Head sizes are multiples of it.
HEAD_UNIT = 16


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

    def linear(self, x: torch.Tensor, products: Sequence[Weights], prompt: bool = False) -> list[torch.Tensor]:
        """x (..., in) times several matrices (out, in), plus their biases -> (..., out) for each matrix.

        Args:
            prompt: the rows are a prompt's. Where there are tiles, products in int8 arithmetic are in bfloat16 then.
        """
        x = x.contiguous()
        size = x.shape[-1]
        outs = [torch.empty(*x.shape[:-1], w.shape[0], **FLOATS) for w, _ in products]
        matrices = (Matrix * len(outs))(*(matrix(w, out, size) for w, out in zip(products, outs, strict=True)))
        self.call("linear", address(x), x.numel() // size, size, matrices, len(outs), prompt)
        return outs

    def unpack(self, weights: Stored) -> torch.Tensor:
        """Stored weights as float32 (out, in)."""
        out = torch.empty(weights.shape, **FLOATS)
        data = weights.data
        places = (address(data, torch.uint8, rows=True), weights.number, *weights.shape, data.stride(0), address(out))
        self.call("unpack", *places)
        return out

    def weaves(self, weights: Stored, outs: int | None = None) -> bool:
        """True if these weights can be laid out by :meth:`weave`: their outputs fill whole vectors.

        Args:
            outs: outputs of each matrix, where several lie one behind the other; None for one matrix.
        """
        return weights.in_blocks and (outs or weights.shape[0]) % self.lanes == 0

    def weave(self, weights: Stored, place: torch.Tensor | None = None) -> Stored:
        """Stored weights with a copy that int8 arithmetic reads faster: a vector's worth of rows beside one another.

        Args:
            weights: such as :meth:`weaves` allows.
            place: memory for the copy, as many bytes as the weights have; None takes some.
        """
        data, (rows, size) = weights.data, weights.shape
        place = memory_of(data.numel()) if place is None else place
        places = address(data, torch.uint8, rows=True), weights.number, rows, size, data.stride(0)
        self.call("weave", *places, address(place, torch.uint8, data.numel()))
        return replace(weights, woven=place.view(rows // self.lanes, self.lanes, data.shape[1]))

    def attend(
        self,
        q: torch.Tensor,
        k: KeptRows,
        v: KeptRows,
        tree: torch.Tensor | None,
        scale: float,
        *,
        chunk: bool = False,
        begins: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of folded rows, or of a chunk of a prompt.

        Args:
            q: (Hkv, G*T, d), d a multiple of 16; row g*T + t of a KV head is query head g of its group, row t. Of a
                chunk (Hq, T, d).
            k, v: (Hkv, n, d). Keys are stored column-wise (float32 keys may also be stored by row), values by row. The
                last T are those of the chunk itself.
            tree: (T, W) bool, True where a row sees one of the last W keys; it sees all keys before them. None if every
                row sees every key, and for a chunk.
            chunk: attention is causal.
            begins: (T,) int32, the first rank that a row sees: keys before the last W rank by number, then come those
                on the row's path. None if rows see their path from its start.
            softcap: scores s become softcap * tanh(s / softcap).
            sinks: (Hq,) a score for each query head that joins the softmax's denominator and has no value.

        Returns:
            Output shaped like q.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        heads, rows, d = q.shape
        tree, begins, sinks = _laid_out(tree), _laid_out(begins, torch.int32), _laid_out(sinks, torch.float32)
        text = keys_values(k[None, None], v[None, None]), 0
        results = Scoring(scale, softcap or 0.0, address(sinks)), address(out)
        if chunk:
            sizes = heads, heads // k.shape[0], rows, d, k.shape[1]
            self.call("attend_chunk", address(q), *text, *sizes, address(begins, torch.int32, rows), *results)
            return out
        size = rows if sinks is None else rows * heads // len(sinks)
        size = next((len(x) for x in (tree, begins) if x is not None), size)
        mask = address(tree, torch.bool), size, 0 if tree is None else tree.shape[1], address(begins, torch.int32)
        self.call("attend", address(q), *text, heads, rows, d, k.shape[1], *mask, *results)
        return out

    def stack(
        self,
        stack: DecoderStack,
        rows: Rows,
        keys: KeptRows,
        values: KeptRows,
        x: torch.Tensor,
        *,
        queries: Collection[int] = (),
        hidden: Collection[int] = (),
        logits: int | Literal["all", "last", "none"] = "none",
        best: int = 0,
        more: Sequence[tuple[Rows, KeptRows, KeptRows]] = (),
        recurrent: HasStructure | None = None,
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
        out, best = StackOutput(), min(best, stack.vocabulary)
        for i in queries:
            layer = stack.layers[i]
            assert isinstance(layer, DecoderLayer), "a recurrent layer has no queries"
            out.queries[i] = torch.empty(batch, layer.heads, size, layer.d, **FLOATS)
        out.hidden = {i: torch.empty_like(x) for i in hidden}
        rows_each = logits if isinstance(logits, int) else size if logits == "all" else 1
        if best:
            out.log_probs, out.places = (torch.empty(batch, rows_each, best, **kind) for kind in (FLOATS, WHOLE))
        elif logits != "none":
            out.logits = torch.empty(batch, rows_each, stack.vocabulary, **FLOATS)
        kept = [(Pointer * len(stack.layers))() for _ in range(2)]
        for places, tensors in zip(kept, (out.queries, out.hidden), strict=True):
            for i, tensor in tensors.items():
                places[i] = address(tensor)
        kinds = [(rows, keys, values), *more]
        last = 0 if logits == "all" else rows_each
        batches = (STRUCTURES["Batch"] * len(kinds))(*(each.struct for each, _, _ in kinds))
        kv = (KeysValues * len(kinds))(*(keys_values(k, v) for _, k, v in kinds))
        self.call(
            *("stack", stack.struct, batches, kv, None if recurrent is None else recurrent.struct),
            *(address(x, size=batch * size * stack.layers[0].hidden), *kept, last),
            *(address(out.logits), best, address(out.log_probs), address(out.places, torch.long)),
        )
        return out

    def draft(
        self,
        block: DraftBlock,
        nodes: Nodes,
        own: tuple[torch.Tensor, torch.Tensor],
        text: tuple[torch.Tensor, torch.Tensor] | None,
        best: int,
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
        best = min(best, block.vocabulary)
        out = torch.empty(nodes.size, block.hidden, **FLOATS)
        logits = torch.empty(0 if best else nodes.size, block.vocabulary, **FLOATS)
        log_probs, places = torch.empty(nodes.size, best, **FLOATS), torch.empty(nodes.size, best, **WHOLE)
        caches = [None if kv is None else keys_values(kv[0][None], kv[1][None]) for kv in (own, text)]
        results = (*map(address, (out, logits, log_probs)), address(places, torch.long))
        self.call("draft", block.struct, nodes.struct, *caches, best, *results)
        return out, logits, log_probs, places


@dataclass
class StackOutput:
    """Results of a stack besides its last layer's output.

    Attributes:
        logits: (B, T, vocabulary), (B, 1, vocabulary) for the last rows, or None.
        log_probs, places: (B, T or 1, best) log-probabilities, the largest first, and their rows in the head; or None.
        queries: layer -> (B, heads, T, d) after RoPE.
        hidden: layer -> (B, T, hidden).
    """

    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    places: torch.Tensor | None = None
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


def fits(q: torch.Tensor, k: KeptRows, v: KeptRows) -> bool:
    """True if :meth:`Kernels.attend` supports the dtypes, device, head size and strides of these tensors."""
    if q.dtype != torch.float32 or any(x.device.type != "cpu" for x in (q, k, v)):
        return False
    if k.dtype != v.dtype or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    readable = k.stride(-2) == 1 or (k.dtype == torch.float32 and k.stride(-1) == 1)
    served = k.dtype in FORMATS and readable and v.stride(-1) == 1
    return served and q.shape[-1] % HEAD_UNIT == 0 and k.shape[1] > 0


def kernels(progress: Callable[[str], None] | None = None) -> Kernels | None:
    """The kernels of this machine, compiled at the first call.

    Args:
        progress: called with a line of text before compiling.

    Returns:
        None if they are switched off (LONGDRAFT_NATIVE=0), or if there is no compiler or no suitable processor. The log
        gives the reason.
    """
    return _once(progress)[0]


def missing() -> str | None:
    """The reason why there are no kernels here; None if there are."""
    return _once()[1]


def name() -> str | None:
    """The name of the kernels' file here, which says the instruction set and changes with the sources; None if there
    are none."""
    found = kernels()
    return None if found is None else file_name(found.level)


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
                known.append((Kernels(loaded(level, progress), level), None))
            except (OSError, AttributeError) as error:
                # The user can fix everything except the processor.
                severity = logging.INFO if isinstance(error, UnsupportedError) else logging.WARNING
                logger.log(severity, "No kernels of our own on this CPU: %s. Torch computes. %s.", error, SLOWER)
                known.append((None, str(error)))
        return known[0]


def _level() -> str:
    """The widest instruction set, or the one that LONGDRAFT_NATIVE names (v3, v4, v4-vnni, v4-amx)."""
    executed, wanted = levels(), f"x86-64-{os.environ.get(SWITCH, '1')}"
    if wanted in LEVELS["x86_64"]:
        if wanted not in executed:
            raise OSError(f"{SWITCH}={os.environ[SWITCH]}, which this processor does not execute")
        return wanted
    if not executed:
        raise UnsupportedError("the processor has no AVX2")
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
