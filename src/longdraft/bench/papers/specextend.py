"""SpecExtend: Cha et al. 2025, arXiv:2505.20776."""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Line, Paper, SmallScale, Table

A100 = "two A100 80GB"
MODELS = "Vicuna-7B (V), LongChat-7B (LC)"
OPT = {"tree": "opt", "nodes": 50, "depth": 10, "threshold": 0.7}  # OPT-Tree, appendix D
FORCED = "the 32 first and 128 last tokens are always in view, beside the chunks; in the paper only chunks are"
STANDARD = Line("Standard", "small-lm", {**OPT, "view": "full"})
STREAMING = Line("Standard + StreamingLLM", "small-lm", {**OPT, "view": "streaming"})
EXTENDED = Line("Standard + SpecExtend", "specextend", {**OPT, "chunk": 32, "chunks": 32, "refresh": 4}, note=FORCED)
EAGLE = Line("EAGLE, No", "eagle3", OPT, note="EAGLE-3 in the place of EAGLE-1")
EAGLE_EXTENDED = Line(
    "EAGLE, Yes",
    "specextend-eagle3",
    {**OPT, "chunk": 32, "chunks": 64, "refresh": 8},
    note=f"EAGLE-3 in the place of EAGLE-1; {FORCED}",
)
MASKED = "torch's masked attention"
LENGTHS = (1, 2, 4, 8, 16)  # in 1,024 tokens
DATA = {"GovReport": "gov_report", "PG-19": "pg19", "BookSum": "booksum"}
COLUMNS = tuple(Column(f"{name} {n}K", data, n * 1024) for name, data in DATA.items() for n in LENGTHS)
GOV_REPORT = COLUMNS[: len(LENGTHS)]

TABLE_1 = Table(
    "1",
    "how well drafts predict a needle, by their view of the text",
    "needle",
    A100,
    "Vicuna-7B with Vicuna-160M; TriForce drafts with Vicuna-7B itself",
    (
        Line("Full KV Cache", "small-lm", {"view": "full"}),
        Line("StreamingLLM", "small-lm", {"view": "streaming"}),
        Line("Cross-model Retrieval (SpecExtend)", "specextend", {"chunk": 32, "chunks": 32}, note=FORCED),
        # The target drafts on the KV entries that it retrieves (Sun et al. 2024, TriForce, section 4.1).
        Line("Retrieval (TriForce)", "self", {"view": "chunks", "budget": 1184, "sink": 32, "window": 128}),
    ),
    (Column("Needle Retrieval", "pg19", 8192),),
    ("perplexity", "accuracy"),
    prompts=2,
    small=SmallScale(shrink=2, prompts=1),
    remarks=("The paper does not say how long its haystacks are: 8K here. Prompts: haystacks of each of five depths.",),
)

TABLE_2 = Table(
    "2",
    "drafts off the shelf and EAGLE, with and without SpecExtend, at 1K to 16K tokens",
    "speed",
    A100,
    MODELS + "; drafts Vicuna-68M, LLaMA-68M and EAGLE",
    (replace(STANDARD, name="68M, No"), replace(EXTENDED, name="68M, Yes"), EAGLE, EAGLE_EXTENDED),
    COLUMNS,
    ("accepted", "tokens_per_second", "speedup"),
    prompts=20,
    baseline="hf-eager",
    counts_bonus=False,
    length_average="mean",
    includes_prefill=True,
    rate_average="mean",
    small=SmallScale(shrink=4, prompts=1),
    remarks=(
        "Without SpecExtend the paper's figures for LLaMA-68M on LongChat equal those for Vicuna-68M on Vicuna.",
        "Tokens/s and speed-ups include the prefill.",
    ),
)

TABLE_3 = Table(
    "3",
    "speed-ups beside FlashDecoding, TriForce and MagicDec",
    "speed",
    A100,
    "Vicuna-7B with Vicuna-68M",
    (
        Line("FlashDecoding", "ar", note="plain decoding with this package's attention"),
        Line("TriForce", "triforce", note="settings not given: this package's"),
        Line("MagicDec", "magicdec", {"view": "streaming"}, note="StreamingLLM-based self-speculation"),
        STANDARD,
        EXTENDED,
    ),
    COLUMNS,
    ("speedup",),
    prompts=20,
    baseline="hf-eager",
    includes_prefill=True,
    rate_average="mean",
    small=SmallScale(shrink=4, prompts=1),
    remarks=("Speed-ups include the prefill.",),
)

