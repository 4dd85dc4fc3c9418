"""SpecExtend: Cha et al. 2025, arXiv:2505.20776."""

from dataclasses import replace

from longdraft.bench.papers.table import Column, Kind, Line, Paper, Small, Table

A100 = "two A100 80GB"
MODELS = "Vicuna-7B (V), LongChat-7B (LC)"
# Appendix D: OPT-Tree.
OPT = {"tree": "opt", "nodes": 50, "depth": 10, "threshold": 0.7}
ROWS = "32 first and 128 last rows are always seen beside the chunks; the paper forces none"
STANDARD = Line("Standard", "small-lm", {**OPT, "view": "full"})
STREAMING = Line("Standard + StreamingLLM", "small-lm", {**OPT, "view": "streaming"})
EXTENDED = Line("Standard + SpecExtend", "specextend", {**OPT, "chunk": 32, "chunks": 32, "refresh": 4}, note=ROWS)
EAGLE = Line("EAGLE, No", "eagle3", OPT, note="EAGLE-3 in the place of EAGLE-1")
EAGLE_EXTENDED = Line(
    "EAGLE, Yes",
    "specextend-eagle3",
    {**OPT, "chunk": 32, "chunks": 64, "refresh": 8},
    note=f"EAGLE-3 in the place of EAGLE-1; {ROWS}",
)
MASKED = "torch's masked attention"
LENGTHS = (1, 2, 4, 8, 16)
DATA = {"GovReport": "gov_report", "PG-19": "pg19", "BookSum": "booksum"}
COLUMNS = tuple(Column(f"{name} {n}K", data, n * 1024) for name, data in DATA.items() for n in LENGTHS)
GOV_REPORT = COLUMNS[: len(LENGTHS)]

TABLE_1 = Table(
    "1",
    "how well drafts foresee a needle, by what they see of the text",
    Kind.needle,
    A100,
    "Vicuna-7B with Vicuna-160M; TriForce drafts with Vicuna-7B itself",
    (
        Line("Full KV Cache", "full"),
        Line("StreamingLLM", "streaming"),
        Line("Cross-model Retrieval (SpecExtend)", "retrieval", {"chunk": 32, "chunks": 32}, note=ROWS),
        Line("Retrieval (TriForce)", "target-retrieval"),
    ),
    (Column("Needle Retrieval", "pg19", 8192),),
    ("perplexity", "accuracy"),
    """
         |                                    | Needle Retrieval
    V-7B | Full KV Cache                      | 8.311 0.081
    V-7B | StreamingLLM                       | 2.435 0.166
    V-7B | Cross-model Retrieval (SpecExtend) | 2.237 0.823
    V-7B | Retrieval (TriForce)               | 2.191 0.976
    """,
    prompts=2,
    small=Small(shrink=2, prompts=1),
    remarks=("The paper does not say how long its haystacks are: 8K here. Prompts: haystacks of each of five depths.",),
)

