"""Token trees, a file for each way to grow them, and their masks.

May import: model, memory, attention.
"""
