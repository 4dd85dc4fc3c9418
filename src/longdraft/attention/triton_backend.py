"""Hybrid tree attention on Triton: the prefix split over the GPU, the block masked, merged by log-sum-exp.

Nothing here waits for the device: lengths and slots are read by the kernels, and the host's ``max_length``
only chooses how many splits there are. A captured CUDA graph therefore stays right when they change, for any
length up to the cache's capacity. Tile sizes and splits are tuned once a GPU (:mod:`.triton_tuning`).
"""

from __future__ import annotations

import functools
import math
import statistics

import torch
import triton
import triton.language as tl

from longdraft.attention import triton_tuning
from longdraft.attention.block import Block
from longdraft.attention.triton_kernels import block_kernel, merge_kernel, prefix_kernel
from longdraft.attention.triton_tuning import Choice, Kind, Tuning
from longdraft.errors import CapabilityError

MAX_HEAD_DIM = 256
# With the block as one more part, 64 parts of a row are what the merge kernel holds in registers.
MAX_SPLITS = 63
# Under this many keys a split costs more in partial outputs than it gains in parallelism.
MIN_KEYS_PER_SPLIT = 256
# Elements of a tile, by bytes an element. 16-bit: a tile of q and two stages each of K and V make 80 KiB of
# shared memory, which fits every GPU since Ampere and twice the large ones. float32 has no tensor core that is
# exact: its operands pass through registers, which larger tiles would spill.
TILE_ELEMENTS = {2: 8192, 4: 2048}
MAX_TILE_ROWS = 64
WARPS = 4
# Partial outputs that one program of the merge kernel holds in registers.
MERGE_ELEMENTS = 8192

# Keys that choices are measured on: more than a large GPU's cache holds.
TUNING_KEYS, TUNING_RUNS = 16384, 5

tuning = Tuning()
INTERPRETED = not isinstance(prefix_kernel, triton.JITFunction)
DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    # Triton's interpreter multiplies bfloat16 as if its bits were integers; float32 products are exact.
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
}


