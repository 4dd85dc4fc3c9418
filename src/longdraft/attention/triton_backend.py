"""Hybrid tree attention on Triton: the prefix is split over the GPU, the block is masked, log-sum-exp merges them.

Nothing here waits for the device. The kernels read lengths and slots there, and the host's ``max_length`` only decides
the number of splits. A recorded CUDA graph therefore stays right when they change, for any length up to the cache's
capacity.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.triton_kernels import merge_kernel, part_kernel
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
# Programs for each processor, if the prefix is long enough to split so often.
WAVES = 2
# Partial outputs that one program of the merge kernel holds in registers.
MERGE_ELEMENTS = 8192
# Place in :attr:`Block.derived`.
MASK = "triton mask"

LOG2_E = math.log2(math.e)

INTERPRETED = not isinstance(part_kernel, triton.JITFunction)
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
        """Warps of a program."""
        # Products of float32 run on no tensor core: with the factors of eight bits, four warps spill registers.
        return 2 * WARPS if self.scaled and self.q.element_size() == 4 else WARPS


def key_tile(q: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of keys for queries (..., d): powers of two, at least 16 as tl.dot requires."""
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    return max(16, min(MAX_TILE_ROWS, TILE_ELEMENTS[q.element_size()] // block_d)), block_d


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
    return _attend(inputs, max(block.lengths, default=0), True, _mask(block), block.offset, scoring.sinks)


def attend_prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float
) -> torch.Tensor:
    """Same contract as :data:`longdraft.attention.prefix.PrefixAttend`; 0 for a prefix of length 0."""
    inputs = Inputs(q, keys, values, block.slots_t, block.lengths_t, scale)
    return _attend(inputs, max(block.lengths, default=0), tree=False)


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
    inputs = Inputs(q, Scaled(keys, key_scales), Scaled(values, value_scales), slots, lengths, scale, softcap)
    return _attend(inputs, bound, tree, mask, offset, sinks)


def _attend(
    inputs: Inputs,
    bound: int,
    tree: bool,
    mask: torch.Tensor | None = None,
    offset: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention to prefixes of up to ``bound`` rows, a host integer that affects the number of splits and never the
    result, and with ``tree`` to what is behind them; ``mask`` and ``offset`` as in :func:`_launch_parts`."""
    q = inputs.q
    _check(q, inputs.keys, inputs.values)
    splits = _choose_splits(inputs, bound)
    # One merge joins the splits of the prefix and the tree, which are all parts of one attention.
    o = torch.empty((splits + tree, *q.shape), dtype=torch.float32, device=q.device)
    lse = torch.empty(o.shape[:-1], dtype=torch.float32, device=q.device)
    _launch_parts(inputs, o[:splits], lse[:splits])
    if tree:
        _launch_parts(inputs, o[splits:], lse[splits:], True, mask, offset)
    out = torch.empty_like(q)
    _launch_merge(o, lse, out, sinks)
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


def _choose_splits(inputs: Inputs, max_length: int) -> int:
    """Count of splits that fill the GPU with :data:`WAVES` programs for each processor, none of them tiny."""
    q, keys = inputs.q, inputs.keys
    programs = max(1, q.shape[0] * keys.shape[1] * triton.cdiv(inputs.rows, inputs.tiles[0]))
    wanted = WAVES * _processors(q.device) // programs
    return max(1, min(wanted, MAX_SPLITS, max_length // MIN_KEYS_PER_SPLIT))


def _launch_parts(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    tree: bool = False,
    mask: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """Writes ``o`` (P, B, Hq, T, d) and ``lse`` (P, B, Hq, T), both float32: the prefix in P splits, or the tree.

    Args:
        mask: (B, T, offset + T) bool, True where row i sees row j of the tree; None for a causal chain.
        offset: the tree offset, rows of the tree before the block.
    """
    q, keys, _, slots, lengths, *_, begins = inputs
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    if mask is not None and mask.shape != (batch, size, offset + size):
        raise ValueError(f"mask is {tuple(mask.shape)}, expected {(batch, size, offset + size)}")
    block_m, block_n, block_d = inputs.tiles
    grid = (triton.cdiv(inputs.rows, block_m), batch * kv_heads, o.shape[0])
    if 0 in grid:
        return
    capped, windowed = inputs.softcap is not None, begins is not None
    # Scales take registers that keys would have, and so do windows and caps in a loop over a long prefix.
    small = inputs.scaled or (not tree and (capped or windowed))
    # What is not read needs some pointer and some strides.
    mask_t, mask_strides = (slots, (0, 0, 0)) if mask is None else (mask.view(torch.uint8), mask.stride())
    with torch.cuda.device_of(q):
        part_kernel[grid](
            q, *inputs.stored, mask_t, slots, lengths, slots if begins is None else begins, o, lse,
            *inputs.factors, size, offset, kv_heads, o.shape[0], *inputs.strides, *mask_strides,
            TREE=tree, CAUSAL=tree and mask is None, SCALED=inputs.scaled, WINDOWED=windowed and mask is None,
            CAPPED=capped, GROUP=heads // kv_heads, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_M=block_m,
            BLOCK_N=max(16, block_n // 2) if small else block_n, DOT=DOT_TYPES[q.dtype],
            num_warps=inputs.warps, num_stages=3 if small and not tree else 2,
        )  # fmt: skip


def _launch_merge(
    o_parts: torch.Tensor, lse_parts: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """Merges all parts into ``out`` (B, Hq, T, d), any dtype and strides. ``sinks``: (Hq,) further scores, or None."""
    parts, batch, heads, size, d = o_parts.shape
    rows = batch * heads * size
    block_p = triton.next_power_of_2(parts)
    block_d = max(16, triton.next_power_of_2(d))
    block_r = max(1, MERGE_ELEMENTS // (block_p * block_d))
    if rows == 0:
        return
    with torch.cuda.device_of(out):
        merge_kernel[(triton.cdiv(rows, block_r),)](
            o_parts, lse_parts, out, lse_parts if sinks is None else sinks.float().contiguous(), parts, rows, size,
            heads, *out.stride(), WITH_SINKS=sinks is not None, HEAD_DIM=d, BLOCK_D=block_d, BLOCK_P=block_p,
            BLOCK_R=block_r, num_warps=WARPS if block_r * block_p * block_d <= MERGE_ELEMENTS else 2 * WARPS,
        )  # fmt: skip
