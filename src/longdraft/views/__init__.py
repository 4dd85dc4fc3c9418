"""Sparse views of long contexts: layout, scorers, sparse KV caches, and the KV caches of drafts.

May import: model, memory, attention, native.
"""