def prefix_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_t: torch.Tensor,
    lengths_t: torch.Tensor,
    scale: float,
    max_length: int,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of the block against its sequence's prefix, without a mask.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d), any strides; Hq a multiple of Hkv.
        slots_t, lengths_t: (B,) int32 on q's device. Sequence b sees rows [0, lengths_t[b]) of slots_t[b].
        max_length: a host bound on the lengths; it guides the number of splits and never the result.
        num_splits: pieces that a prefix is cut into; None lets the size of the GPU decide.

    Returns:
        o (B, Hq, T, d) and lse (B, Hq, T), both float32; o = 0 and lse = -inf for a prefix of length 0.
    """
    _check(q, keys, values)
    choice = _choice(q, keys)
    splits = _choose_splits(q, keys, max_length, choice) if num_splits is None else num_splits
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {splits}, expected 1 to {MAX_SPLITS}")
    o_parts, lse_parts = _parts(splits, q)
    _launch_prefix(q, keys, values, slots_t, lengths_t, scale, o_parts, lse_parts, splits, choice)
    if splits == 1:
        return o_parts[0], lse_parts[0]
    o = torch.empty_like(o_parts[0])
    lse = torch.empty_like(lse_parts[0])
    _launch_merge(o_parts, lse_parts, o, lse)
    return o, lse


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    slots_t: torch.Tensor,
    lengths_t: torch.Tensor,
    scale: float,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of the block against the tree: the block itself, and the tree's rows before it.

    Args:
        q, keys, values, slots_t, lengths_t: as in ``prefix_attention``; the tree's keys, the block's own T the last of
            them, stand at cache rows lengths_t[b] + [0, offset + T).
        mask: (B, T, offset + T) bool, True where row i may see row j of the tree; None for a causal chain.
        offset: rows of the tree before the block.

    Returns:
        o (B, Hq, T, d) and lse (B, Hq, T), both float32; o = 0 and lse = -inf for a row that sees nothing.
    """
    _check(q, keys, values)
    o_parts, lse_parts = _parts(1, q)
    _launch_block(q, keys, values, mask, slots_t, lengths_t, scale, o_parts[0], lse_parts[0], offset)
    return o_parts[0], lse_parts[0]


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Hybrid tree attention: ``reference.attend`` in three kernels, for float32, float16 and bfloat16.

    Args:
        q: (B, Hq, T, d), after RoPE.
        keys, values: (slots, Hkv, capacity, d), any strides; the tree's keys stand offset each prefix.
        block: where each sequence's rows lie and what they may see.
        scale: the softmax scale, usually d ** -0.5.

    Returns:
        (B, Hq, T, d) in q's dtype and layout.
    """
    _check(q, keys, values)
    slots, lengths = block.slots_t, block.lengths_t
    choice = _choice(q, keys)
    splits = _choose_splits(q, keys, max(block.lengths, default=0), choice)
    # The splits of the prefix and the block are all parts of one attention: one merge joins them.
    o_parts, lse_parts = _parts(splits + 1, q)
    _launch_prefix(q, keys, values, slots, lengths, scale, o_parts, lse_parts, splits, choice)
    _launch_block(q, keys, values, block.mask, slots, lengths, scale, o_parts[splits], lse_parts[splits], block.offset)
    out = torch.empty_like(q)
    _launch_merge(o_parts, lse_parts, out, None)
    return out


def _check(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
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
    if q.dtype not in DOT_TYPES or not q.dtype == keys.dtype == values.dtype:
        raise CapabilityError(
            f"the Triton backend takes float32, float16 or bfloat16, the same for q, keys and values, "
            f"not {q.dtype}, {keys.dtype} and {values.dtype}; cast them, or use the reference attention"
        )
    if keys.shape != values.shape or keys.shape[3] != d or heads % keys.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}")


def _tiles(q: torch.Tensor, keys: torch.Tensor) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D: powers of two, 16 or more as tl.dot asks."""
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    block_d = max(16, triton.next_power_of_2(q.shape[3]))
    block_n = max(16, min(MAX_TILE_ROWS, TILE_ELEMENTS[q.element_size()] // block_d))
    return max(16, min(block_n, triton.next_power_of_2(rows))), block_n, block_d


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors to fill; one for the interpreter, which runs programs one by one."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _choice(q: torch.Tensor, keys: torch.Tensor) -> Choice:
    """How to launch the prefix kernel: as measured on this GPU, measuring it now if need be; else the defaults."""
    block_m, block_n, _ = _tiles(q, keys)
    default = Choice(block_n, WARPS)
    # float32 is there to check by, and larger tiles than the default's would not fit the registers.
    if q.device.type != "cuda" or INTERPRETED or q.element_size() != 2 or not triton_tuning.wanted():
        return default
    kind = Kind(_device_name(q.device), q.shape[3], block_m, str(q.dtype), triton.__version__)
    found = tuning.known(kind)
    if found is None and not torch.cuda.is_current_stream_capturing():
        found = tuning.find(kind, default, functools.partial(_seconds, _trial(q, keys, block_m)))
    return found or default


@functools.cache
def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device))


