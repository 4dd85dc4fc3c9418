"""Tables of SpecExtend (Cha et al. 2025, arXiv:2505.20776).

In the names of lines "Yes" and "No" say whether a draft is extended by SpecExtend.
"""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

HARDWARE = "two A100 80GB"
MODELS = "Vicuna-7B (V), LongChat-7B (LC)"
# Options of OPT-Tree, appendix D. A level expands as many nodes as the tree may have: all candidates.
OPT_TREE = {"tree": "opt", "nodes": 50, "depth": 10, "threshold": 0.7, "top_k": 50}
HYBRID_REMARK = "The paper attends to prefix and tree apart (hybrid attention) beyond 4K tokens only; here always."
FORCED_PATHS_REMARK = (
    "Lines with a forced attention path, and their controls, run without fused layers and CUDA graphs. A round is "
    "timed without the profiler."
)
# A note on lines whose draft always sees some tokens, besides the retrieved chunks.
FORCED_NOTE = "the 32 first and 128 last tokens are always in view, beside the chunks; in the paper only chunks are"
MASKED_NOTE = "torch's masked attention"
STANDARD = Line("Standard", "small-lm", {**OPT_TREE, "view": "full"}, note=MASKED_NOTE, attention="sdpa")
# The draft reads a prompt whole, whatever it attends to afterwards (section 2.1).
STREAMING = Line("Standard + StreamingLLM", "small-lm", {**OPT_TREE, "view": "streaming", "prefill": "full"})
CHUNK_OPTIONS = {**OPT_TREE, "chunk": 32, "chunks": 32, "refresh": 4, "prefill": "full"}
SPECEXTEND = Line("Standard + SpecExtend", "specextend", CHUNK_OPTIONS, note=FORCED_NOTE)
EAGLE = Line("EAGLE, No", "eagle", OPT_TREE, note=MASKED_NOTE, attention="sdpa")
EAGLE_SPECEXTEND = Line(
    "EAGLE, Yes", "eagle", {**OPT_TREE, "retrieval": True, "chunk": 32, "chunks": 64, "refresh": 8}, note=FORCED_NOTE
)
DATASETS = {"GovReport": "gov_report", "PG-19": "pg19", "BookSum": "booksum"}
LENGTHS = (1, 2, 4, 8, 16)  # of prompts, in units of 1,024 tokens
COLUMNS = tuple(Column(f"{name} {n}K", dataset, n * 1024) for name, dataset in DATASETS.items() for n in LENGTHS)
GOV_REPORT_COLUMNS = COLUMNS[: len(LENGTHS)]

TABLE_1 = Table(
    name="1",
    title="how well drafts predict a needle, by their view of the text",
    kind="needle", hardware=HARDWARE, models="Vicuna-7B with Vicuna-160M; TriForce drafts with Vicuna-7B itself",
    lines=(
        Line("Full KV Cache", "small-lm", {"view": "full"}),
        Line("StreamingLLM", "small-lm", {"view": "streaming"}),
        Line("Cross-model Retrieval (SpecExtend)", "specextend", {"chunk": 32, "chunks": 32}, note=FORCED_NOTE),
        # The target drafts with the KV entries that it retrieves (Sun et al. 2024, TriForce, section 4.1).
        Line("Retrieval (TriForce)", "self", {"view": "chunks", "budget": 1184, "sink": 32, "window": 128}),
    ),
    columns=(Column("Needle Retrieval", "pg19", 8192),),
    figures=("perplexity", "accuracy"),
    num_prompts=2,
    small_scale=SmallScale(size_divisor=2, num_prompts=1),
    remarks=("The paper does not say how long its haystacks are: 8K here. Prompts: haystacks of each of five depths.",),
)  # fmt: skip

