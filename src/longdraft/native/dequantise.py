"""Unpacks stored blocks with torch's operations: the reference of the kernels, and the fallback without them.

Each function takes blocks (n, bytes) and returns floats (n, weights of a block), with the same bits as gguf's own
dequantisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _half(x: torch.Tensor) -> torch.Tensor:
    """(n, 2) bytes -> (n, 1) floats."""
    return x.contiguous().view(torch.float16).float()


def _nibbles(x: torch.Tensor) -> torch.Tensor:
    """(n, 16) bytes -> (n, 32): the low nibbles, then the high ones."""
    return torch.cat([x & 15, x >> 4], dim=-1).float()


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * (_nibbles(x[:, 2:]) - 8)


def _q4_1(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _nibbles(x[:, 4:]) + _half(x[:, 2:4])


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * x[:, 2:].contiguous().view(torch.int8).float()


def _six_bit_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and smallest values of the eight pieces of a K block, (n, 8, 1) each, from its first 16 bytes."""
    low, middle, high = x[:, 4:8], x[:, 8:12], x[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1).float()
    smallest = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1).float()
    return (_half(x[:, :2]) * scales)[..., None], (_half(x[:, 2:4]) * smallest)[..., None]


def _q4_k(x: torch.Tensor) -> torch.Tensor:
    scale, smallest = _six_bit_scales(x)
    q = x[:, 16:].view(-1, 4, 1, 32) >> _shifts(x, 4)[:, None] & 15
    return (scale * q.reshape(-1, 8, 32).float() - smallest).flatten(1)


def _q5_k(x: torch.Tensor) -> torch.Tensor:
    scale, smallest = _six_bit_scales(x)
    fifth = x[:, None, 16:48] >> _shifts(x, 1)[:, None] & 1
    q = x[:, 48:].view(-1, 4, 1, 32) >> _shifts(x, 4)[:, None] & 15
    return (scale * (q.reshape(-1, 8, 32) | fifth << 4).float() - smallest).flatten(1)


def _q6_k(x: torch.Tensor) -> torch.Tensor:
    low = x[:, :128].view(-1, 2, 1, 2, 32) >> _shifts(x, 4)[:, None, None] & 15
    high = x[:, 128:192].view(-1, 2, 1, 32) >> _shifts(x, 2)[:, None] & 3
    q = (low.reshape(-1, 2, 4, 32) | high << 4).float() - 32
    scale = _half(x[:, 208:]) * x[:, 192:208].contiguous().view(torch.int8).float()
    return (q.reshape(-1, 16, 16) * scale[..., None]).flatten(1)


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.bfloat16).float()


def _five_bits(nibbles: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """(n, 16) bytes and (n, 4) bytes of the fifth bits -> (n, 32)."""
    fifth = bits[:, :, None] >> _shifts(bits, 1) & 1
    return _nibbles(nibbles) + 16 * fifth.flatten(1).float()


def _q5_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * (_five_bits(x[:, 6:], x[:, 2:6]) - 16)


def _q5_1(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _five_bits(x[:, 8:], x[:, 4:8]) + _half(x[:, 2:4])


def _two_bits(x: torch.Tensor) -> torch.Tensor:
    """(n, 64) bytes -> (n, 8, 32) numbers of two bits."""
    return (x.view(-1, 2, 1, 32) >> _shifts(x, 2)[:, None] & 3).reshape(-1, 8, 32)


def _shifts(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The shifts that move each group of ``bits`` bits of a byte to its low end."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)


def _q2_k(x: torch.Tensor) -> torch.Tensor:
    scale = _half(x[:, 80:82]) * (x[:, :16] & 15).float()
    smallest = _half(x[:, 82:84]) * (x[:, :16] >> 4).float()
    q = _two_bits(x[:, 16:80].contiguous()).reshape(-1, 16, 16).float()
    return (scale[..., None] * q - smallest[..., None]).flatten(1)


def _q3_k(x: torch.Tensor) -> torch.Tensor:
    low = x[:, None, 96:104] >> _shifts(x, 4)[:, None] & 15
    high = x[:, None, 104:108] >> _shifts(x, 2)[:, None] & 3
    scale = _half(x[:, 108:]) * ((low.flatten(1) | high.flatten(1) << 4).float() - 32)
    third = x[:, None, :32] >> _shifts(x, 1)[:, None] & 1
    q = (_two_bits(x[:, 32:96].contiguous()) | third << 2).float() - 4
    return (scale[..., None] * q.reshape(-1, 16, 16)).flatten(1)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _listed(values: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """(..., 16) bytes -> (..., 32): each nibble is an index into ``values``."""
    return torch.tensor(values, dtype=torch.float32, device=x.device)[_nibbles(x).long()]


def _iq4_nl(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _listed(_IQ4, x[:, 2:])


def _iq4_xs(x: torch.Tensor) -> torch.Tensor:
    low = x[:, 4:8, None] >> _shifts(x, 4) & 15
    high = x[:, 2:4, None] >> _shifts(x, 2) & 3
    scale = _half(x[:, :2]) * ((low.flatten(1) | high.flatten(1) << 4).float() - 32)
    return (scale[..., None] * _listed(_IQ4, x[:, 8:].reshape(-1, 8, 16))).flatten(1)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    """A scale is half of 2^(e - 127); the two smallest are subnormal floats."""
    e = x[:, :1].int()
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)
    return bits.view(torch.float32) * _listed(_MXFP4, x[:, 1:])


# Name of the format (GGUF's, or torch's) -> weights of a block, bytes of a block, and the function that unpacks it. The
# order is that of stored.h.
FORMATS: dict[str, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "BF16": (32, 64, _bfloat16),
    "F16": (32, 64, _half),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
}
