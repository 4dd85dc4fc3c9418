"""Kernels for CPUs in C++, compiled on the machine that runs them: few rows times large matrices, few rows on long KV.

torch's own products are made for square work. What a verification does, a handful of rows against everything that is
in memory, they do at a fraction of what reading that memory takes. Everything has a torch path beside it, which is
taken where no compiler is found.
"""

from longdraft.native.library import Kernels, fits, floats, kernels, missing
from longdraft.native.structures import DecoderLayer, Rows

__all__ = ["DecoderLayer", "Kernels", "Rows", "fits", "floats", "kernels", "missing"]