TABLE_4 = Table(
    "4",
    "what one choice of chunks costs at 16K tokens",
    "speed",
    A100,
    "Vicuna-7B with Vicuna-68M",
    (
        replace(STREAMING, name="without retrieval"),
        Line("with retrieval", "specextend", {**EXTENDED.options, "refresh": 1}, note=f"in every round; {FORCED}"),
    ),
    (Column("GovReport 16K", "gov_report", 16384),),
    ("verify_ms", "draft_ms"),
    prompts=20,
    small=SmallScale(shrink=2, prompts=1),
    remarks=(
        "The paper: 0.84 ms a forward of the draft, 0.34 ms an update of its cache. Our draft_ms is a whole round's: "
        "up to ten forwards, and an update if there is retrieval.",
    ),
)

# Table 5 sweeps one parameter at a time, on 8K tokens of GovReport. A column is one value of one parameter.
# _SWEEP: tokens of a streaming view; tokens of a chunk, or rounds between retrievals; numbers of chunks.
_SWEEP = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16, 32, 64, 128, 256)
_STREAMING, _RETRIEVAL = ("68M, streaming",), ("68M, retrieval", "EAGLE, retrieval")


def _sweep(name: str, values: tuple[int, ...], line_names: tuple[str, ...], key: str) -> tuple[Column, ...]:
    """A column for each value of the option ``key``. With small values, only the 32 last tokens are forced."""
    forced = {n: {"sink": 0, "recent": 32} if key in ("chunk", "chunks") and n <= 4 else {} for n in values}
    return tuple(Column(f"{name} {n}", "gov_report", 8192, 1, {key: n, **forced[n]}, line_names) for n in values)


TABLE_5 = Table(
    "5",
    "sweeps over the working cache, chunk sizes, chunks and retrieval frequency",
    "speed",
    A100,
    "Vicuna-7B with Vicuna-68M and EAGLE",
    (
        replace(STREAMING, name="68M, streaming"),
        replace(EXTENDED, name="68M, retrieval"),
        replace(EAGLE_EXTENDED, name="EAGLE, retrieval"),
    ),
    (
        *_sweep("working cache", _SWEEP[0], _STREAMING, "recent"),
        *_sweep("chunk", _SWEEP[1], _RETRIEVAL, "chunk"),
        *_sweep("top-k", _SWEEP[2], _RETRIEVAL, "chunks"),
        *_sweep("every", _SWEEP[1], _RETRIEVAL, "refresh"),
    ),
    ("tokens_per_second",),
    prompts=20,
    includes_prefill=True,
    rate_average="mean",
    small=SmallScale(shrink=4, prompts=1, max_tokens=32),
    remarks=(
        "The size of a working cache counts its last tokens here, the 32 first tokens come on top. With up to 4 "
        "chunks, or 4 tokens a chunk, only the 32 last tokens are forced, which otherwise would be most of the view.",
        "The paper's streaming row for EAGLE is left out: EAGLE's window is fixed in the draft's folder.",
        "Tokens/s include the prefill.",
    ),
)

TABLE_6 = Table(
    "6",
    "the parts of SpecExtend, one at a time",
    "speed",
    A100,
    "Vicuna-7B with Vicuna-68M",
    (
        replace(STANDARD, attention="sdpa", note=MASKED),
        replace(STANDARD, name="Standard + HTA", note="this machine's default path (`longdraft doctor`)"),
        replace(STREAMING, attention="sdpa", note=MASKED),
        replace(EXTENDED, name="Standard + Retrieval", attention="sdpa", note=f"{MASKED}; {FORCED}"),
    ),
    GOV_REPORT,
    ("accepted", "tokens_per_second"),
    prompts=20,
    counts_bonus=False,
    length_average="mean",
    includes_prefill=True,
    rate_average="mean",
    small=SmallScale(shrink=2, prompts=1),
    remarks=(
        "There is no line without flash attention in the prefill: longdraft always uses it, or its own kernels.",
        "Tokens/s include the prefill.",
    ),
)

PAPER = Paper(
    "specextend",
    "SpecExtend: A Drop-in Enhancement for Speculative Decoding of Long Sequences",
    "Cha et al. 2025, arXiv:2505.20776",
    (TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_6),
)
