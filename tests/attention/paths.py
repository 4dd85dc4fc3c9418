"""The attention paths as tests run them: on this machine, with stand-ins for GPU kernels if there is no GPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from longdraft.attention import dispatch
from tests.attention.cases import TOLERANCE

ALL = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Path:
    """A path and what it supports.

    Attributes:
        name: as in :data:`dispatch.PATHS`.
        few_rows, long_prefix: thresholds of the CPU path, which force its regimes.
        native: the CPU path uses our kernels.
        head_unit: head sizes are multiples of it.
        columns: keys may be stored column-wise.
        float32: tolerance of float32 outputs.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    few_rows: int = 10**6
    long_prefix: int = 10**6
    native: bool = False
    head_unit: int = 1
    columns: bool = True
    float32: float = 2e-6

    @property
    def device(self) -> str:
        return "cuda" if self.name == "triton" and torch.cuda.is_available() else "cpu"

    @property
    def attend(self):
        return importlib.import_module(dispatch.PATHS[self.name]).attend

    @property
    def layouts(self) -> tuple[bool, ...]:
        """Whether keys may be stored by row (False) and by column (True)."""
        return (False, True) if self.columns else (False,)

    def tolerance(self, dtype: torch.dtype) -> float:
        return self.float32 if dtype == torch.float32 else TOLERANCE[dtype]


PATHS = {
    "cpu kernels": Path("cpu", native=True),
    "cpu kernels, many rows": Path("cpu", native=True, few_rows=0),
    "cpu few rows": Path("cpu"),
    "cpu few rows, long prefix": Path("cpu", long_prefix=0),
    "cpu many rows": Path("cpu", few_rows=0),
    "sdpa": Path("sdpa"),
    "hybrid": Path("hybrid", ALL, head_unit=8, columns=False),
    # Interpreted, float16 is converted as bfloat16 is.
    "triton": Path("triton", ALL if torch.cuda.is_available() else (torch.float32, torch.bfloat16), float32=1e-5),
}