FIGURE_2 = Table(
    name="fig2",
    title="where the time goes at 16K tokens, without and with SpecExtend",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M",
    lines=(STANDARD, replace(SPECEXTEND, attention="own", note=f"this machine's default path; {FORCED_NOTE}")),
    columns=(Column("GovReport 16K", "gov_report", 16384),),
    figures=("prefill_s", "draft_ms", "attention_ms", "forward_ms", "rest_ms", "round_ms"),
    num_prompts=20, includes_prefill=True,
    small_scale=SmallScale(size_divisor=4, num_prompts=1),
    remarks=("The paper has a plot only. All figures but the prefill are of a round.", FORCED_PATHS_REMARK),
)  # fmt: skip

FIGURE_3 = Table(
    name="fig3",
    title="accepted length by length, with three caches of the draft",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M",
    lines=(
        STANDARD, STREAMING, SPECEXTEND,
        replace(
            SPECEXTEND, name="SpecExtend, window prefill", options={**CHUNK_OPTIONS, "prefill": "window"},
            note="not in the paper: the draft reads a prompt at positions that it was trained on",
        ),
    ),
    columns=GOV_REPORT_COLUMNS,
    figures=("accepted",),
    num_prompts=20, counts_bonus=False, length_average="mean",
    small_scale=SmallScale(size_divisor=4, num_prompts=1),
    remarks=("The paper has a plot only, and does not say its data set: GovReport here.",),
)  # fmt: skip

TABLE_2 = Table(
    name="2",
    title="drafts off the shelf and EAGLE, with and without SpecExtend, at 1K to 16K tokens",
    kind="speed", hardware=HARDWARE, models=MODELS + "; drafts Vicuna-68M, LLaMA-68M and EAGLE",
    lines=(replace(STANDARD, name="68M, No"), replace(SPECEXTEND, name="68M, Yes"), EAGLE, EAGLE_SPECEXTEND),
    columns=COLUMNS,
    figures=("accepted", "tokens_per_second", "speedup"),
    num_prompts=20, baseline="hf-eager", counts_bonus=False, length_average="mean",
    includes_prefill=True, rate_average="mean",
    small_scale=SmallScale(size_divisor=4, num_prompts=1),
    remarks=(
        "Without SpecExtend the paper's figures for LLaMA-68M on LongChat equal those for Vicuna-68M on Vicuna.",
        "Tokens/s and speed-ups include the prefill.",
        HYBRID_REMARK,
    ),
)  # fmt: skip

TABLE_3 = Table(
    name="3",
    title="speed-ups beside FlashDecoding, TriForce and MagicDec",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M",
    lines=(
        Line("FlashDecoding", "ar", note="plain decoding with this package's attention"),
        Line("TriForce", "triforce", {"refresh": 0}, note="its cache is chosen once; other settings: ours"),
        Line("MagicDec", "magicdec", {"view": "streaming"}, note="StreamingLLM-based self-speculation"),
        STANDARD, SPECEXTEND,
    ),
    columns=COLUMNS,
    figures=("speedup",),
    num_prompts=20, baseline="hf-eager", includes_prefill=True, rate_average="mean",
    small_scale=SmallScale(size_divisor=4, num_prompts=1),
    remarks=("Speed-ups include the prefill.", HYBRID_REMARK),
)  # fmt: skip

TABLE_4 = Table(
    name="4",
    title="what one choice of chunks costs at 16K tokens",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M",
    lines=(
        replace(STREAMING, name="without retrieval"),
        Line("with retrieval", "specextend", {**CHUNK_OPTIONS, "refresh": 1}, note=f"in every round; {FORCED_NOTE}"),
    ),
    columns=(Column("GovReport 16K", "gov_report", 16384),),
    figures=("verify_ms", "draft_forward_ms", "update_ms", "round_ms"),
    num_prompts=20,
    small_scale=SmallScale(size_divisor=2, num_prompts=1),
    remarks=("An update is the choice of chunks and the gathering of their entries.",),
)  # fmt: skip

