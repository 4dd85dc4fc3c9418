"""SpecPV: Tan et al. 2025, arXiv:2512.02337."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

A100 = "one A100 80GB, torch's scaled dot product attention"
PLAIN = (
    "In the paper's baseline, torch's attention copies keys and values once per query head, which favours what reads "
    "less of them."
)
# Section 4.1: dynamic trees of EAGLE-3. "4K" is what is retrieved; first and last rows come on top.
EAGLE3 = {"drafter": "eagle3"}
LENGTHS = tuple(Column(f"{n}K", "pg19", n * 1000) for n in (10, 20, 30, 40, 50, 60))


def specpv(name: str, budget: int) -> Line:
    """SpecPV with so many retrieved rows."""
    return Line(name, "specpv", {**EAGLE3, "budget": budget})


OURS = (
    Line("Eagle3-Yarn", "eagle3", note="the draft as it was trained; the paper's is adapted to 64K by YaRN"),
    specpv("SpecPV-8K", 8192),
    specpv("SpecPV-4K", 4096),
    specpv("SpecPV-2K", 2048),
)

TABLE_1 = Table(
    "1",
    "continuing stories at 10K to 60K tokens: TriForce, TokenSwift, EAGLE-3 and SpecPV",
    Kind.speed,
    A100,
    "Llama-3.1-8B (L)",
    (
        Line("TriForce", "triforce", {"budget": 4096}, note="budget 4,096, as the paper has it"),
        Line("TokenSwift", "tokenswift", {"budget": 4096}, note="without the contextual penalty, for equal texts"),
        *OURS,
    ),
    LENGTHS,
    ("speedup", "accepted"),
    """
         |             | 10K       | 20K       | 30K       | 40K       | 50K       | 60K
    L-8B | TriForce    | 1.72 2.62 | 2.44 2.82 | 2.65 2.61 | 3.10 2.80 | 3.42 2.82 | 3.17 2.61
    L-8B | TokenSwift  | 1.41 1.64 | 1.70 1.73 | 1.83 1.73 | 1.98 1.77 | 2.06 1.77 | 2.11 1.75
    L-8B | Eagle3-Yarn | 2.49 3.38 | 2.74 3.49 | 2.82 3.38 | 3.02 3.57 | 3.06 3.46 | 3.11 3.48
    L-8B | SpecPV-8K   | 2.53 3.34 | 3.54 3.51 | 4.23 3.42 | 4.88 3.56 | 5.31 3.46 | 5.80 3.57
    L-8B | SpecPV-4K   | 2.92 3.29 | 4.00 3.57 | 4.57 3.43 | 5.46 3.67 | 5.66 3.52 | 6.15 3.56
    L-8B | SpecPV-2K   | 2.88 3.30 | 3.83 3.42 | 4.75 3.46 | 5.21 3.55 | 5.79 3.56 | 6.29 3.57
    """,
    max_tokens=1024,
    bonus=False,
    small=Small(shrink=8, prompts=2),
    remarks=(PLAIN,),
)

TABLE_2 = Table(
    "2",
    "likeness of texts under partial verification to those under full verification, by budget",
    Kind.quality,
    A100,
    "Llama-3.1-8B (L), Qwen3-8B (Q)",
    (Line("-", "full"), specpv("4096", 4096), specpv("2048", 2048), specpv("512", 512)),
    (Column("GovReport", "gov_report"), Column("QMSum", "qmsum")),
    ("rouge_l", "bleurt"),
    """
         |      | GovReport | QMSum
    L-8B | -    | 77.3 73.8 | 81.2 80.4
    L-8B | 4096 | 62.5 61.8 | 61.2 67.0
    L-8B | 2048 | 56.1 56.6 | 56.1 64.1
    L-8B | 512  | 47.0 52.1 | 48.5 59.9
    Q-8B | -    | 72.1 73.8 | 84.2 83.6
    Q-8B | 4096 | 62.1 63.9 | 60.4 67.8
    Q-8B | 2048 | 56.0 59.7 | 55.5 65.1
    Q-8B | 512  | 49.4 54.9 | 47.2 60.6
    """,
    max_tokens=512,
    small=Small(shrink=2, context=2560, max_tokens=64),
    remarks=(
        "-: full verification against plain decoding, the noise floor. Ours equals plain decoding to the bit on a CPU.",
        "Blocks were scored with the first rows, and gathered without them, in the paper's code at that time.",
        "BLEURT is not measured here; --results keeps the texts, so that it can be.",
    ),
)

TABLE_3 = Table(
    "3",
    "continuing stories at 10K to 60K tokens on Qwen3: EAGLE-3 and SpecPV",
    Kind.speed,
    A100,
    "Qwen3 4B, 8B and 14B, no-think; at 60K stretched twice by YaRN",
    OURS,
    LENGTHS,
    ("speedup", "accepted"),
    """
        |             | 10K       | 20K       | 30K       | 40K       | 50K       | 60K
    4B  | Eagle3-Yarn | 2.43 3.27 | 2.59 3.28 | 2.61 3.21 | 2.54 3.05 | 2.70 3.13 | 2.79 3.18
    4B  | SpecPV-8K   | 2.46 3.35 | 3.50 3.30 | 4.02 3.23 | 4.50 3.14 | 5.04 3.11 | 5.52 3.11
    4B  | SpecPV-4K   | 2.55 3.37 | 3.40 3.11 | 4.22 3.17 | 4.73 3.17 | 5.44 3.28 | 5.89 3.29
    4B  | SpecPV-2K   | 2.76 3.39 | 3.69 3.31 | 4.31 3.25 | 4.84 3.20 | 5.32 3.15 | 5.82 3.14
    8B  | Eagle3-Yarn | 2.44 3.23 | 2.65 3.25 | 2.79 3.35 | 2.78 3.35 | 2.78 3.29 | 2.83 3.22
    8B  | SpecPV-8K   | 2.39 3.02 | 3.33 3.19 | 4.00 3.19 | 4.46 3.25 | 4.97 3.27 | 5.31 3.11
    8B  | SpecPV-4K   | 2.44 2.98 | 3.47 3.06 | 4.13 3.02 | 4.83 3.37 | 5.21 3.29 | 5.44 3.06
    8B  | SpecPV-2K   | 2.53 2.90 | 3.58 3.05 | 4.14 3.01 | 4.61 3.13 | 5.24 3.32 | 5.35 3.01
    14B | Eagle3-Yarn | 2.46 3.03 | 2.74 3.30 | 2.83 3.34 | 3.12 3.81 | 3.18 3.78 | 2.98 3.31
    14B | SpecPV-8K   | 2.46 2.91 | 3.35 3.11 | 3.83 2.98 | 5.06 3.79 | 5.45 3.57 | 5.63 3.44
    14B | SpecPV-4K   | 2.75 2.89 | 3.68 3.14 | 4.13 3.02 | 5.37 3.71 | 6.02 3.69 | 5.83 3.23
    14B | SpecPV-2K   | 2.74 2.79 | 3.73 3.08 | 4.37 3.10 | 5.37 3.66 | 5.99 3.60 | 5.73 2.96
    """,
    max_tokens=1024,
    bonus=False,
    small=Small(shrink=8, prompts=2),
    remarks=(PLAIN,),
)

TABLE_4 = Table(
    "4",
    "how the scores of several queries become one: mean, max, last; budget 2K",
    Kind.quality,
    A100,
    "Llama-3.1-8B (L), Qwen3-8B (Q)",
    tuple(
        Line(name.capitalize(), "specpv", {**EAGLE3, "budget": 2048, "reduction": name})
        for name in ("mean", "max", "last")
    ),
    (Column("GovReport", "gov_report"),),
    ("rouge_l", "accepted"),
    """
         |      | GovReport
    L-8B | Mean | 56.1 3.53
    L-8B | Max  | 55.8 3.52
    L-8B | Last | 54.0 3.47
    Q-8B | Mean | 56.0 2.77
    Q-8B | Max  | 55.5 2.76
    Q-8B | Last | 55.4 2.77
    """,
    max_tokens=512,
    bonus=False,
    small=Small(shrink=8, context=2048, max_tokens=128),
)

PAPER = Paper(
    "specpv",
    "SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial Verification",
    "Tan et al. 2025, arXiv:2512.02337",
    (TABLE_1, TABLE_2, TABLE_3, TABLE_4),
)
