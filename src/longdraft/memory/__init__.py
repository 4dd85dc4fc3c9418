"""The KV cache: preallocated rows, a slot a sequence; offload, snapshots, prompt cache.

May import: attention, native.
"""