TABLE_2 = Table(
    "2",
    "drafts off the shelf and EAGLE, with and without SpecExtend, at 1K to 16K tokens",
    Kind.speed,
    A100,
    MODELS + "; drafts Vicuna-68M, LLaMA-68M and EAGLE",
    (
        replace(STANDARD, name="68M, No"),
        replace(EXTENDED, name="68M, Yes"),
        EAGLE,
        EAGLE_EXTENDED,
    ),
    COLUMNS,
    ("accepted", "tokens_per_second", "speedup"),
    """
          |            | GovReport 1K     | GovReport 2K     | GovReport 4K    | GovReport 8K    | GovReport 16K
    V-7B  | 68M, No    | 1.73 100.31 1.78 | 0.64 55.64 1.16  | 0.60 41.91 1.14 | 0.62 25.71 1.08 | 0.59 16.56 1.38
    V-7B  | 68M, Yes   | 2.80 128.59 2.28 | 2.52 109.58 2.29 | 2.04 76.48 2.08 | 2.06 55.16 2.33 | 2.07 33.84 2.82
    V-7B  | EAGLE, No  | 3.61 144.77 2.57 | 3.04 107.52 2.24 | 2.27 66.62 1.81 | 1.35 31.74 1.34 | 1.00 19.35 1.61
    V-7B  | EAGLE, Yes | 3.58 145.53 2.58 | 3.08 113.47 2.37 | 2.80 85.99 2.34 | 2.82 62.90 2.66 | 2.51 37.05 3.08
    LC-7B | 68M, No    | 1.73 100.31 1.78 | 0.64 55.64 1.16  | 0.60 41.91 1.15 | 0.62 25.71 1.12 | 0.59 16.56 1.51
    LC-7B | 68M, Yes   | 2.01 109.26 1.94 | 1.82 90.27 1.89  | 1.66 68.84 1.89 | 1.81 52.17 2.30 | 1.68 31.11 2.84
    LC-7B | EAGLE, No  | 3.10 131.06 2.33 | 2.47 97.53 2.04  | 1.75 60.17 1.65 | 1.52 32.90 1.44 | 1.18 19.84 1.81
    LC-7B | EAGLE, Yes | 3.04 133.14 2.37 | 2.56 103.39 2.17 | 2.43 80.50 2.21 | 2.53 60.14 2.63 | 2.25 35.13 3.21

          |            | PG-19 1K         | PG-19 2K        | PG-19 4K        | PG-19 8K        | PG-19 16K
    V-7B  | 68M, No    | 1.16 76.50 1.37  | 0.52 51.00 1.09 | 0.55 39.16 1.15 | 0.55 21.80 1.01 | 0.54 14.73 1.29
    V-7B  | 68M, Yes   | 1.75 96.74 1.74  | 1.69 84.74 1.81 | 1.61 63.94 1.88 | 1.65 47.64 2.39 | 1.70 32.88 2.87
    V-7B  | EAGLE, No  | 2.29 107.31 1.92 | 2.18 88.92 1.89 | 1.88 54.71 1.60 | 1.18 26.43 1.32 | 0.92 16.98 1.48
    V-7B  | EAGLE, Yes | 2.29 107.53 1.93 | 2.19 94.41 2.02 | 2.04 69.92 2.06 | 2.19 53.06 2.67 | 2.05 35.43 3.09
    LC-7B | 68M, No    | 1.16 76.50 1.36  | 0.52 51.00 1.07 | 0.55 39.16 1.09 | 0.55 21.80 1.00 | 0.54 14.73 1.18
    LC-7B | 68M, Yes   | 1.22 80.25 1.43  | 1.33 73.69 1.55 | 1.42 62.27 1.74 | 1.42 44.96 2.06 | 1.45 30.67 2.46
    LC-7B | EAGLE, No  | 2.19 111.10 1.97 | 2.00 86.80 1.82 | 1.48 54.21 1.51 | 1.28 26.85 1.23 | 1.06 17.54 1.40
    LC-7B | EAGLE, Yes | 2.11 110.31 1.96 | 2.02 93.50 1.97 | 1.97 71.84 2.01 | 1.99 51.55 2.36 | 1.82 33.07 2.66

          |            | BookSum 1K       | BookSum 2K      | BookSum 4K      | BookSum 8K      | BookSum 16K
    V-7B  | 68M, No    | 1.36 88.12 1.57  | 0.56 53.33 1.13 | 0.51 39.30 1.08 | 0.52 24.21 1.05 | 0.58 15.63 1.30
    V-7B  | 68M, Yes   | 1.75 97.45 1.73  | 1.66 81.37 1.73 | 1.56 62.97 1.73 | 1.70 50.21 2.18 | 1.78 35.61 2.98
    V-7B  | EAGLE, No  | 2.33 111.70 1.99 | 1.95 82.44 1.75 | 1.87 58.01 1.59 | 1.14 29.30 1.27 | 0.94 18.76 1.57
    V-7B  | EAGLE, Yes | 2.31 111.82 1.99 | 1.99 88.64 1.89 | 2.08 70.90 1.95 | 2.15 54.53 2.37 | 2.11 38.03 3.18
    LC-7B | 68M, No    | 1.36 88.12 1.57  | 0.56 53.33 1.14 | 0.51 39.30 1.11 | 0.52 24.21 1.20 | 0.58 15.63 1.28
    LC-7B | 68M, Yes   | 1.45 91.05 1.63  | 1.55 83.60 1.80 | 1.54 66.79 1.90 | 1.61 49.47 2.45 | 1.50 32.21 2.64
    LC-7B | EAGLE, No  | 2.10 107.67 1.92 | 1.94 86.35 1.85 | 1.37 53.42 1.51 | 1.22 30.14 1.49 | 1.06 18.39 1.50
    LC-7B | EAGLE, Yes | 2.07 106.86 1.91 | 1.97 90.48 1.94 | 1.88 71.50 2.03 | 1.92 52.35 2.59 | 1.83 34.65 2.84
    """,
    prompts=20,
    baseline="hf-eager",
    bonus=False,
    prefill=True,
    small=Small(shrink=4, prompts=1),
    remarks=(
        "The paper has the same figures without SpecExtend for LLaMA-68M on LongChat as for Vicuna-68M on Vicuna.",
        "Tokens/s and speed-ups include reading the prompt.",
    ),
)

