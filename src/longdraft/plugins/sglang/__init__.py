"""Our LongSpec drafter inside SGLang, with trees: ``--speculative-algorithm LONGSPEC
--speculative-draft-model-path FOLDER``.

SGLang's NGRAM worker verifies trees that are drafted on the host and own no KV. Ours is that worker with another source
of trees: verification, grammars, log-probabilities and the overlapped schedule are SGLang's own.

What has run: SGLang 0.5.23's own engine and scheduler on a CPU, with stand-ins for its compiled operators
(``tests/plugins/in_sglang.py``), the overlapped schedule among it. What has not: a GPU, CUDA graphs, attention of
SGLang's own with masks (``benchmarks/sglang_gpu.sh`` is for a machine that can).
"""
