"""What several drafters are made of: trees, levels, layers, retrieval, whole-level kernels.

May import: as drafters.
"""
