"""Runs a target on a GPU: CUDA graphs, fused decoder layers, and deterministic forwards of a fixed batch size."""
