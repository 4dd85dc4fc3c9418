"""Token trees, the shapes in which they grow, and their attention masks.

May import: model, memory, attention.
"""
