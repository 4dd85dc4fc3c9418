"""Lower bounds for plain decoding and the methods on one large GPU, computed from bytes and operations.

    python benchmarks/gpu_on_paper.py [--config config.json] [--bandwidth GB/s --tflops N] [--context N ...] [--batch N]

Two Markdown tables a model: what each forward moves and computes; what a round of each method then costs in plain
steps, and the speed-up with the tokens that papers report for it. Times are lower bounds, of plain decoding too. Not
counted: activations, hidden states and logits between operators, sampling, making trees, launches and waiting.
tests/gpu/test_gpu_on_paper.py holds the formulas against what operators read and compute in runs of a tiny model.

m is the target; b texts are decoded at a time; each has n rows of KV (``prefix``: those seen); a round brings a tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

WIDTHS, WINDOW = (4, 16, 16, 16, 16), 512  # LongSpec's beam tree, 68 nodes and the root; keys of its self-attention
TOP_K, DEPTH, NODES = 10, 7, 60  # EAGLE-3's dynamic tree, root counted
OPT_NODES, THRESHOLD = 51, 0.7  # SpecExtend's OPT-Tree, root counted; tokens that a level must promise
BUDGET, SINK, RECENT, BLOCK, MARGIN = 4096, 32, 128, 16, 20  # SpecPV-4K
PARTIAL = BUDGET + SINK + RECENT
# Rows that a draft sees with retrieval, and rounds between two choices: SpecExtend's.
SMALL_RETRIEVED, SMALL_EVERY = 32 * 32 + SINK + RECENT, 4


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama kind, head apart from the embedding. ``size``: bytes of a number."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool = False
    size: int = 2

    @classmethod
    def from_config(cls, config: dict[str, object], size: int = 2) -> Model:
        """From a config.json of transformers. Raises ValueError for a family whose layers hold other weights."""
        if (family := config["model_type"]) not in ("llama", "mistral", "qwen3") or config.get("attention_bias"):
            raise ValueError(f"these formulas are for llama, mistral and qwen3 without biases, not for {family}")
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        h, i, layers, heads, vocabulary = (int(str(config[name])) for name in names)
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or h // heads
        return cls(h, i, layers, heads, int(str(kv_heads)), int(str(head_dim)), vocabulary, family == "qwen3", size)

    @property
    def q(self) -> int:
        """Numbers of one token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Numbers of one token's keys in a layer; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in a layer."""
        return 2 * self.kv * self.size


MODELS = {
    "Llama-3.1-8B": Model(4096, 14336, 32, 32, 8, 128, 128_256),
    "Qwen3-8B": Model(4096, 12288, 36, 32, 8, 128, 151_936, qk_norm=True),
}


class Card(NamedTuple):
    """bandwidth: bytes a second. speed: operations a second, dense bfloat16. memory: bytes for weights and KV."""

    bandwidth: float
    speed: float
    memory: float = 80e9


CARDS = {"H100": Card(3.35e12, 989e12), "A100": Card(2.04e12, 312e12)}  # 80 GB, SXM


class Part(NamedTuple):
    """Work that runs as one part, before the next part begins."""

    bytes: int
    operations: int


Cost = list[Part]
Round = list[tuple[float, Cost]]  # how often a round has each


def seconds(cost: Cost, card: Card) -> float:
    """The roofline: each part takes as long as its bytes or as its operations, whichever is longer."""
    return sum(max(part.bytes / card.bandwidth, part.operations / card.speed) for part in cost)


def layer_matrices(m: Model) -> int:
    """Numbers in a layer's matrices: q and o, k and v, and SwiGLU's three."""
    return 2 * m.hidden * m.q + 2 * m.hidden * m.kv + 3 * m.hidden * m.intermediate


def weights(m: Model) -> int:
    """Numbers that a forward reads once, whatever its rows: all layers, norms and the head, not the embedding."""
    norms = 2 * m.hidden + (2 * m.head_dim if m.qk_norm else 0)
    return m.layers * (layer_matrices(m) + norms) + m.hidden + m.vocabulary * m.hidden


