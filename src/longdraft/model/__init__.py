"""A transformers model as a target: loading, hosting, the tokenizer's chat template, quantised files.

With engine and integration the only room that touches transformers. May import: memory, attention, native.
Start with ``runner.TargetRunner.forward``, and follow it to ``execution_model`` and ``hosting``.

- **Reading files**: loading, checkpoints, ``gguf/``; stored (layers on a file's quant blocks), eos_tokens, embedded,
  draft_models (language models that draft). Prompts: chat, rendering.
- **Hosting**: runner (forwards of a batch), execution_model (the copy that computes), hosting (its attention), layout
  (where KV lies), validation. For some kinds of models: recurrent, custom_attention, positions, tensor_parallel.
- **Guards**: support (refused models), model_copy (changes of a model), fingerprints (keys of cached KV).
- **Speed**: fused (all layers in one call), with layer_parts; fused_lm (a tree level of a draft in one call);
  skinny_gemm; on a GPU ``gpu/``.
- **Batch invariance**: batch_invariant (torch's functions), experts, quantised (layers of other packages).
- **Parts of drafts**: shared_parts, small_llama, mtp_layer, rotary, key_rotation.
- **Reports**: kernel_report, round_profiler.
"""

import sys

if sys.flags.optimize > 1:  # transformers edits docstrings at import, and fails where python -OO removed them
    from transformers.utils import auto_docstring

    vars(sys.modules[auto_docstring.__module__]).update(
        auto_method_docstring=lambda function, *_, **__: function, auto_class_docstring=lambda kind, *_, **__: kind
    )
