"""Token trees, the shapes in which trees grow, and the attention masks of trees.

May import: model, memory, attention.
"""
