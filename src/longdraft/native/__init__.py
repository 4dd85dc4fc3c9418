"""Kernels for CPUs in C++, carried by wheels or compiled where they run: few rows times large matrices, or on long KV.

torch's own products are made for square work. What a verification does, a handful of rows against everything that is
in memory, they do at a fraction of what reading that memory takes. Everything has a torch path beside it, which is
taken where no compiler is found.
"""

from longdraft.native.library import Kernels, fits, kernels, missing
from longdraft.native.stored import Stored
from longdraft.native.structures import DecoderLayer, DecoderStack, Rows

__all__ = ["DecoderLayer", "DecoderStack", "Kernels", "Rows", "Stored", "fits", "kernels", "missing"]
