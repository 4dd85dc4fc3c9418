"""Runs a transformers model as the target: loads files, renders chat templates, and hosts the model's own code.

Only this package, engine and integration import transformers. This package may import memory, attention and native.
Read ``runner.TargetRunner.forward`` first, then ``execution_model`` and ``hosting``, which it calls.

- **Reading files**: loading, checkpoints, ``gguf/``; stored and stored_model (layers whose weights stay in the file's
  format), eos_tokens, embedded, draft_models (language models that draft). Prompts: chat, rendering.
- **Hosting**: runner (forwards of a batch), execution_model (the copy that computes), hosting (its attention), layout
  (where KV lies), outputs, validation. For some models: recurrent, positions, tensor_parallel. Versions of
  transformers: compat. RoPE: rope.
- **Checks**: support (refused models), user_code (models that cannot verify drafts), model_copy (detects changes of a
  model), fingerprints (keys of cached KV).
- **Speed**: fused (all layers in one call), with layer_parts and delta_parts; fused_lm (one tree level of a draft model
  in one call); skinny_gemm; on a GPU ``gpu/``.
- **Batch invariance**: batch_invariant (torch's functions), experts, external_quant (layers of other packages).
- **What draft models are built from**: shared_parts, small_llama, mtp_layer, key_rotation.
- **Reports**: kernel_report, round_profiler.
"""

import sys

if sys.flags.optimize > 1:  # python -OO removes docstrings, which transformers' decorators edit at import
    from transformers.utils import auto_docstring

    vars(sys.modules[auto_docstring.__module__]).update(
        auto_method_docstring=lambda function, *_, **__: function, auto_class_docstring=lambda cls, *_, **__: cls
    )
