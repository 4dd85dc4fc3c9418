"""LongSpec: Yang et al. 2025, arXiv:2502.17421. Figures that exist as plots only have no numbers here."""

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

A100 = "one A100 80GB, float16"
MODELS = "Vicuna 7B and 13B (V), LongChat 7B and 13B (LC), Llama-3.1-8B (L)"
BEAM = {"widths": (4, 16, 16, 16, 16)}

VANILLA_HF = Line("Vanilla HF", "hf-eager")
VANILLA_FA = Line("Vanilla FA", "ar", note="plain decoding with this package's attention")
MAGICDEC = Line("MagicDec", "magicdec", {"depth": 2}, note="a chain of 2 (section 4.2); the view is not given")
LONGSPEC = Line("LongSpec", "longspec", BEAM)

FIVE = (
    Column("GovReport", "gov_report"),
    Column("QMSum", "qmsum"),
    Column("Multi-News", "multi_news"),
    Column("LCC", "lcc"),
    Column("RepoBench-P", "repobench-p"),
)

TABLE_1 = Table(
    "1",
    "LongSpec beside plain decoding and MagicDec, T = 0; Figure 3 is the same at T = 1",
    Kind.speed,
    A100,
    MODELS,
    (VANILLA_HF, VANILLA_FA, MAGICDEC, LONGSPEC),
    FIVE,
    ("accepted", "tokens_per_second"),
    """
          |            | GovReport   | QMSum      | Multi-News  | LCC         | RepoBench-P
    V-7B  | Vanilla HF | 1.00 25.25  | 1.00 18.12 | 1.00 27.29  | 1.00 25.25  | 1.00 19.18
    V-7B  | Vanilla FA | 1.00 45.76  | 1.00 43.68 | 1.00 55.99  | 1.00 54.07  | 1.00 46.61
    V-7B  | MagicDec   | 2.23 41.68  | 2.29 42.91 | 2.31 44.82  | 2.52 46.96  | 2.57 48.75
    V-7B  | LongSpec   | 3.57 102.23 | 3.14 88.87 | 3.51 100.55 | 3.73 107.30 | 3.86 110.76
    V-13B | Vanilla HF | 1.00 17.25  | 1.00 11.86 | 1.00 18.81  | 1.00 17.25  | 1.00 13.44
    V-13B | Vanilla FA | 1.00 28.52  | 1.00 27.43 | 1.00 35.01  | 1.00 33.87  | 1.00 29.14
    V-13B | MagicDec   | 2.95 38.24  | 2.87 37.15 | 2.97 39.47  | 2.96 38.40  | 2.94 36.66
    V-13B | LongSpec   | 3.31 71.08  | 2.76 57.15 | 3.44 78.20  | 3.57 81.00  | 3.59 77.22
    LC-7B | Vanilla HF | 1.00 25.27  | 1.00 14.11 | 1.00 27.66  | 1.00 25.27  | 1.00 17.02
    LC-7B | Vanilla FA | 1.00 42.14  | 1.00 36.87 | 1.00 50.19  | 1.00 54.17  | 1.00 42.69
    LC-7B | MagicDec   | 2.26 41.90  | 2.20 40.82 | 2.32 43.94  | 2.77 51.73  | 2.57 44.13
    LC-7B | LongSpec   | 3.59 101.43 | 3.06 85.23 | 3.41 97.93  | 4.21 122.30 | 4.03 115.27
    LC-13B | Vanilla HF | 1.00 17.72 | 1.00 12.08 | 1.00 18.74  | 1.00 17.72  | 1.00 13.85
    LC-13B | Vanilla FA | 1.00 28.56 | 1.00 27.18 | 1.00 35.37  | 1.00 34.58  | 1.00 29.74
    LC-13B | MagicDec   | 2.40 31.37 | 2.38 30.84 | 2.43 32.58  | 2.68 35.77  | 2.85 35.67
    LC-13B | LongSpec   | 3.58 76.26 | 3.15 64.41 | 3.50 80.48  | 4.01 90.92  | 4.46 96.96
    L-8B  | Vanilla HF | 1.00 21.59  | 1.00 18.67 | 1.00 29.91  | 1.00 29.48  | 1.00 22.77
    L-8B  | Vanilla FA | 1.00 53.14  | 1.00 51.22 | 1.00 56.94  | 1.00 56.73  | 1.00 54.08
    L-8B  | MagicDec   | 2.04 36.14  | 2.00 35.78 | 2.33 39.57  | 2.65 46.95  | 2.61 44.39
    L-8B  | LongSpec   | 3.25 84.57  | 2.99 75.68 | 3.36 91.11  | 3.28 89.33  | 3.39 91.28
    """,
    temperatures=(0.0, 1.0),
    max_tokens=1024,
    baseline="Vanilla FA",
    small=Small(context=1536, prompts=1),
    remarks=(
        "The caption calls its speed-ups relative to Vanilla HF; the numbers are relative to Vanilla FA.",
        "The paper has no numbers for T = 1: Figure 3 is a plot.",
    ),
)

