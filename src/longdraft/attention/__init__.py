"""Attention of tree rows over a KV cache: one contract, four paths, and the choice between them.

May import: native.
"""