# Table 5 varies one option at a time, on prompts of 8K tokens of GovReport. A column is one value of one option.
_VIEW_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of a streaming view
_CHUNK_TOKENS = _RETRIEVAL_ROUNDS = (1, 2, 4, 8, 16, 32, 64, 128)  # rounds from one retrieval to the next
_NUM_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
_STREAMING = ("68M, streaming", "EAGLE, streaming")  # names of lines
_RETRIEVAL = ("68M, retrieval", "EAGLE, retrieval")


def _sweep(name: str, values: tuple[int, ...], line_names: tuple[str, ...], option: str) -> tuple[Column, ...]:
    """Makes a column for each value of an option. Up to 4 chunks: see the table's first remark."""
    forced = {n: {"sink": 0, "recent": 32} if option == "chunks" and n <= 4 else {} for n in values}
    return tuple(Column(f"{name} {n}", "gov_report", 8192, 1, {option: n, **forced[n]}, line_names) for n in values)


TABLE_5 = Table(
    name="5",
    title="sweeps over the working cache, chunk sizes, chunks and retrieval frequency",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M and EAGLE",
    lines=(
        replace(STREAMING, name="68M, streaming"),
        Line(
            "EAGLE, streaming", "eagle", OPT_TREE, renamed={"recent": "window"},
            note="the last tokens alone, without the first ones",
        ),
        replace(SPECEXTEND, name="68M, retrieval", cache_tokens=1024),
        replace(EAGLE_SPECEXTEND, name="EAGLE, retrieval", cache_tokens=2048),
    ),
    columns=(
        *_sweep("working cache", _VIEW_TOKENS, _STREAMING, "recent"),
        *_sweep("chunk", _CHUNK_TOKENS, _RETRIEVAL, "chunk"),
        *_sweep("top-k", _NUM_CHUNKS, _RETRIEVAL, "chunks"),
        *_sweep("every", _RETRIEVAL_ROUNDS, _RETRIEVAL, "refresh"),
    ),
    figures=("tokens_per_second",),
    num_prompts=20, includes_prefill=True, rate_average="mean",
    small_scale=SmallScale(size_divisor=4, num_prompts=1, max_tokens=32),
    remarks=(
        "The size of a working cache counts its last tokens here, the 32 first tokens come on top. With up to 4 "
        "chunks only the 32 last tokens are forced, which otherwise would be most of the view.",
        "Chunk sizes vary in a working cache of fixed size: 1,024 tokens for the 68M, 2,048 for EAGLE.",
        "Tokens/s include the prefill.",
    ),
)  # fmt: skip

TABLE_6 = Table(
    name="6",
    title="the parts of SpecExtend, one at a time",
    kind="speed", hardware=HARDWARE, models="Vicuna-7B with Vicuna-68M",
    lines=(
        STANDARD,
        replace(STANDARD, name="Standard + FA", prefill_attention="own", note="our attention for prompts alone"),
        replace(
            STANDARD, name="Standard + HTA", attention="own", prefill_attention="sdpa",
            note="our attention for verification alone",
        ),
        replace(STREAMING, attention="sdpa", note=MASKED_NOTE),
        replace(SPECEXTEND, name="Standard + Retrieval", attention="sdpa", note=f"{MASKED_NOTE}; {FORCED_NOTE}"),
    ),
    columns=GOV_REPORT_COLUMNS,
    figures=("accepted", "tokens_per_second"),
    num_prompts=20, counts_bonus=False, length_average="mean", includes_prefill=True, rate_average="mean",
    small_scale=SmallScale(size_divisor=2, num_prompts=1),
    remarks=("Tokens/s include the prefill.", HYBRID_REMARK, FORCED_PATHS_REMARK),
)  # fmt: skip

PAPER = Paper(
    name="specextend",
    title="SpecExtend: A Drop-in Enhancement for Speculative Decoding of Long Sequences",
    reference="Cha et al. 2025, arXiv:2505.20776",
    tables=(TABLE_1, FIGURE_2, FIGURE_3, TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_6),
)