def parameters(m: Model) -> int:
    """Numbers of the whole model."""
    return weights(m) + m.vocabulary * m.hidden


def products(m: Model, read: int, embedded: int, multiplied: int) -> Part:
    """``read`` weights and ``embedded`` rows of the embedding; 2 operations each for ``multiplied`` weights x rows."""
    return Part(m.size * (read + embedded * m.hidden), 2 * multiplied)


def attention(m: Model, b: int, rows: int, seen: int, written: int, layers: int = 1) -> Part:
    """``rows`` rows of each text attend to ``seen`` keys, the tree's among them: a mask saves nothing.
    K and V of what is seen are read once a KV head, for all rows and all query heads of a group together; those of
    ``written`` rows are written before. q . k and weight times v take 2 operations a number each."""
    return Part(layers * b * (seen + written) * m.kv_bytes, layers * b * rows * seen * 4 * m.q)


def forward(m: Model, b: int, rows: int, prefix: int, waiting: int = 0) -> Cost:
    """``rows`` rows of each text behind ``prefix`` rows of KV: one is a plain step, a tree's nodes are a verification;
    in a partial round of SpecPV, the prefix is the partial cache. ``waiting`` ones of them need no logits."""
    multiplied = b * (rows * m.layers * layer_matrices(m) + (rows - waiting) * m.vocabulary * m.hidden)
    once = products(m, weights(m), b * rows, multiplied)
    return [once, attention(m, b, rows, prefix + rows, rows, m.layers)]


def longspec_level(m: Model, b: int, fed: int, going: int, window: int, text: int, vocabulary: int = 0) -> Cost:
    """A level of a LongSpec draft: its block, and the target's head or a smaller vocabulary's rows of it. ``fed`` rows
    get keys and values, ``going`` of them go on (at the root, the newest alone). Self-attention sees ``window`` keys,
    cross-attention ``text`` rows of the target's last-layer KV."""
    own_kv = 2 * m.hidden * m.kv
    rest = 4 * m.hidden * m.q + 3 * m.hidden * m.intermediate + (vocabulary or m.vocabulary) * m.hidden
    biases_norms = 2 * m.q + 2 * m.kv + 3 * m.hidden
    once = products(m, own_kv + rest + biases_norms, b * fed, b * (fed * own_kv + going * rest))
    return [once, attention(m, b, going, window, fed), attention(m, b, going, text, 0)]


def eagle3_level(m: Model, b: int, fed: int, going: int, seen: int, root: bool, vocabulary: int = 32_000) -> Cost:
    """A level of an EAGLE-3 draft: one layer whose q, k and v are of twice the hidden size, and a head of its own (of
    32,000 tokens in published drafts). At the root the target's hidden states, three times the hidden size, are
    projected first. Of the draft's own KV ``seen`` rows are seen, the tree's among them."""
    of_fed = 4 * m.hidden * m.kv + (3 * m.hidden * m.hidden if root else 0)
    rest = 3 * m.hidden * m.q + 3 * m.hidden * m.intermediate + vocabulary * m.hidden
    once = products(m, of_fed + rest + 4 * m.hidden, b * fed, b * (fed * of_fed + going * rest))
    return [once, attention(m, b, going, seen, fed)]


def gather(m: Model, b: int, rows: int, layers: int = 1) -> Part:
    """K and V of rows are read, and written elsewhere."""
    return Part(2 * layers * b * rows * m.kv_bytes, 0)


def refresh(m: Model, b: int, nodes: int, waiting: int, prefix: int) -> Cost:
    """SpecPV's full pass over the tokens in waiting and the tree. Then, in every layer, the tree's queries times the
    largest and the smallest keys of each block choose the partial cache anew."""
    blocks = (prefix - RECENT) // BLOCK - SINK // BLOCK
    scores = Part(m.layers * b * blocks * m.kv_bytes, m.layers * b * nodes * blocks * 4 * m.q)
    return [*forward(m, b, nodes + waiting, prefix, waiting), scores, gather(m, b, PARTIAL, m.layers)]


