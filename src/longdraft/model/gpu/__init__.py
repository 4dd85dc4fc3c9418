"""A target on a GPU: CUDA graphs, fused layers, and deterministic forwards of one batch size."""
