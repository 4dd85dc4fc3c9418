"""TokenSwift: Wu et al. 2025, arXiv:2502.18890. Only figures of its text are here, not those of its tables."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

TABLE = Table(
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
    """
         |            | 4K
    L-8B | TokenSwift | 3.1
    """,
    temperatures=(1.0,),
    max_tokens=100_000,
    prompts=1,
    small=Small(shrink=8, prompts=1, max_tokens=512),
    remarks=(
        "Published: 3.1 to 3.4 times for 100K new tokens, by model. At the paper's scale this takes hours on a GPU: "
        "--max-tokens makes it shorter.",
    ),
)  # fmt: skip

PAPER = Paper(
    "tokenswift",
    "From Hours to Minutes: Lossless Acceleration of Ultra Long Sequence Generation up to 100K Tokens",
    "Wu et al. 2025, arXiv:2502.18890",
    (TABLE,),
)
