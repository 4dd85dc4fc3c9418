"""TriForce: Sun et al. 2024, arXiv:2404.11912. Only figures of its abstract are here, not those of its tables."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

TABLE = Table(
    "main",
    "hierarchical speculation behind 120K tokens of PG-19",
    Kind.speed,
    "one A100",
    "Llama2-7B-128K with Llama-68M",
    (
        # Section 5.1: a retrieval cache of 4,096 rows in chunks of 8, a streaming cache of 256, gamma of 1 and 6.
        Line("TriForce", "triforce", {"budget": 4096, "chunk": 8, "streamed": 256, "drafted": 1, "depth": 6}),
        Line("retrieval cache alone", "self", {"view": "chunks", "budget": 4096, "chunk": 8, "depth": 6}),
        Line("StreamingLLM alone", "small-lm", {"view": "streaming", "tree": "chain", "depth": 6}),
    ),
    (Column("120K", "pg19", 122880),),
    ("speedup", "accepted", "tokens_per_second"),
    """
        |          | 120K
    7B  | TriForce | 2.31
    """,
    temperatures=(0.0, 0.6),
    small=Small(shrink=16, prompts=2),
    remarks=(
        "Published: up to 2.31 times on an A100; 7.78 times where the KV is offloaded (two RTX 4090), which "
        "`longdraft bench --offload` measures.",
    ),
)

PAPER = Paper(
    "triforce",
    "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
    "Sun et al. 2024, arXiv:2404.11912",
    (TABLE,),
)
