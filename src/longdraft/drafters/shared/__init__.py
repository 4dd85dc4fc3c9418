"""Parts that several drafters share: blocks, rounds, batches, retrieval, lookups, fused levels.

May import: what ``drafters`` may import.
"""
