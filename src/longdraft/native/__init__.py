"""C++ kernels for CPUs: compiled at first use or with the wheel, loaded by ctypes.

May import: folders, errors.
"""

from longdraft.native.library import Kernels, fits, kernels, missing, name
from longdraft.native.stored import Stored
from longdraft.native.structures import DecoderLayer, DecoderStack, Rows

__all__ = ["DecoderLayer", "DecoderStack", "Kernels", "Rows", "Stored", "fits", "kernels", "missing", "name"]