TABLE_3 = Table(
    "3",
    "speed-ups beside FlashDecoding, TriForce and MagicDec",
    Kind.speed,
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
    """
         |                       | GovReport 1K | GovReport 2K | GovReport 4K | GovReport 8K | GovReport 16K
    V-7B | FlashDecoding         | 1.06         | 1.07         | 1.12         | 1.23         | 1.51
    V-7B | TriForce              | 1.25         | 1.26         | 1.22         | 1.18         | 1.02
    V-7B | MagicDec              | 1.07         | 1.08         | 1.05         | 1.13         | 1.24
    V-7B | Standard              | 1.78         | 1.16         | 1.14         | 1.08         | 1.38
    V-7B | Standard + SpecExtend | 2.28         | 2.29         | 2.08         | 2.29         | 2.65

         |                       | PG-19 1K | PG-19 2K | PG-19 4K | PG-19 8K | PG-19 16K
    V-7B | FlashDecoding         | 1.07     | 1.08     | 1.18     | 1.38     | 1.52
    V-7B | TriForce              | 1.12     | 1.19     | 1.16     | 1.15     | 1.13
    V-7B | MagicDec              | 1.03     | 1.07     | 1.06     | 1.10     | 1.19
    V-7B | Standard              | 1.37     | 1.09     | 1.15     | 1.09     | 1.29
    V-7B | Standard + SpecExtend | 1.74     | 1.81     | 1.88     | 2.34     | 2.70

         |                       | BookSum 1K | BookSum 2K | BookSum 4K | BookSum 8K | BookSum 16K
    V-7B | FlashDecoding         | 1.06       | 1.09       | 1.10       | 1.26       | 1.58
    V-7B | TriForce              | 1.18       | 1.20       | 1.18       | 1.18       | 1.11
    V-7B | MagicDec              | 1.03       | 1.04       | 1.06       | 1.18       | 1.23
    V-7B | Standard              | 1.57       | 1.14       | 1.08       | 1.05       | 1.30
    V-7B | Standard + SpecExtend | 1.74       | 1.74       | 1.73       | 2.14       | 2.81
    """,
    prompts=20,
    baseline="hf-eager",
    prefill=True,
    small=Small(shrink=4, prompts=1),
    remarks=("Speed-ups include reading the prompt.",),
)

TABLE_4 = Table(
    "4",
    "what one choice of chunks costs at 16K tokens",
    Kind.speed,
    A100,
    "Vicuna-7B with Vicuna-68M",
    (
        replace(STREAMING, name="without retrieval"),
        Line("with retrieval", "specextend", {**EXTENDED.options, "refresh": 1}, note=f"in every round; {ROWS}"),
    ),
    (Column("GovReport 16K", "gov_report", 16384),),
    ("verify_ms", "draft_ms"),
    """
         |                   | GovReport 16K
    V-7B | without retrieval | 53.76
    V-7B | with retrieval    | 54.11
    """,
    prompts=20,
    small=Small(shrink=2, prompts=1),
    remarks=(
        "The paper: 0.84 ms a forward of the draft, 0.34 ms an update of its cache. Ours are in a round's drafting: up "
        "to ten forwards, and with retrieval an update.",
    ),
)

# Table 5 sweeps one parameter at a time, on 8K tokens of GovReport: a column is one value of one parameter.
_SWEEP = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16, 32, 64, 128, 256)
_STREAMING, _RETRIEVAL = ("68M, streaming",), ("68M, retrieval", "EAGLE, retrieval")


def _sweep(name: str, values: tuple[int, ...], only: tuple[str, ...], key: str) -> tuple[Column, ...]:
    extra = {n: {"sink": 0, "recent": 32} if key in ("chunk", "chunks") and n <= 4 else {} for n in values}
    return tuple(Column(f"{name} {n}", "gov_report", 8192, 1, {key: n, **extra[n]}, only) for n in values)


