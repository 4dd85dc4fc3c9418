"""GGUF files: metadata and tensors, the table of architectures, and models with weights in quant blocks.

:func:`longdraft.model.gguf.loading.load_gguf` loads one; one more architecture is a row in architectures.py.
"""
