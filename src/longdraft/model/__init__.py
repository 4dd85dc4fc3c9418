"""Runs a transformers model as the target: loads files and hosts the model's own code.

Only this package, drafts, engine and integration import transformers. This package may import memory, attention and
native. Read ``runner.TargetRunner.forward`` first, then ``execution_model`` and ``hosting``, which it calls.

- **Hosting**: runner (forwards of a batch), execution_model (the copy that computes), model_copy (copies modules),
  model_parts (finds decoder, layers and norm), hosting (attention), layout (where KV lies), outputs. For some models:
  positions, tensor_parallel, ``linear_attention/``. RoPE: rope. Names in versions of transformers: compat.
- **Reading files**: ``load/``, ``gguf/``, ``quant/`` (weights that stay quantised).
- **Checks**: support (refused models), ``probes/`` (compares computed numbers), fingerprint (has the model changed),
  called_functions (functions that a user replaced).
- **Speed**: ``layers/`` (CPU kernels), ``gpu/`` (CUDA graphs, Triton kernels). round_profiler times phases.
- **Drafts**: shared_parts (what drafts use of a target).
"""

import sys

if sys.flags.optimize > 1:  # python -OO removes docstrings, which transformers' decorators edit at import
    from transformers.utils import auto_docstring

    vars(sys.modules[auto_docstring.__module__]).update(
        auto_method_docstring=lambda function, *_, **__: function, auto_class_docstring=lambda cls, *_, **__: cls
    )
