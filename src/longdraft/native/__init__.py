"""C++ kernels for CPUs: precompiled in the wheel or compiled at the first use, and loaded by ctypes.

May import: folders, errors.
"""

from longdraft.native.library import Kernels, kernels, library_name, supports_attention, unavailable_reason
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.native.structures import AttentionMetadata, DecoderLayer, DecoderStack

__all__ = [
    "AttentionMetadata", "DecoderLayer", "DecoderStack", "Kernels", "QuantizedMatrix", "kernels", "library_name",
    "supports_attention", "unavailable_reason",
]  # fmt: skip
