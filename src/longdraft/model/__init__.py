"""A transformers model as a target: loading, hosting, the tokenizer's chat template, quantised files.

With engine and integration the only room that touches transformers. May import: memory, attention, native.

- Read from a file: loading, checkpoints, ``gguf/``, stored; what is known of it: kinds, support, fingerprints.
- Hosted: runner (forwards of a block), twin (the copy that computes), hosting (its attention), layout (where rows lie),
  trial (what it is compared with), own_code, recurrent, positions, long_rope.
- Fast: fused (all layers in one call), whole_lm; on a GPU ``gpu/``.
- Exact by row: rows, experts, quantised.
- Parts for drafts: shared_parts, small_models, own_layer, companions, rotary, key_rotation.
"""