def _trial(q: torch.Tensor, keys: torch.Tensor, block_m: int) -> tuple[torch.Tensor, ...]:
    """Made-up q, keys, values, slots and lengths of the same kind, for one tile of rows."""
    (_, heads, _, d), kv_heads = q.shape, keys.shape[1]
    size = max(1, block_m * kv_heads // heads)
    some_q, k, v = (
        torch.randn(1, h, n, d, dtype=q.dtype, device=q.device)
        for h, n in ((heads, size), (kv_heads, TUNING_KEYS), (kv_heads, TUNING_KEYS))
    )
    slot, length = (torch.full((1,), x, dtype=torch.int32, device=q.device) for x in (0, TUNING_KEYS))
    return some_q, k, v, slot, length


def _seconds(trial: tuple[torch.Tensor, ...], choice: Choice) -> float:
    """GPU time of prefix kernel and merge, median of a few runs."""
    q, keys, values, slots, lengths = trial
    splits = _choose_splits(q, keys, TUNING_KEYS, choice)
    o_parts, lse_parts = _parts(splits, q)
    out = torch.empty_like(q)
    times = []
    for _ in range(1 + TUNING_RUNS):  # the first one compiles
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _launch_prefix(q, keys, values, slots, lengths, 1.0, o_parts, lse_parts, splits, choice)
        _launch_merge(o_parts, lse_parts, out, None)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def _choose_splits(q: torch.Tensor, keys: torch.Tensor, max_length: int, choice: Choice) -> int:
    """As many splits as fill the GPU in one wave of a few programs a processor, none of them tiny."""
    block_m, _, _ = _tiles(q, keys)
    kv_heads = keys.shape[1]
    rows = q.shape[1] // kv_heads * q.shape[2]
    programs = max(1, q.shape[0] * kv_heads * triton.cdiv(rows, block_m))
    wanted = choice.waves * _processors(q.device) // programs
    return max(1, min(wanted, MAX_SPLITS, max_length // MIN_KEYS_PER_SPLIT))


def _parts(parts: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for ``parts`` partial outputs (P, B, Hq, T, d) and their log-sum-exp (P, B, Hq, T)."""
    o = torch.empty((parts, *q.shape), dtype=torch.float32, device=q.device)
    return o, torch.empty((parts, *q.shape[:3]), dtype=torch.float32, device=q.device)


def _launch_prefix(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_t: torch.Tensor,
    lengths_t: torch.Tensor,
    scale: float,
    o_parts: torch.Tensor,
    lse_parts: torch.Tensor,
    splits: int,
    choice: Choice,
) -> None:
    """Fills parts [0, splits)."""
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    block_m, _, block_d = _tiles(q, keys)
    group = heads // kv_heads
    grid = (triton.cdiv(group * size, block_m), batch * kv_heads, splits)
    if 0 in grid:
        return
    with torch.cuda.device_of(q):
        prefix_kernel[grid](
            q, keys, values, slots_t, lengths_t, o_parts, lse_parts, scale * math.log2(math.e),
            size, kv_heads, splits, *q.stride(), *keys.stride(), *values.stride(),
            GROUP=group, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=choice.block_n,
            DOT=DOT_TYPES[q.dtype], num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip


def _launch_block(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    slots_t: torch.Tensor,
    lengths_t: torch.Tensor,
    scale: float,
    o: torch.Tensor,
    lse: torch.Tensor,
    offset: int,
) -> None:
    """Fills one part: ``o`` (B, Hq, T, d) and ``lse`` (B, Hq, T), contiguous float32."""
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    if mask is not None and mask.shape != (batch, size, offset + size):
        raise ValueError(f"mask is {tuple(mask.shape)}, expected {(batch, size, offset + size)}")
    block_m, block_n, block_d = _tiles(q, keys)
    group = heads // kv_heads
    grid = (triton.cdiv(group * size, block_m), batch * kv_heads)
    if 0 in grid:
        return
    # A causal chain reads no mask; the kernel still wants some pointer and three strides.
    mask_t, mask_strides = (slots_t, (0, 0, 0)) if mask is None else (mask.view(torch.uint8), mask.stride())
    with torch.cuda.device_of(q):
        block_kernel[grid](
            q, keys, values, mask_t, slots_t, lengths_t, o, lse, scale * math.log2(math.e),
            size, offset, kv_heads, *q.stride(), *keys.stride(), *values.stride(), *mask_strides,
            CAUSAL=mask is None, GROUP=group, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n,
            DOT=DOT_TYPES[q.dtype], num_warps=WARPS, num_stages=2,
        )  # fmt: skip


def _launch_merge(o_parts: torch.Tensor, lse_parts: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Merges all parts into ``out`` (B, Hq, T, d), any dtype and strides, and ``lse`` (B, Hq, T) if asked."""
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
            parts, rows, size, heads, *out.stride(),
            WITH_LSE=lse is not None, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_P=block_p, BLOCK_R=block_r,
            num_warps=WARPS if block_r * block_p * block_d <= MERGE_ELEMENTS else 2 * WARPS,
        )  # fmt: skip
