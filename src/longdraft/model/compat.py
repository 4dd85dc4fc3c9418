"""Names that differ between versions of transformers."""

# A forward's cache, as an argument and in the output: from 5.24 on, in earlier versions, and in earlier Mamba models.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The argument for the number of cached tokens.
CACHE_LENGTH_NAMES = ("cache_length", "past_key_values_length")
