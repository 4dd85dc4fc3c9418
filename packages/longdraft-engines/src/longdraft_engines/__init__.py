"""Our drafters inside other engines: vLLM and SGLang.

May import: all rooms below the catalogue.
"""
