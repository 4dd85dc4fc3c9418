"""GGUF files: their fields and tensors, the table of architectures, and models whose matrices stay as they are stored.

:func:`longdraft.model.gguf.loading.read_gguf` reads one; one more architecture is a row in architectures.py.
"""
