"""A transformers model as a target: loading, hosting, the tokenizer's chat template, quantised files.

With engine and integration the only room that touches transformers. May import: memory, attention, native.
"""
