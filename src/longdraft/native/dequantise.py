"""What stored blocks stand for, in torch's own operations: where no kernel serves, and what kernels are compared with.

Each takes blocks (n, bytes) and gives floats (n, weights of a block), rounded as gguf's own dequantisation rounds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _half(x: torch.Tensor) -> torch.Tensor:
    """(n, 2) bytes -> (n, 1) floats."""
    return x.contiguous().view(torch.float16).float()


def _nibbles(x: torch.Tensor) -> torch.Tensor:
    """(n, 16) bytes -> (n, 32): the low halves, then the high ones."""
    return torch.cat([x & 15, x >> 4], dim=-1).float()


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * (_nibbles(x[:, 2:]) - 8)


def _q4_1(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _nibbles(x[:, 4:]) + _half(x[:, 2:4])


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * x[:, 2:].contiguous().view(torch.int8).float()


def _sixes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and least value of the eight pieces of a K block, (n, 8, 1) each, from its first 16 bytes."""
    low, middle, high = x[:, 4:8], x[:, 8:12], x[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1).float()
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1).float()
    return (_half(x[:, :2]) * scales)[..., None], (_half(x[:, 2:4]) * least)[..., None]


def _q4_k(x: torch.Tensor) -> torch.Tensor:
    scale, least = _sixes(x)
    q = x[:, 16:].view(-1, 4, 1, 32) >> torch.tensor([0, 4], dtype=torch.uint8, device=x.device)[:, None] & 15
    return (scale * q.reshape(-1, 8, 32).float() - least).flatten(1)


def _q5_k(x: torch.Tensor) -> torch.Tensor:
    scale, least = _sixes(x)
    fifth = x[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=x.device)[:, None] & 1
    q = x[:, 48:].view(-1, 4, 1, 32) >> torch.tensor([0, 4], dtype=torch.uint8, device=x.device)[:, None] & 15
    return (scale * (q.reshape(-1, 8, 32) | fifth << 4).float() - least).flatten(1)


def _q6_k(x: torch.Tensor) -> torch.Tensor:
    turns = torch.tensor([0, 4], dtype=torch.uint8, device=x.device)[:, None, None]
    low = x[:, :128].view(-1, 2, 1, 2, 32) >> turns & 15
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=x.device)[:, None]
    high = x[:, 128:192].view(-1, 2, 1, 32) >> pairs & 3
    q = (low.reshape(-1, 2, 4, 32) | high << 4).float() - 32
    scale = _half(x[:, 208:]) * x[:, 192:208].contiguous().view(torch.int8).float()
    return (q.reshape(-1, 16, 16) * scale[..., None]).flatten(1)


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.bfloat16).float()


def _fives(nibbles: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """(n, 16) bytes and (n, 4) bytes of the fifth bits -> (n, 32)."""
    fifth = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return _nibbles(nibbles) + 16 * fifth.flatten(1).float()


def _q5_0(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * (_fives(x[:, 6:], x[:, 2:6]) - 16)


def _q5_1(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _fives(x[:, 8:], x[:, 4:8]) + _half(x[:, 2:4])


def _twos(x: torch.Tensor) -> torch.Tensor:
    """(n, 64) bytes -> (n, 8, 32) numbers of two bits."""
    return (x.view(-1, 2, 1, 32) >> _steps(x, 2)[:, None] & 3).reshape(-1, 8, 32)


def _steps(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The shifts that bring each few bits of a byte to its end."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)


def _q2_k(x: torch.Tensor) -> torch.Tensor:
    scale, least = (
        _half(x[:, at : at + 2]) * part.float() for at, part in ((80, x[:, :16] & 15), (82, x[:, :16] >> 4))
    )
    return (scale[..., None] * _twos(x[:, 16:80].contiguous()).reshape(-1, 16, 16).float() - least[..., None]).flatten(
        1
    )


def _q3_k(x: torch.Tensor) -> torch.Tensor:
    low = x[:, None, 96:104] >> _steps(x, 4)[:, None] & 15
    high = x[:, None, 104:108] >> _steps(x, 2)[:, None] & 3
    scale = _half(x[:, 108:]) * ((low.flatten(1) | high.flatten(1) << 4).float() - 32)
    third = x[:, None, :32] >> _steps(x, 1)[:, None] & 1
    q = (_twos(x[:, 32:96].contiguous()) | third << 2).float() - 4
    return (scale[..., None] * q.reshape(-1, 16, 16)).flatten(1)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _listed(values: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """(..., 16) bytes -> (..., 32): what nibbles stand for that number the values of a list."""
    return torch.tensor(values, dtype=torch.float32, device=x.device)[_nibbles(x).long()]


def _iq4_nl(x: torch.Tensor) -> torch.Tensor:
    return _half(x[:, :2]) * _listed(_IQ4, x[:, 2:])


def _iq4_xs(x: torch.Tensor) -> torch.Tensor:
    low = x[:, 4:8, None] >> _steps(x, 4) & 15
    high = x[:, 2:4, None] >> _steps(x, 2) & 3
    scale = _half(x[:, :2]) * ((low.flatten(1) | high.flatten(1) << 4).float() - 32)
    return (scale[..., None] * _listed(_IQ4, x[:, 8:].reshape(-1, 8, 16))).flatten(1)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Scales are half of 2^(e - 127), the smallest two of which are no normal floats."""
    e = x[:, :1].int()
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)
    return bits.view(torch.float32) * _listed(_MXFP4, x[:, 1:])


# Name of the format (GGUF's, or torch's): weights and bytes of a block, and what unpacks it; in stored.h's order.
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
