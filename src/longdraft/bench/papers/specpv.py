"""Tables of SpecPV (Tan et al. 2025, arXiv:2512.02337)."""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

HARDWARE = "one A100 80GB, torch's scaled dot product attention"
BASELINE_NOTE = (
    "The paper's baseline copies keys and values for every query head (torch's attention). This favours methods that "
    "read fewer keys and values."
)
# Options of the method specpv. EAGLE-3's trees are dynamic (section 4.1), and it reads no state twice.
EAGLE3 = {"drafter": "eagle3", "reread": False}
COLUMNS = tuple(Column(f"{n}K", "pg19", n * 1000) for n in (10, 20, 30, 40, 50, 60))


def specpv_line(name: str, budget: int) -> Line:
    """Makes a line of SpecPV with EAGLE-3's drafter. ``budget``: retrieved tokens, without the first and last ones."""
    return Line(name, "specpv", {**EAGLE3, "budget": budget})


LINES = (
    Line("Eagle3-Yarn", "eagle3", note="the draft as it was trained; the paper's is adapted to 64K by YaRN"),
    specpv_line("SpecPV-8K", 8192),
    specpv_line("SpecPV-4K", 4096),
    specpv_line("SpecPV-2K", 2048),
)

FIGURE_1 = Table(
    name="fig1",
    title="what a round of EAGLE-3 takes: drafting beside verifying, by length",
    kind="speed", hardware=HARDWARE, models="Llama-3.1-8B (L)",
    lines=LINES[:1],
    columns=COLUMNS,
    figures=("draft_ms", "verify_ms", "rest_ms", "round_ms"),
    max_tokens=1024,
    small_scale=SmallScale(size_divisor=8, num_prompts=1),
    remarks=("The paper has a plot only: verifying grows from around 60 to nearly 80 % of the time.",),
)  # fmt: skip

TABLE_1 = Table(
    name="1",
    title="continuing stories at 10K to 60K tokens: TriForce, TokenSwift, EAGLE-3 and SpecPV",
    kind="speed", hardware=HARDWARE, models="Llama-3.1-8B (L)",
    lines=(
        Line("TriForce", "triforce", {"budget": 4096, "refresh": 0}, note="its cache is chosen once, as in the paper"),
        Line("TokenSwift", "tokenswift", {"budget": 4096}, note="without the contextual penalty, for equal texts"),
        *LINES,
    ),
    columns=COLUMNS,
    figures=("speedup", "accepted"),
    max_tokens=1024, counts_bonus=False, length_average="mean",
    small_scale=SmallScale(size_divisor=8, num_prompts=2),
    remarks=(BASELINE_NOTE,),
)  # fmt: skip

TABLE_2 = Table(
    name="2",
    title="similarity of the output of partial verification to that of full verification, by budget",
    kind="quality", hardware=HARDWARE, models="Llama-3.1-8B (L), Qwen3-8B (Q)",
    lines=(Line("-", "full"), specpv_line("4096", 4096), specpv_line("2048", 2048), specpv_line("512", 512)),
    columns=(Column("GovReport", "gov_report"), Column("QMSum", "qmsum")),
    figures=("rouge_l", "bleurt"),
    max_tokens=512,
    small_scale=SmallScale(size_divisor=2, context=2560, max_tokens=64),
    remarks=(
        "-: full verification against plain decoding, the noise floor. On a CPU both give equal tokens in longdraft.",
        "The paper's code at that time scored blocks that include the first tokens, and gathered blocks without them.",
        "BLEURT is not measured here; it can be computed from the texts that --results keeps.",
    ),
)  # fmt: skip

TABLE_3 = replace(
    TABLE_1,
    name="3",
    title="continuing stories at 10K to 60K tokens on Qwen3: EAGLE-3 and SpecPV",
    models="Qwen3 4B, 8B and 14B, no-think; at 60K stretched twice by YaRN",
    lines=LINES,
)

TABLE_4 = Table(
    name="4",
    title="how a block's scores by several queries are reduced to one: mean, max, last; budget 2K",
    kind="quality", hardware=HARDWARE, models="Llama-3.1-8B (L), Qwen3-8B (Q)",
    lines=tuple(
        Line(reduction.capitalize(), "specpv", {**EAGLE3, "budget": 2048, "reduction": reduction})
        for reduction in ("mean", "max", "last")
    ),
    columns=(Column("GovReport", "gov_report"),),
    figures=("rouge_l", "accepted"),
    max_tokens=512, counts_bonus=False, length_average="mean",
    small_scale=SmallScale(size_divisor=8, context=2048, max_tokens=128),
)  # fmt: skip

FIGURE_4 = Table(
    name="fig4",
    title="decoding with the KV in host memory: EAGLE-3 and SpecPV, whose partial cache stays on the device",
    kind="speed", hardware="one RTX 4090 24GB", models="Llama-3.1-8B (L)",
    lines=(Line("Naive", "ar"), *LINES),
    columns=COLUMNS,
    figures=("tokens_per_second", "accepted"),
    max_tokens=1024, counts_bonus=False, length_average="mean", offload=True, baseline="Naive",
    small_scale=SmallScale(size_divisor=8, num_prompts=1),
    remarks=("The paper has a plot only. On a CPU there is nothing to offload to: the KV stays in memory.",),
)  # fmt: skip

FIGURE_5 = Table(
    name="fig5",
    title="scores of answers after a chain of thought, by budget",
    kind="quality", hardware=HARDWARE, models="Llama-3.1-8B (L), Qwen3-8B (Q) in think mode",
    lines=(Line("full verification", "full"), *(specpv_line(str(n), n) for n in (4096, 2048, 1024, 512))),
    columns=(
        Column("HotpotQA", "hotpotqa"), Column("MuSiQue", "musique"), Column("LongBench v2", "longbench-v2"),
    ),
    figures=("score", "rouge_l", "accepted"),
    max_tokens=1024, answer_tokens=128, counts_bonus=False, length_average="mean",
    small_scale=SmallScale(size_divisor=2, context=2560, max_tokens=64),
    remarks=(
        "The paper has a plot only, and names 4,096 alone of its budgets; with it most data sets score as with full "
        "verification. The words that ask for thought and answer are ours, and so is the score (F1, choice).",
        "The paper leaves out what is longer than 64K tokens; here the middle is cut to the model's context.",
    ),
)  # fmt: skip

FIGURE_6 = Table(
    name="fig6",
    title="buffered tokens after which a full pass follows: similarity and speed by refresh interval",
    kind="quality", hardware=HARDWARE, models="Llama-3.1-8B (L), Qwen3-8B (Q)",
    lines=(
        Line("full verification", "full"),
        *(Line(f"margin {n}", "specpv", {**EAGLE3, "budget": 2048, "margin": n}) for n in (20, 40, 80, 160)),
    ),
    columns=(Column("QMSum", "qmsum"),),
    figures=("rouge_l", "speedup_vs_full", "accepted"),
    max_tokens=512, counts_bonus=False, length_average="mean",
    small_scale=SmallScale(size_divisor=8, context=2048, max_tokens=96),
    remarks=("The paper has a plot only, and does not print its intervals and budget.",),
)  # fmt: skip

PAPER = Paper(
    name="specpv",
    title="SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial Verification",
    reference="Tan et al. 2025, arXiv:2512.02337",
    tables=(FIGURE_1, TABLE_1, TABLE_2, TABLE_3, FIGURE_4, FIGURE_5, TABLE_4, FIGURE_6),
)