TABLE_5 = Table(
    "5",
    "sweeps over the working cache, chunk sizes, chunks and retrieval frequency",
    Kind.speed,
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
    """
         |                | working cache 64 | working cache 128 | working cache 256 | working cache 512
    V-7B | 68M, streaming | 32.52            | 32.91             | 33.65             | 33.53

         |                | working cache 1024 | working cache 2048 | working cache 4096 | working cache 8192
    V-7B | 68M, streaming | 33.69              | 32.36              | 25.84              | 24.32

         |                  | chunk 1 | chunk 2 | chunk 4 | chunk 8
    V-7B | 68M, retrieval   | 31.05   | 32.27   | 32.97   | 33.39
    V-7B | EAGLE, retrieval | 48.05   | 49.49   | 49.55   | 49.18

         |                  | chunk 16 | chunk 32 | chunk 64 | chunk 128
    V-7B | 68M, retrieval   | 33.41    | 33.52    | 33.23    | 33.20
    V-7B | EAGLE, retrieval | 48.92    | 49.68    | 48.25    | 47.48

         |                  | top-k 2 | top-k 4 | top-k 8 | top-k 16
    V-7B | 68M, retrieval   | 30.72   | 32.65   | 32.76   | 33.19
    V-7B | EAGLE, retrieval | 38.22   | 40.36   | 41.49   | 43.90

         |                  | top-k 32 | top-k 64 | top-k 128 | top-k 256
    V-7B | 68M, retrieval   | 33.28    | 32.50    | 25.20     | 23.95
    V-7B | EAGLE, retrieval | 47.21    | 48.09    | 45.14     | 32.48

         |                  | every 1 | every 2 | every 4 | every 8
    V-7B | 68M, retrieval   | 33.05   | 33.54   | 33.59   | 33.11
    V-7B | EAGLE, retrieval | 47.78   | 46.78   | 48.17   | 48.52

         |                  | every 16 | every 32 | every 64 | every 128
    V-7B | 68M, retrieval   | 33.16    | 33.28    | 33.29    | 33.21
    V-7B | EAGLE, retrieval | 48.36    | 48.11    | 48.13    | 48.20
    """,
    prompts=20,
    prefill=True,
    small=Small(shrink=4, prompts=1, max_tokens=32),
    remarks=(
        "A working cache counts its last rows here; 32 first ones come on top. At k up to 4, and chunks of up to 4, "
        "no first rows and 32 last ones are forced, or they would be all that is seen.",
        "The paper's streaming row for EAGLE is left out: EAGLE's window is its folder's.",
        "Tokens/s include reading the prompt.",
    ),
)

TABLE_6 = Table(
    "6",
    "the parts of SpecExtend, one at a time",
    Kind.speed,
    A100,
    "Vicuna-7B with Vicuna-68M",
    (
        replace(STANDARD, attention="sdpa", note=MASKED),
        replace(STANDARD, name="Standard + HTA", note="this machine's own path: `longdraft doctor`"),
        replace(STREAMING, attention="sdpa", note=MASKED),
        replace(EXTENDED, name="Standard + Retrieval", attention="sdpa", note=f"{MASKED}; {ROWS}"),
    ),
    GOV_REPORT,
    ("accepted", "tokens_per_second"),
    """
         |                         | GovReport 1K | GovReport 2K | GovReport 4K | GovReport 8K | GovReport 16K
    V-7B | Standard                | 2.75 127.34  | 1.83 87.34   | 0.92 47.41   | 0.78 27.54   | 0.72 17.60
    V-7B | Standard + HTA          | 2.61 122.73  | 1.74 85.57   | 0.92 47.62   | 0.76 31.08   | 0.74 20.95
    V-7B | Standard + StreamingLLM | 2.75 128.62  | 1.81 85.60   | 1.53 59.11   | 1.59 35.89   | 1.60 22.39
    V-7B | Standard + Retrieval    | 2.86 130.35  | 2.57 104.12  | 1.90 64.85   | 1.78 37.11   | 1.93 25.82
    """,
    prompts=20,
    bonus=False,
    prefill=True,
    small=Small(shrink=2, prompts=1),
    remarks=(
        "Prompts are always read with flash attention or our kernels: there is no row without it.",
        "Tokens/s include reading the prompt.",
    ),
)

PAPER = Paper(
    "specextend",
    "SpecExtend: A Drop-in Enhancement for Speculative Decoding of Long Sequences",
    "Cha et al. 2025, arXiv:2505.20776",
    (TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_6),
)
