"""Our drafters inside another engine: vLLM.

May import: all rooms below the catalogue.
"""
