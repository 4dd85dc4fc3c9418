"""Training of drafts: data, features, losses, a trainer for each kind.

May import: all packages below ``longdraft.registry``.
"""
