"""Implements ``custom_generate`` of transformers: ``model.generate(..., custom_generate=speculator)``."""
