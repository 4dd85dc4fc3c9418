"""Our drafters inside another engine: vLLM.

May import: all packages below the catalogue of methods.
"""
