"""Our LongSpec drafter inside SGLang, with trees: ``--speculative-algorithm LONGSPEC
--speculative-draft-model-path FOLDER``.

SGLang's NGRAM worker verifies trees that are drafted on the host and have no KV of their own. Ours is that worker with
another source of trees: verification, grammars, log-probabilities and the overlapped schedule are SGLang's.

Tested: SGLang 0.5.23's engine and scheduler on a CPU, with and without the overlapped schedule, with stand-ins for its
compiled operators (``tests/in_sglang.py``). Not tested: a GPU, CUDA graphs, and SGLang's own attention with
tree masks.
"""
