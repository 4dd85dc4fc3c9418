"""LongSpec: Yang et al. 2025, arXiv:2502.17421. Figures that the paper has only as plots have no numbers here."""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

A100 = "one A100 80GB, float16"
MODELS = "Vicuna 7B and 13B (V), LongChat 7B and 13B (LC), Llama-3.1-8B (L)"
BEAM = {"widths": (4, 16, 16, 16, 16)}  # the paper's tree

VANILLA_HF = Line("Vanilla HF", "hf-eager")
VANILLA_FA = Line("Vanilla FA", "ar", note="plain decoding with this package's attention")
MAGICDEC = Line("MagicDec", "magicdec", {"depth": 2}, note="a chain of 2 (section 4.2); the paper names no view")
LONGSPEC = Line("LongSpec", "longspec", BEAM)

DATASETS = (
    Column("GovReport", "gov_report"),
    Column("QMSum", "qmsum"),
    Column("Multi-News", "multi_news"),
    Column("LCC", "lcc"),
    Column("RepoBench-P", "repobench-p"),
)

TABLE_1 = Table(
    "1",
    "LongSpec beside plain decoding and MagicDec at T = 0, and at T = 1 (Figure 3)",
    "speed",
    A100,
    MODELS,
    (VANILLA_HF, VANILLA_FA, MAGICDEC, LONGSPEC),
    DATASETS,
    ("accepted", "tokens_per_second"),
    temperatures=(0.0, 1.0),
    max_tokens=1024,
    baseline="Vanilla FA",
    small=SmallScale(context=1536, prompts=1),
    remarks=(
        "By the caption speed-ups are relative to Vanilla HF; by the numbers, to Vanilla FA.",
        "The paper has no numbers for T = 1: Figure 3 is a plot.",
    ),
)

# Appendix F. Its lines are those of Table 1, and EAGLE.
TABLE_3 = replace(
    TABLE_1,
    name="3",
    title="EAGLE on long texts, beside plain decoding and LongSpec",
    models="Vicuna-7B (V), LongChat-7B (LC), Llama-3.1-8B (L)",
    lines=(
        VANILLA_HF,
        VANILLA_FA,
        Line("EAGLE", "eagle3", note="EAGLE-3 in the place of EAGLE, which was trained with anchor-offset indices"),
        LONGSPEC,
    ),
    temperatures=(0.0,),
    remarks=(),
)

# Appendix G. What the paper calls "verify time" is the time of acceptance and of the CPU: ``rest_ms`` here.
TABLE_4 = Table(
    "4",
    "LongSpec on GovReport by the length of the prompt",
    "speed",
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
    max_tokens=1024,
    small=SmallScale(shrink=8, prompts=1),
    remarks=("The paper sorts rows of GovReport by their length; here they are cut to the upper end of each range.",),
)

FIGURE_5 = Table(
    "fig5",
    "where a round's time goes: masked attention and hybrid tree attention",
    "speed",
    A100,
    "not said",
    (
        Line("HF attention", "longspec", BEAM, attention="sdpa", note="torch's masked attention over prefix and tree"),
        Line("Hybrid Tree Attention", "longspec", BEAM, note="this machine's default path (`longdraft doctor`)"),
    ),
    (Column("GovReport", "gov_report"),),
    ("attention_ms", "draft_ms", "forward_ms", "rest_ms"),
    max_tokens=1024,
    small=SmallScale(context=4096, prompts=1),
    remarks=("The paper names no data set, and prints no other parts of a round: they are in its plot only.",),
)

FIGURE_6 = Table(
    "fig6",
    "long reasoning: AIME24, 32K new tokens",
    "speed",
    A100,
    "QwQ-32B",
    (VANILLA_FA, LONGSPEC),
    (Column("AIME24", "aime24"),),
    ("accepted", "tokens_per_second"),
    max_tokens=32768,
    baseline="Vanilla FA",
    small=SmallScale(context=512, max_tokens=384),
)

FIGURE_7 = Table(
    "fig7",
    "throughput by batch size on RepoBench-P",
    "speed",
    A100,
    "Vicuna-7B (V)",
    (Line("Vanilla", "ar"), MAGICDEC, LONGSPEC),
    tuple(Column(f"batch {n}", "repobench-p", batch=n) for n in (1, 2, 4, 8)),
    ("tokens_per_second", "accepted"),
    max_tokens=1024,
    baseline="Vanilla",
    small=SmallScale(context=1024),
    remarks=("The other batch sizes are in the paper's plot only.",),
)

PAPER = Paper(
    "longspec",
    "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification",
    "Yang et al. 2025, arXiv:2502.17421",
    (TABLE_1, TABLE_3, TABLE_4, FIGURE_5, FIGURE_6, FIGURE_7),
)
