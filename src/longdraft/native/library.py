"""The kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from longdraft.native.build import LEVELS, ON_REQUEST, levels, shared_object
from longdraft.native.draft import DraftBlock, Nodes
from longdraft.native.nibbled import Nibbled
from longdraft.native.operators import launch
from longdraft.native.scaled import FORMATS, KeptRows
from longdraft.native.stored import Stored
from longdraft.native.structures import DecoderStack, KeysValues, Long, Matrix, Pointer, Rows, Weights

logger = logging.getLogger("longdraft")

SWITCH = "LONGDRAFT_NATIVE"
# What it costs to have none (docs/cpu.md).
SLOWER = "Decoding takes 1.5 to 4.5 times as long, the most where weights are stored in few bits"
# Head sizes are whole vectors.
HEAD_UNIT = 16


class Kernels:
    """What was compiled. Tensors are float32 on the CPU, keys and values aside; nothing is differentiated through.

    A row's result is the same to the bit whatever rows are beside it, and however many threads work.

    Attributes:
        level: the instruction set. lanes: floats that a vector of it holds. library: as it was loaded.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level, self.library = level, library
        self.lanes = int(library.longdraft_lanes())
        library.longdraft_threads.argtypes, library.longdraft_threads.restype = [Pointer], None
        library.longdraft_threads(_parallel_entry())
        self._linear, self._attend = library.longdraft_linear, library.longdraft_attend
        self._unpack = library.longdraft_unpack
        self._unpack.restype, self._unpack.argtypes = None, [Pointer, Long, Long, Long, Long, Pointer, ctypes.c_int]
        self._nibble = library.longdraft_nibble
        self._nibble.restype, self._nibble.argtypes = None, [Pointer, Long, Long, Pointer, ctypes.c_int]
        self._stack, self._chunk = library.longdraft_stack, library.longdraft_attend_chunk
        self._draft, self._on = library.longdraft_draft, library.longdraft_attend_on
        self._draft.argtypes = [*(Pointer,) * 4, Long, *(Pointer,) * 4, ctypes.c_int]
        for function in (self._linear, self._attend, self._stack, self._chunk, self._draft, self._on):
            function.restype = None
        self._linear.argtypes = [Pointer, Long, Long, ctypes.POINTER(Matrix), Long, ctypes.c_int]
        kv, last = (Pointer, ctypes.POINTER(KeysValues), Long), (ctypes.c_float, Pointer, ctypes.c_int)
        # q; keys and values, their slot; heads, rows, d, n; mask, its shape; scale; out; threads
        self._attend.argtypes = [*kv, Long, Long, Long, Long, Pointer, Long, Long, *last]
        self._chunk.argtypes = [*kv, Long, Long, Long, Long, Long, *last]
        # q; keys and values; slots, ends, count; heads, group, d; scale; out, maxima, sums; threads
        self._on.argtypes = [*kv[:2], Pointer, Pointer, *(Long,) * 4, ctypes.c_float, *(Pointer,) * 3, ctypes.c_int]
        self._stack.argtypes = [*[Pointer] * 6, ctypes.c_int, Pointer, Long, Pointer, Pointer, ctypes.c_int]

    def linear(self, x: torch.Tensor, products: Sequence[Weights]) -> list[torch.Tensor]:
        """x (..., in) times several matrices (out, in), with their biases, in one go -> each (..., out)."""
        x = x.contiguous()
        size = x.shape[-1]
        outs = [torch.empty(*x.shape[:-1], w.shape[0]) for w, _ in products]
        matrices = (Matrix * len(outs))(*map(Matrix.of, products, outs))
        rows, threads = x.numel() // size, torch.get_num_threads()
        launch("linear", [x, *outs], self._linear, x.data_ptr(), rows, size, matrices, len(outs), threads)
        return outs

    def unpack(self, weights: Stored) -> torch.Tensor:
        """(out, in) float32: what stored weights stand for."""
        out = torch.empty(weights.shape)
        data = weights.data
        places = (data.data_ptr(), weights.number, *weights.shape, data.stride(0), out.data_ptr())
        launch("unpack", [data, out], self._unpack, *places, torch.get_num_threads())
        return out

    def nibbled(self, weights: torch.Tensor | Stored) -> Nibbled:
        """A matrix (out, in) in four bits, as :func:`~longdraft.native.nibbled.nibbled` makes it, to the bit."""
        found = Nibbled.empty(weights.shape)
        for rows, bands in found.pieces():
            some = (
                self.unpack(Stored(weights.data[rows], weights.format))
                if isinstance(weights, Stored)
                else weights[rows]
            )
            some = some.detach().float().contiguous()
            places = (some.data_ptr(), *some.shape, bands.data_ptr())
            launch("nibbled", [some, bands], self._nibble, *places, torch.get_num_threads())
        return found

    def attend(
        self, q: torch.Tensor, k: KeptRows, v: KeptRows, tree: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Attention of folded rows.

        Args:
            q: (Hkv, G*T, d), row g*T + t of a KV head being query head g of its group, row t; d a multiple of 16.
            k, v: (Hkv, n, d); of the strides of k, one of the last two is 1, the second but last unless they are
                float32; rows of v are contiguous.
            tree: (T, W) bool: which of the last W keys a row sees; it sees all before them. None: all keys.

        Returns:
            Like q.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        heads, rows, d = q.shape
        mask: tuple[int | None, int, int] = (None, 1, 0)
        if tree is not None:
            tree = tree.contiguous()
            mask = (tree.data_ptr(), tree.shape[0], tree.shape[1])
        launch(
            *("attend", [q, out], self._attend),
            *(q.data_ptr(), KeysValues.of(k[None, None], v[None, None]), 0),
            *(heads, rows, d, k.shape[1], *mask, scale, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def attend_chunk(self, q: torch.Tensor, k: KeptRows, v: KeptRows, scale: float) -> torch.Tensor:
        """Attention of a chunk of a prompt, whose row t sees all keys but those of the rows behind it.

        Args:
            q: (Hq, T, d). k, v: (Hkv, n, d), as for :meth:`attend`, the chunk's own keys the last of them.

        Returns:
            Like q.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        heads, rows, d = q.shape
        launch(
            *("attend_chunk", [q, out], self._chunk),
            *(q.data_ptr(), KeysValues.of(k[None, None], v[None, None]), 0),
            *(heads, heads // k.shape[0], rows, d, k.shape[1], scale, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def attend_on(
        self,
        q: torch.Tensor,
        k: KeptRows,
        v: KeptRows,
        slots: torch.Tensor,
        ends: torch.Tensor,
        scale: float,
        part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attention of single rows, each to keys of its own, that goes on from what other keys gave.

        Args:
            q: (B, Hkv, G, d). k, v: (slots, Hkv, n, d), as for :meth:`attend`.
            slots, ends: (B,) int64: where each row's keys lie, and how many of them it sees.
            part: of other keys: values mixed by exp(score - maximum), like q; maxima and sums of these weights
                (B, Hkv, G). The first becomes the result.
        """
        q = q.contiguous()
        out, high, total = part
        batch, heads, group, d = q.shape
        launch(
            *("attend_on", [q, out], self._on),
            *(q.data_ptr(), KeysValues.of(k[None], v[None]), slots.data_ptr(), ends.data_ptr()),
            *(batch, heads, group, d, scale, out.data_ptr(), high.data_ptr(), total.data_ptr()),
            torch.get_num_threads(),
        )
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
        logits: Literal["all", "last", "none"] = "none",
        best: int = 0,
    ) -> StackOutput:
        """Decoder layers; writes the rows' keys and values.

        Args:
            keys, values: (layers, slots, kv_heads, capacity, d).
            x: (B, T, hidden), which becomes the last layer's output.
            queries, hidden: indices of layers whose queries and outputs to keep.
            logits: which rows' to compute.
            best: the likeliest tokens alone are wanted of these rows, so many of each; 0: logits.
        """
        batch, size, _ = x.shape
        out, best = StackOutput(), min(best, stack.vocabulary)
        out.queries = {i: torch.empty(batch, stack.layers[i].heads, size, stack.layers[i].d) for i in queries}
        out.hidden = {i: torch.empty_like(x) for i in hidden}
        rows_each = size if logits == "all" else 1
        if best:
            out.log_probs, out.places = (torch.empty(batch, rows_each, best, dtype=t) for t in (None, torch.long))
        elif logits != "none":
            out.logits = torch.empty(batch, rows_each, stack.vocabulary)
        kept = [(Pointer * len(stack.layers))() for _ in range(2)]
        for places, tensors in zip(kept, (out.queries, out.hidden), strict=True):
            for i, tensor in tensors.items():
                places[i] = tensor.data_ptr()
        kv = KeysValues.of(keys, values)
        structures = (ctypes.addressof(s) for s in (stack.struct, rows.struct, kv))
        arrays = (ctypes.addressof(places) for places in kept)
        found, *chosen = (None if t is None else t.data_ptr() for t in (out.logits, out.log_probs, out.places))
        arguments = (*structures, x.data_ptr(), *arrays, int(logits == "last"), found, best, *chosen)
        launch("stack", [x], self._stack, *arguments, torch.get_num_threads())
        return out

    def draft(
        self,
        block: DraftBlock,
        nodes: Nodes,
        own: tuple[torch.Tensor, torch.Tensor],
        text: tuple[torch.Tensor, torch.Tensor] | None,
        best: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A level of a draft: its block, the head, and each row's likeliest tokens. Writes all rows' keys and values.

        Args:
            own: the draft's keys and values (slots, kv_heads, capacity, d).
            text: those of the target's last layer, for LongSpec; None for EAGLE-3.
            best: tokens of each row; 0: logits are wanted.

        Returns:
            Of the rows that go on: the block's output (rows, hidden) before the last norm; logits (rows, vocabulary),
            of no rows where the best are wanted; log-probabilities and places in the head (rows, best), the likeliest
            first.
        """
        best = min(best, block.vocabulary)
        out, logits = torch.empty(nodes.size, block.hidden), torch.empty(0 if best else nodes.size, block.vocabulary)
        log_probs, places = torch.empty(nodes.size, best), torch.empty(nodes.size, best, dtype=torch.long)
        caches = [None if kv is None else KeysValues.of(kv[0][None], kv[1][None]) for kv in (own, text)]
        structures = [None if s is None else ctypes.addressof(s) for s in (block.struct, nodes.struct, *caches)]
        results = (x.data_ptr() for x in (out, logits, log_probs, places))
        launch("draft", [out], self._draft, *structures, best, *results, torch.get_num_threads())
        return out, logits, log_probs, places


@dataclass
class StackOutput:
    """What a stack brings back besides its last layer's output.

    Attributes:
        logits: (B, T, vocabulary), or (B, 1, vocabulary) of the last rows, or None.
        log_probs, places: (B, T or 1, best), the likeliest first, or None; where in the head they stand.
        queries: layer -> (B, heads, T, d) after RoPE. hidden: layer -> (B, T, hidden).
    """

    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    places: torch.Tensor | None = None
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


def fits(q: torch.Tensor, k: KeptRows, v: KeptRows) -> bool:
    """Whether :meth:`Kernels.attend` takes these: dtype, device, head size, strides."""
    if q.dtype != torch.float32 or any(x.device.type != "cpu" for x in (q, k, v)) or k.dtype != v.dtype:
        return False
    turned = k.stride(-2) == 1 or (k.dtype == torch.float32 and k.stride(-1) == 1)
    served = k.dtype in FORMATS and turned and v.stride(-1) == 1
    return served and q.shape[-1] % HEAD_UNIT == 0 and k.shape[1] > 0


def kernels(progress: Callable[[str], None] | None = None) -> Kernels | None:
    """The kernels of this machine, compiled when they are first asked for.

    Args:
        progress: called with a line of text before they are compiled.

    Returns:
        None where there are none: switched off (LONGDRAFT_NATIVE=0), no compiler, an old processor; the log says why.
    """
    return None if os.environ.get(SWITCH, "1") == "0" else _once(progress)[0]


def missing() -> str | None:
    """Why there are no kernels here; None where there are."""
    return f"{SWITCH}=0" if os.environ.get(SWITCH, "1") == "0" else _once(None)[1]


def kernels_for(level: str) -> Kernels:
    """The kernels for one of the instruction sets that this machine executes.

    Raises:
        OSError: they cannot be had.
    """
    return Kernels(ctypes.CDLL(str(shared_object(level))), level)


# The kernels of this process, or why there are none.
_known: list[tuple[Kernels | None, str | None]] = []
_lock = threading.Lock()


def _once(progress: Callable[[str], None] | None) -> tuple[Kernels | None, str | None]:
    with _lock:
        if not _known:
            _known.append(_made(progress))
        return _known[0]


def _made(progress: Callable[[str], None] | None) -> tuple[Kernels | None, str | None]:
    try:
        return Kernels(ctypes.CDLL(str(shared_object(chosen := _level(), progress=progress))), chosen), None
    except (OSError, AttributeError) as error:
        # An old or another processor is nothing to put right; all else is.
        level = logging.INFO if isinstance(error, _NotForThis) else logging.WARNING
        logger.log(level, "No kernels of our own on this CPU: %s. Torch computes. %s.", error, SLOWER)
        return None, str(error)


class _NotForThis(OSError):
    """This processor or system has no kernels."""


def _level() -> str:
    """The widest instruction set, or the one that LONGDRAFT_NATIVE names (v2, v3, v4, v4-vnni)."""
    try:
        found = levels()
    except OSError as error:
        raise _NotForThis(str(error)) from None
    wanted = f"x86-64-{os.environ.get(SWITCH, '1')}"
    if wanted in LEVELS["x86_64"]:
        if wanted not in found:
            raise OSError(f"{SWITCH}={os.environ[SWITCH]}, which this processor does not execute")
        return wanted
    taken = [level for level in found if level not in ON_REQUEST]
    if not taken:
        raise _NotForThis("the processor has no AVX2")
    return taken[0]


@cache
def _parallel_entry() -> int | None:
    """Where GOMP_parallel lies in the OpenMP library that torch has loaded; None: the kernels use one thread."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            found = re.search(r"/\S*/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$", line)
            if found:
                with suppress(OSError, AttributeError):
                    return ctypes.cast(ctypes.CDLL(found[0]).GOMP_parallel, Pointer).value
    logger.warning("torch's OpenMP library was not found: longdraft's kernels run on one thread.")
    return None
