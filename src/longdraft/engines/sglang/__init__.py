"""Our LongSpec drafter inside SGLang, with trees: ``--speculative-algorithm LONGSPEC
--speculative-draft-model-path FOLDER``.

SGLang's NGRAM worker verifies trees that are drafted on the host and own no KV. Ours is that worker with another source
of trees: verification, grammars, log-probabilities and the overlapped schedule are SGLang's own.

What has run: registration, the validator and the worker's own methods against sglang 0.5.23's modules, and drafting
from made-up pools against our own engine. What has not: a server, a GPU, CUDA graphs, the overlapped schedule
(``benchmarks/sglang_gpu.sh`` is for a machine that can).
"""
