"""Attention of tree rows over a KV cache: one contract, six paths, and which one serves.

May import: native.
"""
