"""A transformers model as a target: loading, hosting, the tokenizer's chat template, quantised files.

With engine and integration the only room that touches transformers. May import: memory, attention, native.
Start with ``runner.TargetRunner.forward``, and follow it to ``twin`` and ``hosting``.

- **Read from a file**: loading, checkpoints, ``gguf/``; stored (matrices that stay as they are in the file), ends,
  embedded, companions (small models that draft). Prompts: chat, rendering.
- **Hosted**: runner (forwards of a block), twin (the copy that computes), hosting (its attention), layout (where rows
  lie), trial (what it is compared with). For some kinds of models: recurrent, own_code, positions, sharded.
- **Guarded**: support (what is refused), model_copy (what changed), fingerprints (names of kept rows).
- **Fast**: fused (all layers in one call), with the parts of layers that it reads in layer_parts; whole_lm (a draft's
  level in one call); few_rows (products); on a GPU ``gpu/``.
- **Exact by row**: rows (torch's functions), experts, quantised (layers of other packages).
- **Parts for drafts**: shared_parts, small_models, own_layer, rotary, key_rotation.
- **Told to users**: kernel_report, clock.
"""

import sys

if sys.flags.optimize > 1:  # transformers completes docstrings as it is imported, and fails where python -OO left none
    from transformers.utils import auto_docstring

    vars(sys.modules[auto_docstring.__module__]).update(
        auto_method_docstring=lambda function, *_, **__: function, auto_class_docstring=lambda kind, *_, **__: kind
    )
