"""EAGLE-3: Li et al. 2025, arXiv:2503.01840. Only figures of its abstract are here, not those of its tables."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

TABLE = Table(
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

PAPER = Paper(
    "eagle3",
    "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    "Li et al. 2025, arXiv:2503.01840",
    (TABLE,),
)
