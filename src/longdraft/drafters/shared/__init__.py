"""Parts that several drafters share: trees, levels, layers, retrieval, whole-level kernels.

May import: as drafters.
"""
