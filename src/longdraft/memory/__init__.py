"""The KV cache: a preallocated slot for each sequence; offload, snapshots, prompt cache, free memory.

May import: attention, native.
"""
