"""The KV cache: a preallocated slot for each sequence; offload, snapshots, the prompt cache, and memory checks.

May import: attention, native.
"""