# Appendix F. All rows but EAGLE's are Table 1's.
_IN_TABLE_1 = "\n".join(
    row for row in TABLE_1.numbers.strip("\n ").splitlines() if "13B" not in row and "MagicDec" not in row
)
TABLE_3 = Table(
    "3",
    "EAGLE on long texts, beside plain decoding and LongSpec",
    Kind.speed,
    A100,
    "Vicuna-7B (V), LongChat-7B (LC), Llama-3.1-8B (L)",
    (
        VANILLA_HF,
        VANILLA_FA,
        Line("EAGLE", "eagle3", note="EAGLE-3 in the place of EAGLE, which was trained with anchor-offset indices"),
        LONGSPEC,
    ),
    FIVE,
    ("accepted", "tokens_per_second"),
    f"""
{_IN_TABLE_1}
    V-7B  | EAGLE      | 2.02 33.43  | 1.91 26.78 | 1.97 36.62  | 1.92 40.64  | 1.92 33.84
    LC-7B | EAGLE      | 2.10 32.06  | 1.94 26.02 | 2.02 34.38  | 2.09 38.81  | 2.10 29.75
    L-8B  | EAGLE      | 1.79 28.27  | 2.00 25.78 | 2.33 39.57  | 2.65 42.95  | 2.61 30.39
    """,
    max_tokens=1024,
    baseline="Vanilla FA",
    small=Small(context=1536, prompts=1),
)

# Appendix G. Its "verify time" is that of accepting and of the host, which is our "all else".
TABLE_4 = Table(
    "4",
    "LongSpec on GovReport by the length of the prompt",
    Kind.speed,
    A100,
    "LongChat-7B (LC)",
    (LONGSPEC,),
    tuple(
        Column(name, "gov_report", tokens)
        for name, tokens in (
            ("0-5k", 5000),
            ("5k-10k", 10000),
            ("10k-15k", 15000),
            ("15k-20k", 20000),
            ("20k-25k", 25000),
            ("25k-32k", 32000),
        )
    ),
    ("tokens_per_second", "accepted", "draft_ms", "verify_ms", "rest_ms"),
    """
          |          | 0-5k                         | 5k-10k                       | 10k-15k
    LC-7B | LongSpec | 116.65 4.01 8.91 25.63 6.18  | 115.52 3.97 8.92 25.66 6.22  | 114.54 3.97 8.93 25.61 6.23

          |          | 15k-20k                      | 20k-25k                      | 25k-32k
    LC-7B | LongSpec | 113.47 4.12 8.98 27.30 6.24  | 115.13 4.45 9.13 29.08 6.27  | 103.68 3.97 9.25 30.89 6.28
    """,
    max_tokens=1024,
    small=Small(shrink=8, prompts=1),
    remarks=("The paper sorts rows of GovReport by their length; here they are cut to the upper end of each range.",),
)

FIGURE_5 = Table(
    "fig5",
    "where a round's time goes: masked attention and hybrid tree attention",
    Kind.speed,
    A100,
    "not said",
    (
        Line("HF attention", "longspec", BEAM, attention="sdpa", note="torch's masked attention over prefix and tree"),
        Line("Hybrid Tree Attention", "longspec", BEAM, note="this machine's own path: `longdraft doctor` names it"),
    ),
    (Column("GovReport", "gov_report"),),
    ("attention_ms", "draft_ms", "forward_ms", "rest_ms"),
    """
      |                       | GovReport
    - | HF attention          | 49.92
    - | Hybrid Tree Attention | 12.54
    """,
    max_tokens=1024,
    small=Small(context=4096, prompts=1),
    remarks=("The paper's other parts are in its plot only; its data set is not said.",),
)

FIGURE_6 = Table(
    "fig6",
    "long reasoning: AIME24, 32K new tokens",
    Kind.speed,
    A100,
    "QwQ-32B",
    (VANILLA_FA, LONGSPEC),
    (Column("AIME24", "aime24"),),
    ("accepted", "tokens_per_second"),
    """
            |            | AIME24
    QwQ-32B | Vanilla FA | 1.00 18.92
    QwQ-32B | LongSpec   | 3.82 42.63
    """,
    max_tokens=32768,
    baseline="Vanilla FA",
    small=Small(context=512, max_tokens=384),
)

FIGURE_7 = Table(
    "fig7",
    "throughput by batch size on RepoBench-P",
    Kind.speed,
    A100,
    "Vicuna-7B (V)",
    (Line("Vanilla", "ar"), MAGICDEC, LONGSPEC),
    tuple(Column(f"batch {n}", "repobench-p", batch=n) for n in (1, 2, 4, 8)),
    ("tokens_per_second", "accepted"),
    """
         |          | batch 8
    V-7B | Vanilla  | 286.96
    V-7B | MagicDec | 310.58
    V-7B | LongSpec | 561.32
    """,
    max_tokens=1024,
    baseline="Vanilla",
    small=Small(context=1024),
    remarks=("The other batch sizes are in the paper's plot only.",),
)

PAPER = Paper(
    "longspec",
    "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification",
    "Yang et al. 2025, arXiv:2502.17421",
    (TABLE_1, TABLE_3, TABLE_4, FIGURE_5, FIGURE_6, FIGURE_7),
)
