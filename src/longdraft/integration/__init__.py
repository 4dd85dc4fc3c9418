"""``model.generate(..., custom_generate=speculator)``."""
