"""Tree attention over a KV cache: one interface, four implementations (paths), and the choice between them.

May import: native.
"""