def retrieval_update(m: Model, b: int, prefix: int, rows: int, draft: Model | None = None) -> Cost:
    """One query of one layer of the target times all keys; then what the draft sees is gathered, ``rows`` rows of the
    target's last layer (LongSpec), of as large a layer (EAGLE-3), or of a small language model."""
    scores = Part(b * prefix * m.kv * m.size, b * prefix * 2 * m.q)
    return [scores, gather(draft, b, rows, draft.layers) if draft else gather(m, b, rows)]


def longspec(m: Model, b: int, n: int, a: float, vocabulary: int = 0) -> Round:
    """Five levels, the last of the tree is never expanded, and 69 nodes."""
    draft, nodes = longspec_level(m, b, round(a), 1, min(n, WINDOW), n, vocabulary), 0
    for depth, width in enumerate(WIDTHS[:-1], 1):
        nodes += width
        draft += longspec_level(m, b, width, width, min(n, WINDOW - depth) + nodes, n, vocabulary)
    return [(1, draft + forward(m, b, sum(WIDTHS) + 1, n))]


def eagle3_draft(m: Model, b: int, a: float, seen: int) -> Cost:
    """The root after the new tokens, then the best nodes of each level."""
    levels = [eagle3_level(m, b, TOP_K, TOP_K, seen + i * TOP_K, root=False) for i in range(1, DEPTH)]
    return sum(levels, eagle3_level(m, b, round(a), 1, seen, root=True))


def eagle3(m: Model, b: int, n: int, a: float) -> Round:
    """Its own tree on all of its KV."""
    return [(1, eagle3_draft(m, b, a, n) + forward(m, b, NODES, n))]


def specextend(m: Model, b: int, n: int, a: float) -> Round:
    """The 68M draft of the paper's tables, with the target's vocabulary. Each level of its OPT-Tree but the first must
    follow one that promised the threshold."""
    small = Model(768, 3072, 2, 12, 12, 64, m.vocabulary, size=m.size)
    rows = [round(a), *[TOP_K] * int((a - 1) / THRESHOLD)]
    draft = [part for i, width in enumerate(rows) for part in forward(small, b, width, SMALL_RETRIEVED + i * TOP_K)]
    update = retrieval_update(m, b, n, SMALL_RETRIEVED, small)
    return [(1, draft + forward(m, b, OPT_NODES, n)), (1 / SMALL_EVERY, update)]


def specpv(m: Model, b: int, n: int, a: float) -> Round:
    """The mean of a cycle with EAGLE-3's draft: partial rounds until more than the margin waits, then a refresh."""
    if n <= PARTIAL:  # verified in full
        return eagle3(m, b, n, a)
    count = int(MARGIN / a) + 1
    cycle = [forward(m, b, NODES, PARTIAL + round(i * a)) for i in range(count)]
    cycle.append(refresh(m, b, NODES, round(count * a), n))
    return [(1, eagle3_draft(m, b, a, n)), *((1 / len(cycle), cost) for cost in cycle)]


