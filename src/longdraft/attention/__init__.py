"""Attention of tree rows over a KV cache: one contract, six paths, and the choice between them.

May import: native.
"""
