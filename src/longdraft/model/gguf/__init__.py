"""Reads GGUF files: metadata, tensors and tokenizers, as transformers models whose weights stay in quant blocks.

:func:`longdraft.model.gguf.loading.load_gguf` loads a file. To support an architecture, add a row to architectures.py.
"""