# A round, and the tokens that one brings at about 8K, 32K and 64K, bonus counted; of a model, or "" of any other.
# LongSpec, table 1, Llama-3.1-8B on GovReport (table 4: flat up to 32K). SpecPV, tables 1 and 3, PG-19 at 10K, 30K and
# 60K, and SpecExtend, table 2, Vicuna-7B on GovReport at 8K and 16K, leave the bonus out: it is added.
LONGSPEC = {"": (3.25, 3.25, 3.25)}
METHODS: dict[str, tuple[Callable[..., Round], dict[str, tuple[float, float, float]]]] = {
    "LongSpec": (longspec, LONGSPEC),
    "LongSpec, vocabulary of 32,000": (partial(longspec, vocabulary=32_000), LONGSPEC),
    "EAGLE-3 with YaRN": (eagle3, {"": (4.38, 4.38, 4.48), "Qwen3-8B": (4.23, 4.35, 4.22)}),
    "SpecExtend, 68M draft": (specextend, {"": (3.06, 3.07, 3.07)}),
    "SpecPV-4K on EAGLE-3": (specpv, {"": (4.29, 4.43, 4.56), "Qwen3-8B": (3.98, 4.02, 4.06)}),
}
STEPS: dict[str, Callable[[Model, int, int], Cost]] = {
    "plain step": lambda m, b, n: forward(m, b, 1, n),
    "verification, 64 nodes": lambda m, b, n: forward(m, b, 64, n),
    "LongSpec level, 16 nodes": lambda m, b, n: longspec_level(m, b, 16, 16, WINDOW - 4 + 52, n),
    "EAGLE-3 level, 10 nodes": lambda m, b, n: eagle3_level(m, b, 10, 10, n + 60, root=False),
    "SpecPV-4K: partial round, 64 nodes": lambda m, b, n: forward(m, b, 64, PARTIAL + MARGIN // 2),
    "SpecPV-4K: refresh, 64 nodes": lambda m, b, n: refresh(m, b, 64, MARGIN, n),
}


def step_cell(m: Model, model: str, step: str, b: int, n: int, cards: dict[str, Card]) -> str:
    """Bytes, operations, and milliseconds on each card."""
    cost = STEPS[step](m, b, n)
    moved, computed = sum(p.bytes for p in cost) / 1e9, sum(p.operations for p in cost) / 1e9
    return f"{moved:.2f}, {computed:,.1f}: " + ", ".join(f"{1e3 * seconds(cost, card):.2f}" for card in cards.values())


def method_cell(m: Model, model: str, method: str, b: int, n: int, cards: dict[str, Card]) -> str:
    """For each card the plain steps that a round costs, and the speed-up; a dash where weights and KV do not fit."""
    make, accepted = METHODS[method]
    a = accepted.get(model, accepted[""])[0 if n <= 12_288 else 1 if n <= 49_152 else 2]
    needed, found = m.size * parameters(m) + b * n * m.layers * m.kv_bytes, []
    for card in cards.values():
        price = sum(often * seconds(cost, card) for often, cost in make(m, b, n, a))
        price /= seconds(forward(m, b, 1, n), card)
        found.append(f"{price:.2f}: {a / price:.2f}x" if needed <= card.memory else "-")
    return ", ".join(found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--config", type=Path, help="a model's config.json; without it, Llama-3.1-8B and Qwen3-8B")
    parser.add_argument("--bandwidth", type=float, help="GB/s of one card in place of H100 and A100, with --tflops")
    parser.add_argument("--tflops", type=float, help="its dense bfloat16 TFLOP/s")
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    o = parser.parse_args(arguments)
    if bool(o.bandwidth) != bool(o.tflops):
        parser.error("--bandwidth and --tflops are given together")
    cards = {"card": Card(1e9 * o.bandwidth, 1e12 * o.tflops)} if o.bandwidth else CARDS
    models = {o.config.parent.name: Model.from_config(json.loads(o.config.read_text()))} if o.config else MODELS
    tables = (("GB, GFLOP: ms", STEPS, step_cell), ("plain steps a round: speed-up", METHODS, method_cell))
    for model, m in models.items():
        print(f"\n{model}: {parameters(m):,} parameters, {m.layers * m.kv_bytes:,} bytes of KV a token")
        for title, names, cell in tables:
            print(f"\n| {title} ({', '.join(cards)}) | batch |", *(f"{n:,} tokens |" for n in o.context))
            print("|---|---|" + "---|" * len(o.context))
            for b, name in product(o.batch, names):
                print(f"| {name} | {b} |", *(f"{cell(m, model, name, b, n, cards)} |" for n in o.context))


if __name__ == "__main__":
    main()
