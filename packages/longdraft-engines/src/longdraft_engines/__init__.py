"""longdraft's drafters inside another engine: vLLM.

May import: all packages of longdraft below ``longdraft.registry``.
"""
