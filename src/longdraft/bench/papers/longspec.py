"""Tables and figures of LongSpec (Yang et al. 2025, arXiv:2502.17421).

The paper shows some results only as plots. Such results have no published numbers here.
"""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

HARDWARE = "one A100 80GB, float16"
MODELS = "Vicuna 7B and 13B (V), LongChat 7B and 13B (LC), Llama-3.1-8B (L)"
TREE_OPTIONS = {"widths": (4, 16, 16, 16, 16)}  # nodes of each level of the paper's draft tree

VANILLA_HF = Line("Vanilla HF", "hf-eager")
VANILLA_FA = Line("Vanilla FA", "ar", note="plain decoding with this package's attention")
MAGICDEC = Line(
    "MagicDec", "magicdec", {"depth": 2, "refresh": 0},
    note="a chain of 2 (section 4.2), the view chosen once; the paper names no view",
)  # fmt: skip
LONGSPEC = Line("LongSpec", "longspec", TREE_OPTIONS)

GOV_REPORT = Column("GovReport", "gov_report")
COLUMNS = (
    GOV_REPORT, Column("QMSum", "qmsum"), Column("Multi-News", "multi_news"),
    Column("LCC", "lcc"), Column("RepoBench-P", "repobench-p"),
)  # fmt: skip

TABLE_1 = Table(
    name="1",
    title="LongSpec beside plain decoding and MagicDec at T = 0, and at T = 1 (Figure 3)",
    kind="speed", hardware=HARDWARE, models=MODELS,
    lines=(VANILLA_HF, VANILLA_FA, MAGICDEC, LONGSPEC),
    columns=COLUMNS,
    figures=("accepted", "tokens_per_second"),
    temperatures=(0.0, 1.0), max_tokens=1024, baseline="Vanilla FA",
    small_scale=SmallScale(context=1536, num_prompts=1),
    remarks=(
        "By the caption speed-ups are relative to Vanilla HF; by the numbers, to Vanilla FA.",
        "The paper has no numbers for T = 1: Figure 3 is a plot.",
    ),
)  # fmt: skip

TABLE_2 = replace(
    TABLE_1,
    name="2",
    title="drafts trained with and without anchor-offset indices",
    models="Llama-3.1-8B (L)",
    lines=(
        replace(LONGSPEC, name="w/o Anchor-Offset", note="the first --draft of LongSpec", draft_index=0),
        replace(LONGSPEC, name="w/ Anchor-Offset", note="the second --draft of LongSpec", draft_index=1),
    ),
    columns=COLUMNS[2:3] + COLUMNS[4:],
    temperatures=(0.0,), baseline="ar",
    remarks=(
        "Both drafts are the user's: `longdraft train longspec` with anchor_offset=0 and anchor_offset=N; "
        "docs/evidence.md has the same comparison by length.",
    ),
)  # fmt: skip

# From appendix F. The other settings are those of Table 1.
TABLE_3 = replace(
    TABLE_1,
    name="3",
    title="EAGLE on long texts, beside plain decoding and LongSpec",
    models="Vicuna-7B (V), LongChat-7B (LC), Llama-3.1-8B (L)",
    lines=(
        VANILLA_HF, VANILLA_FA,
        Line(
            "EAGLE", "eagle", attention="sdpa",
            note="torch's masked attention; the paper's draft was trained so: `longdraft train eagle anchor_offset=N`",
        ),
        LONGSPEC,
    ),
    temperatures=(0.0,), remarks=(),
)  # fmt: skip

# From appendix G. The paper's "verify time" is the time of acceptance and of work on the CPU: ``rest_ms`` here.
TABLE_4 = Table(
    name="4",
    title="LongSpec on GovReport by the length of the prompt",
    kind="speed", hardware=HARDWARE, models="LongChat-7B (LC)",
    lines=(LONGSPEC,),
    columns=(
        Column("0-5k", "gov_report", 5000), Column("5k-10k", "gov_report", 10000),
        Column("10k-15k", "gov_report", 15000), Column("15k-20k", "gov_report", 20000),
        Column("20k-25k", "gov_report", 25000), Column("25k-32k", "gov_report", 32000),
    ),
    figures=("tokens_per_second", "accepted", "draft_ms", "verify_ms", "rest_ms", "round_ms"),
    max_tokens=1024,
    small_scale=SmallScale(size_divisor=8, num_prompts=1),
    remarks=("The paper sorts rows of GovReport by their length; here they are cut to the upper end of each range.",),
)  # fmt: skip

FIGURE_5 = Table(
    name="fig5",
    title="where a round's time goes: masked attention and hybrid tree attention",
    kind="speed", hardware=HARDWARE, models="not said",
    lines=(
        replace(LONGSPEC, name="HF attention", attention="sdpa", note="torch's masked attention over prefix and tree"),
        replace(LONGSPEC, name="Hybrid Tree Attention", attention="own", note="this machine's default path, forced"),
    ),
    columns=(GOV_REPORT,),
    figures=("attention_ms", "draft_ms", "forward_ms", "rest_ms", "round_ms"),
    max_tokens=1024,
    small_scale=SmallScale(context=4096, num_prompts=1),
    remarks=(
        "The paper names no data set, and prints no other parts of a round: they are in its plot only.",
        "Both lines run without fused layers and CUDA graphs; a round is timed without the profiler.",
    ),
)  # fmt: skip

FIGURE_6 = Table(
    name="fig6",
    title="long reasoning: AIME24, 32K new tokens",
    kind="speed", hardware=HARDWARE, models="QwQ-32B",
    lines=(VANILLA_FA, LONGSPEC),
    columns=(Column("AIME24", "aime24"),),
    figures=("accepted", "tokens_per_second"),
    max_tokens=32768, baseline="Vanilla FA",
    small_scale=SmallScale(context=512, max_tokens=384),
)  # fmt: skip

FIGURE_7 = Table(
    name="fig7",
    title="throughput by batch size on RepoBench-P",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B (V)",
    lines=(Line("Vanilla", "ar"), MAGICDEC, LONGSPEC),
    columns=tuple(Column(f"batch {size}", "repobench-p", batch=size) for size in (1, 2, 4, 8)),
    figures=("tokens_per_second", "accepted"),
    max_tokens=1024, baseline="Vanilla",
    small_scale=SmallScale(context=1024),
    remarks=("The other batch sizes are in the paper's plot only.",),
)  # fmt: skip

PAPER = Paper(
    name="longspec",
    title="LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification",
    reference="Yang et al. 2025, arXiv:2502.17421",
    tables=(TABLE_1, TABLE_2, TABLE_3, TABLE_4, FIGURE_5, FIGURE_6, FIGURE_7),
)
