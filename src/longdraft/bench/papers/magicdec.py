"""MagicDec: Sadhukhan et al. 2024, arXiv:2408.11049. Only figures of its text are here, not those of its tables."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

SIZES = (1, 8, 32)

TABLE = Table(
    "main",
    "self-speculation on a sparse KV by batch size, 32K tokens",
    Kind.speed,
    "8 A100",
    "Llama-3.1-8B (L)",
    (
        Line("StreamingLLM", "magicdec", {"view": "streaming", "budget": 512, "depth": 3}),
        Line("SnapKV", "magicdec", {"view": "snapkv", "budget": 512, "depth": 3}),
    ),
    tuple(Column(f"batch {n}", "pg19", 32768, batch=n) for n in SIZES),
    ("speedup", "accepted", "tokens_per_second"),
    """
         |        | batch 32
    L-8B | SnapKV | 1.2
    """,
    small=Small(shrink=8, prompts=1, max_tokens=32),
    remarks=(
        "Published: 1.2 to 1.5 times at 32K tokens and batches of 32 to 128; in a later version up to 2.51 times.",
        "Published: 0.84 (4K tokens) to 0.79 (100K) of the drafted tokens are right with a budget of 512.",
        "The depth of 3 is ours: the paper takes the one that its cost model prefers.",
    ),
)

PAPER = Paper(
    "magicdec",
    "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative Decoding",
    "Sadhukhan et al. 2024, arXiv:2408.11049",
    (TABLE,),
)
