"""Papers of which the figures of abstract or text alone are here, not those of their tables."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

_MAGICDEC = Table(
    "main",
    "self-speculation on a sparse KV by batch size, 32K tokens",
    Kind.speed,
    "8 A100",
    "Llama-3.1-8B (L)",
    (
        Line("StreamingLLM", "magicdec", {"view": "streaming", "budget": 512, "depth": 3}),
        Line("SnapKV", "magicdec", {"view": "snapkv", "budget": 512, "depth": 3}),
    ),
    tuple(Column(f"batch {n}", "pg19", 32768, batch=n) for n in (1, 8, 32)),
    ("speedup", "accepted", "tokens_per_second"),
    small=Small(shrink=8, prompts=1, max_tokens=32),
    remarks=(
        "Published: 1.2 to 1.5 times at 32K tokens and batches of 32 to 128; in a later version up to 2.51 times.",
        "Published: 0.84 (4K tokens) to 0.79 (100K) of the drafted tokens are right with a budget of 512.",
        "The depth of 3 is ours: the paper takes the one that its cost model prefers.",
    ),
)

MAGICDEC = Paper(
    "magicdec",
    "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative Decoding",
    "Sadhukhan et al. 2024, arXiv:2408.11049",
    (_MAGICDEC,),
)

_TRIFORCE = Table(
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
    temperatures=(0.0, 0.6),
    small=Small(shrink=16, prompts=2),
    remarks=(
        "Published: up to 2.31 times on an A100; 7.78 times where the KV is offloaded (two RTX 4090), which "
        "`longdraft bench --offload` measures.",
    ),
)

TRIFORCE = Paper(
    "triforce",
    "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
    "Sun et al. 2024, arXiv:2404.11912",
    (_TRIFORCE,),
)

_TOKENSWIFT = Table(
    "main",
    "100K new tokens behind a prefix of 4,096",
    Kind.speed,
    "one A100 80GB",
    "Llama-3.1-8B, Qwen2.5 1.5B to 14B",
    (
        Line(
            "TokenSwift", "tokenswift", {"budget": 4096, "reuse_n": 4, "reuse_k": 20},
            note="without the contextual penalty, for equal texts",
        ),
        Line("heads alone", "heads"),
    ),
    (Column("4K", "pg19", 4096),),
    ("speedup", "accepted", "tokens_per_second"),
    temperatures=(1.0,),
    max_tokens=100_000,
    prompts=1,
    small=Small(shrink=8, prompts=1, max_tokens=512),
    remarks=(
        "Published: 3.1 to 3.4 times for 100K new tokens, by model. At the paper's scale this takes hours on a GPU: "
        "--max-tokens makes it shorter.",
    ),
)  # fmt: skip

TOKENSWIFT = Paper(
    "tokenswift",
    "From Hours to Minutes: Lossless Acceleration of Ultra Long Sequence Generation up to 100K Tokens",
    "Wu et al. 2025, arXiv:2502.18890",
    (_TOKENSWIFT,),
)

_EAGLE3 = Table(
    "main",
    "EAGLE-3 with dynamic trees on short prompts",
    Kind.speed,
    "one A100 (RTX 3090 for some models)",
    "Vicuna 13B, Llama-3.1-8B, Llama-3.3-70B, DeepSeek-R1-Distill-Llama-8B",
    (Line("EAGLE-3", "eagle3", {"tree": "dynamic", "nodes": 59, "depth": 8, "top_k": 10}),),
    (Column("Spec-Bench", "spec-bench"),),
    ("speedup", "accepted", "tokens_per_second"),
    temperatures=(0.0, 1.0),
    max_tokens=512,
    small=Small(context=512, prompts=3),
    remarks=(
        "Published: up to 6.5 times, about 1.4 times EAGLE-2; on MT-bench, HumanEval, GSM8K, Alpaca and CNN/DM. "
        "Spec-Bench holds MT-bench, and other questions of their kinds.",
    ),
)

EAGLE3 = Paper(
    "eagle3",
    "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    "Li et al. 2025, arXiv:2503.01840",
    (_EAGLE3,),
)
