"""Loads models and tokenizers: folders, hub ids, the embedded model. ``longdraft.model.gguf`` reads GGUF files."""
