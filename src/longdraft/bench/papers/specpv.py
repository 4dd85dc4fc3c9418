"""SpecPV: Tan et al. 2025, arXiv:2512.02337."""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

A100 = "one A100 80GB, torch's scaled dot product attention"
BASELINE_NOTE = (
    "The paper's baseline copies keys and values for every query head (torch's attention). This favours methods that "
    "read fewer keys and values."
)
# Section 4.1: EAGLE-3's dynamic trees. "4K": retrieved tokens; the first and last tokens in view are not counted.
EAGLE3 = {"drafter": "eagle3"}
LENGTHS = tuple(Column(f"{n}K", "pg19", n * 1000) for n in (10, 20, 30, 40, 50, 60))


def specpv(name: str, budget: int) -> Line:
    """A line of SpecPV with EAGLE-3's drafter; ``budget``: retrieved tokens."""
    return Line(name, "specpv", {**EAGLE3, "budget": budget})


LINES = (
    Line("Eagle3-Yarn", "eagle3", note="the draft as it was trained; the paper's is adapted to 64K by YaRN"),
    specpv("SpecPV-8K", 8192),
    specpv("SpecPV-4K", 4096),
    specpv("SpecPV-2K", 2048),
)

TABLE_1 = Table(
    "1",
    "continuing stories at 10K to 60K tokens: TriForce, TokenSwift, EAGLE-3 and SpecPV",
    "speed",
    A100,
    "Llama-3.1-8B (L)",
    (
        Line("TriForce", "triforce", {"budget": 4096}, note="budget 4,096, as in the paper"),
        Line("TokenSwift", "tokenswift", {"budget": 4096}, note="without the contextual penalty, for equal texts"),
        *LINES,
    ),
    LENGTHS,
    ("speedup", "accepted"),
    max_tokens=1024,
    counts_bonus=False,
    length_average="mean",
    small=SmallScale(shrink=8, prompts=2),
    remarks=(BASELINE_NOTE,),
)

TABLE_2 = Table(
    "2",
    "similarity of the output of partial verification to that of full verification, by budget",
    "quality",
    A100,
    "Llama-3.1-8B (L), Qwen3-8B (Q)",
    (Line("-", "full"), specpv("4096", 4096), specpv("2048", 2048), specpv("512", 512)),
    (Column("GovReport", "gov_report"), Column("QMSum", "qmsum")),
    ("rouge_l", "bleurt"),
    max_tokens=512,
    small=SmallScale(shrink=2, context=2560, max_tokens=64),
    remarks=(
        "-: full verification against plain decoding, the noise floor. On a CPU both give equal tokens in longdraft.",
        "The paper's code at that time scored blocks that include the first tokens, and gathered blocks without them.",
        "BLEURT is not measured here; it can be computed from the texts that --results keeps.",
    ),
)

TABLE_3 = replace(
    TABLE_1,
    name="3",
    title="continuing stories at 10K to 60K tokens on Qwen3: EAGLE-3 and SpecPV",
    models="Qwen3 4B, 8B and 14B, no-think; at 60K stretched twice by YaRN",
    lines=LINES,
)

TABLE_4 = Table(
    "4",
    "how a block's scores by several queries are reduced to one: mean, max, last; budget 2K",
    "quality",
    A100,
    "Llama-3.1-8B (L), Qwen3-8B (Q)",
    tuple(
        Line(name.capitalize(), "specpv", {**EAGLE3, "budget": 2048, "reduction": name})
        for name in ("mean", "max", "last")
    ),
    (Column("GovReport", "gov_report"),),
    ("rouge_l", "accepted"),
    max_tokens=512,
    counts_bonus=False,
    length_average="mean",
    small=SmallScale(shrink=8, context=2048, max_tokens=128),
)

PAPER = Paper(
    "specpv",
    "SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial Verification",
    "Tan et al. 2025, arXiv:2512.02337",
    (TABLE_1, TABLE_2, TABLE_3, TABLE_4),
)
