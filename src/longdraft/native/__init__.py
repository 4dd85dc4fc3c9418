"""C++ kernels for CPUs: compiled at first use, or in the wheel; loaded by ctypes.

May import: folders, errors.
"""

from longdraft.native.library import Kernels, kernels, library_name, supports_attention, unavailable_reason
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.native.structures import AttentionMetadata, DecoderLayer, DecoderStack

__all__ = [
    "AttentionMetadata", "DecoderLayer", "DecoderStack", "Kernels", "QuantizedMatrix", "kernels", "library_name",
    "supports_attention", "unavailable_reason",
]  # fmt: skip
