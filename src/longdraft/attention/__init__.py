"""Computes tree attention over a KV cache: one interface, four implementations (paths), and the choice among them.

May import: native.
"""
