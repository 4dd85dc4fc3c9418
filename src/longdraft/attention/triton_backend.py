"""Hybrid tree attention on Triton: the prefix is split over the GPU, the block is masked, log-sum-exp merges them.

Nothing here waits for the device. The kernels read lengths and slots there, and the host's ``max_length`` only decides
the number of splits. A recorded CUDA graph therefore stays right when they change, for any length up to the cache's
capacity. Tile sizes and splits are tuned once for each GPU (:mod:`.triton_tuning`).
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from longdraft.attention import triton_tuning
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.triton_kernels import block_kernel, merge_kernel, prefix_kernel
from longdraft.attention.triton_tuning import Choice, Kind, Tuning
from longdraft.errors import CapabilityError
from longdraft.native.scaled import KeptRows, Scaled

MAX_HEAD_DIM = 256
# The merge kernel holds 64 parts of a row in registers: the splits and the block.
MAX_SPLITS = 63
# With fewer keys a split costs more in partial outputs than it gains in parallelism.
MIN_KEYS_PER_SPLIT = 256
# Bytes of an element -> elements of a tile. In 16 bits a tile of q and two stages each of K and V take 80 KiB of shared
# memory, which fits every GPU since Ampere, and twice the large ones. float32 has no exact tensor core: its operands
# pass through registers, which larger tiles would spill.
TILE_ELEMENTS = {2: 8192, 4: 2048}
MAX_TILE_ROWS = 64
WARPS = 4
# Partial outputs that one program of the merge kernel holds in registers.
MERGE_ELEMENTS = 8192
# Place in :attr:`Block.derived`.
MASK = "triton mask"

# Keys for the measurement of choices: more than a large GPU's cache holds.
TUNING_KEYS, TUNING_RUNS = 16384, 5

LOG2_E = math.log2(math.e)

tuning = Tuning()
INTERPRETED = not isinstance(prefix_kernel, triton.JITFunction)
DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    # Triton's interpreter multiplies bfloat16 as if its bits were integers, so it uses exact float32 products.
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
}


class Inputs(NamedTuple):
    """q (B, Hq, T, d); keys, values (slots, Hkv, n, d), any strides; slots, lengths (B,), begins (B, T) int32.

    The scales of rows in eight bits lie side by side, those of keys as those of values.
    """

    q: torch.Tensor
    keys: KeptRows
    values: KeptRows
    slots: torch.Tensor
    lengths: torch.Tensor
    scale: float
    softcap: float | None = None
    begins: torch.Tensor | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """Scale and cap of scores in base 2."""
        if self.softcap is None:
            return self.scale * LOG2_E, 0.0
        return self.scale / self.softcap, self.softcap * LOG2_E

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and their scales; where there are none, the kernels need some pointer."""
        if isinstance(self.keys, Scaled) and isinstance(self.values, Scaled):
            return self.keys.numbers, self.values.numbers, self.keys.scales, self.values.scales
        assert isinstance(self.keys, torch.Tensor) and isinstance(self.values, torch.Tensor)
        return self.keys, self.values, self.lengths, self.lengths

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of q, keys and values; then the distance between two slots' and two heads' scales."""
        of_scales = self.keys.scales.stride()[:2] if isinstance(self.keys, Scaled) else (0, 0)
        return *self.q.stride(), *self.keys.stride(), *self.values.stride(), *of_scales

    @property
    def scaled(self) -> bool:
        """True if keys and values are in eight bits."""
        return isinstance(self.keys, Scaled)

    @property
    def rows(self) -> int:
        """Query rows of a KV head: the heads of its group are folded into rows."""
        return self.q.shape[1] // self.keys.shape[1] * self.q.shape[2]

    @property
    def tiles(self) -> tuple[int, int, int]:
        """BLOCK_M, BLOCK_N, BLOCK_D."""
        block_n, block_d = key_tile(self.q)
        return max(16, min(block_n, triton.next_power_of_2(self.rows))), block_n, block_d

    @property
    def warps(self) -> int:
        """Warps of a program, where none were measured."""
        # Products of float32 run on no tensor core: with the factors of eight bits, four warps spill registers.
        return 2 * WARPS if self.scaled and self.q.element_size() == 4 else WARPS


def key_tile(q: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of keys for queries (..., d): powers of two, at least 16 as tl.dot requires."""
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    return max(16, min(MAX_TILE_ROWS, TILE_ELEMENTS[q.element_size()] // block_d)), block_d


def prefix_attention(
    q: torch.Tensor,
    keys: KeptRows,
    values: KeptRows,
    slots_t: torch.Tensor,
    lengths_t: torch.Tensor,
    scale: float,
    max_length: int,
    num_splits: int | None = None,
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of the block attends to its sequence's whole prefix.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d), any strides; Hq a multiple of Hkv.
        slots_t, lengths_t: (B,) int32 on q's device. Sequence b sees rows [0, lengths_t[b]) of slots_t[b].
        max_length: upper bound on the lengths, a host integer. It affects the number of splits, never the result.
        num_splits: pieces into which a prefix is split; None to choose by the size of the GPU.
        choice: launch parameters, which never affect the result; None for the fastest.

    Returns:
        o (B, Hq, T, d) and lse (B, Hq, T), both float32; o = 0 and lse = -inf for a prefix of length 0.
    """
    inputs = Inputs(q, keys, values, slots_t, lengths_t, scale)
    _check(q, keys, values)
    choice = choice or _choice(inputs)
    splits = _choose_splits(inputs, max_length, choice) if num_splits is None else num_splits
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {splits}, expected 1 to {MAX_SPLITS}")
    o_parts, lse_parts = _parts(splits, q)
    _launch_prefix(inputs, o_parts, lse_parts, splits, choice)
    if splits == 1:
        return o_parts[0], lse_parts[0]
    o = torch.empty_like(o_parts[0])
    lse = torch.empty_like(lse_parts[0])
    _launch_merge(o_parts, lse_parts, o, lse)
    return o, lse


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    scale: float,
    scoring: Scoring = PLAIN,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`, for float32, float16 and bfloat16.

    Keys and values may have any strides. The output has q's layout.
    """
    begins = None if block.begins is None else block.begins.contiguous()
    inputs = Inputs(q, keys, values, block.slots_t, block.lengths_t, scale, scoring.softcap, begins)
    return _attend(inputs, _mask(block), block.offset, max(block.lengths, default=0), scoring.sinks)


def scaled_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    values: torch.Tensor,
    value_scales: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    offset: int,
    bound: int,
    tree: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Launches the kernels; see :func:`longdraft.attention.scaled.scaled_attention`."""
    rows = Scaled(keys, key_scales), Scaled(values, value_scales)
    if not tree:
        return prefix_attention(q, *rows, slots, lengths, scale, bound)[0].to(q.dtype)
    return _attend(Inputs(q, *rows, slots, lengths, scale, softcap), mask, offset, bound, sinks)


def _attend(
    inputs: Inputs, mask: torch.Tensor | None, offset: int, bound: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention to prefixes of up to ``bound`` rows and to the tree; ``mask`` and ``offset`` as in `_launch_block`."""
    q = inputs.q
    _check(q, inputs.keys, inputs.values)
    choice = _choice(inputs)
    splits = _choose_splits(inputs, bound, choice)
    # One merge joins the splits of the prefix and the block, which are all parts of one attention.
    o_parts, lse_parts = _parts(splits + 1, q)
    _launch_prefix(inputs, o_parts, lse_parts, splits, choice)
    _launch_block(inputs, mask, offset, o_parts[splits], lse_parts[splits])
    out = torch.empty_like(q)
    _launch_merge(o_parts, lse_parts, out, None, sinks)
    return out


def _mask(block: Block) -> torch.Tensor | None:
    """The rows of the tree that each row sees, ``begins`` included; None for a causal chain."""
    if block.begins is None or block.mask is None:
        return block.mask
    if MASK not in block.derived:
        ranks = block.lengths_t.view(-1, 1, 1) + block.mask.cumsum(-1, dtype=torch.int32) - 1
        block.derived[MASK] = block.mask & (ranks >= block.begins.unsqueeze(-1))
    mask: torch.Tensor = block.derived[MASK]
    return mask


def _check(q: torch.Tensor, keys: KeptRows, values: KeptRows) -> None:
    heads, d = q.shape[1], q.shape[3]
    if q.device.type == "cpu" and not INTERPRETED:
        raise CapabilityError(
            "the Triton backend needs tensors on a GPU; use the CPU or the reference attention, "
            "or set TRITON_INTERPRET=1 before starting to test the kernels"
        )
    if d > MAX_HEAD_DIM:
        raise CapabilityError(
            f"the Triton backend takes head sizes up to {MAX_HEAD_DIM}, this model has {d}; "
            "use the SDPA or the reference attention"
        )
    stored = torch.int8 if isinstance(keys, Scaled) else q.dtype
    if q.dtype not in DOT_TYPES or not stored == keys.dtype == values.dtype:
        raise CapabilityError(
            f"the Triton backend takes float32, float16 or bfloat16, the same for q, keys and values, "
            f"not {q.dtype}, {keys.dtype} and {values.dtype}; cast them, or use the reference attention"
        )
    if keys.shape != values.shape or keys.shape[3] != d or heads % keys.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}")


@functools.cache
def _processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 for the interpreter, which runs one program at a time."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _choice(inputs: Inputs) -> Choice:
    """Launch parameters of the prefix kernel: the fastest, measured now if necessary, or the default."""
    q, (block_m, block_n, _) = inputs.q, inputs.tiles
    default = Choice(block_n, WARPS)
    # Windows, caps and scales take registers that keys would have.
    if inputs.softcap is not None or inputs.begins is not None or inputs.scaled:
        return Choice(max(16, block_n // 2), inputs.warps, 3)
    # float32 is for checks, and larger tiles than the default's would not fit the registers.
    if q.device.type != "cuda" or INTERPRETED or q.element_size() != 2 or not triton_tuning.wanted():
        return default
    kind = Kind(_device_name(q.device), q.shape[3], block_m, str(q.dtype), triton.__version__)
    choice = tuning.known(kind)
    if choice is None and not torch.cuda.is_current_stream_capturing():
        choice = tuning.find(kind, default, functools.partial(_seconds, _trial(inputs)))
    return choice or default


@functools.cache
def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device))


def _trial(inputs: Inputs) -> Inputs:
    """Random inputs of the same kind, for one tile of rows."""
    (_, heads, _, d), kv_heads = inputs.q.shape, inputs.keys.shape[1]
    dtype, device = inputs.q.dtype, inputs.q.device
    size = max(1, inputs.tiles[0] * kv_heads // heads)
    q, keys, values = (
        torch.randn(1, h, n, d, dtype=dtype, device=device)
        for h, n in ((heads, size), (kv_heads, TUNING_KEYS), (kv_heads, TUNING_KEYS))
    )
    slot, length = (torch.full((1,), x, dtype=torch.int32, device=device) for x in (0, TUNING_KEYS))
    return Inputs(q, keys, values, slot, length, 1.0)


def _seconds(trial: Inputs, choice: Choice) -> float:
    """Median GPU time of the prefix kernel and the merge over a few runs."""
    splits = _choose_splits(trial, TUNING_KEYS, choice)
    o_parts, lse_parts = _parts(splits, trial.q)
    out = torch.empty_like(trial.q)
    times = []
    for _ in range(1 + TUNING_RUNS):  # the first one compiles
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _launch_prefix(trial, o_parts, lse_parts, splits, choice)
        _launch_merge(o_parts, lse_parts, out, None)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def _choose_splits(inputs: Inputs, max_length: int, choice: Choice) -> int:
    """Count of splits that fill the GPU with ``choice.waves`` programs for each processor, none of them tiny."""
    q, keys = inputs.q, inputs.keys
    programs = max(1, q.shape[0] * keys.shape[1] * triton.cdiv(inputs.rows, inputs.tiles[0]))
    wanted = choice.waves * _processors(q.device) // programs
    return max(1, min(wanted, MAX_SPLITS, max_length // MIN_KEYS_PER_SPLIT))


def _parts(parts: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for ``parts`` partial outputs (P, B, Hq, T, d) and their log-sum-exp (P, B, Hq, T)."""
    o = torch.empty((parts, *q.shape), dtype=torch.float32, device=q.device)
    return o, torch.empty((parts, *q.shape[:3]), dtype=torch.float32, device=q.device)


def _launch_prefix(inputs: Inputs, o_parts: torch.Tensor, lse_parts: torch.Tensor, splits: int, choice: Choice) -> None:
    """Writes parts [0, splits)."""
    q, keys, _, slots, lengths, *_, begins = inputs
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    block_m, _, block_d = inputs.tiles
    grid = (triton.cdiv(inputs.rows, block_m), batch * kv_heads, splits)
    if 0 in grid:
        return
    with torch.cuda.device_of(q):
        prefix_kernel[grid](
            q, *inputs.stored, slots, lengths, slots if begins is None else begins, o_parts, lse_parts,
            *inputs.factors, size, kv_heads, splits, *inputs.strides, SCALED=inputs.scaled,
            WINDOWED=begins is not None, CAPPED=inputs.softcap is not None,
            GROUP=heads // kv_heads, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=choice.block_n,
            DOT=DOT_TYPES[q.dtype], num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip


def _launch_block(inputs: Inputs, mask: torch.Tensor | None, offset: int, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes the part of the tree: ``o`` (B, Hq, T, d) and ``lse`` (B, Hq, T), both float32.

    Args:
        mask: (B, T, offset + T) bool, True where row i sees row j of the tree; None for a causal chain.
        offset: the tree offset, rows of the tree before the block.
    """
    q, keys, _, slots, lengths, *_, begins = inputs
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    if mask is not None and mask.shape != (batch, size, offset + size):
        raise ValueError(f"mask is {tuple(mask.shape)}, expected {(batch, size, offset + size)}")
    block_m, block_n, block_d = inputs.tiles
    grid = (triton.cdiv(inputs.rows, block_m), batch * kv_heads)
    if 0 in grid:
        return
    if inputs.scaled:  # scales take registers that keys would have
        block_n = max(16, block_n // 2)
    # A causal chain reads no mask, but the kernel needs some pointer and three strides.
    mask_t, mask_strides = (slots, (0, 0, 0)) if mask is None else (mask.view(torch.uint8), mask.stride())
    with torch.cuda.device_of(q):
        block_kernel[grid](
            q, *inputs.stored, mask_t, slots, lengths, slots if begins is None else begins, o, lse,
            *inputs.factors, size, offset, kv_heads, *inputs.strides, *mask_strides,
            CAUSAL=mask is None, SCALED=inputs.scaled, WINDOWED=mask is None and begins is not None,
            CAPPED=inputs.softcap is not None,
            GROUP=heads // kv_heads, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n,
            DOT=DOT_TYPES[q.dtype], num_warps=inputs.warps, num_stages=2,
        )  # fmt: skip


def _launch_merge(
    o_parts: torch.Tensor,
    lse_parts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merges all parts into ``out`` (B, Hq, T, d), any dtype and strides, and into ``lse`` (B, Hq, T) unless None.

    Args:
        sinks: (Hq,) further scores, which count in ``lse`` too; None for none.
    """
    parts, batch, heads, size, d = o_parts.shape
    rows = batch * heads * size
    block_p = triton.next_power_of_2(parts)
    block_d = max(16, triton.next_power_of_2(d))
    block_r = max(1, MERGE_ELEMENTS // (block_p * block_d))
    if rows == 0:
        return
    with torch.cuda.device_of(out):
        merge_kernel[(triton.cdiv(rows, block_r),)](
            o_parts, lse_parts, out, lse_parts if lse is None else lse,
            lse_parts if sinks is None else sinks.float().contiguous(), parts, rows, size, heads, *out.stride(),
            WITH_LSE=lse is not None, WITH_SINKS=sinks is not None,
            HEAD_DIM=d, BLOCK_D=block_d, BLOCK_P=block_p, BLOCK_R=block_r,
            num_warps=WARPS if block_r * block_p * block_d <= MERGE_ELEMENTS else 2 * WARPS,
        )  # fmt: skip
