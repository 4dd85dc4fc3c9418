"""What cross-model retrieval costs (SpecExtend, table 4), by context length.

    python benchmarks/retrieval.py [--method specextend|specextend-eagle3|longspec] [--draft DIR]
        [--context 1024 2048 4096 8192] [--chunks N] [--nodes 50] [--threads N] [--repeats N]
        [--dtype bfloat16] [--json FILE]

The cache is filled with noise: what a forward costs does not depend on what the keys say. Milliseconds, medians of
runs that take turns:
    target    the target's forward over a tree of --nodes nodes, without and "with tap": the last layer's queries kept
    score     one row of last-layer attention, its chunk means, and the best chunks
    gather    the draft's working cache filled anew; "update" is score + gather
    draft     one draft forward (one token, the head included) on the working cache; "whole" on what it sees without
              retrieval
Without --context: 1K, 2K, 4K and so on, as far as the model's context goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import longdraft
from longdraft.bench import machine
from longdraft.drafters.eagle3 import Eagle3Drafter
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import NO_TAPS, Taps, TargetRunner
from longdraft.trees.tree import TokenTree

Retrieving = Eagle3Drafter | LongSpecDrafter | SmallLMDrafter


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def filled(runner: TargetRunner, length: int, rows: int, layers: tuple[int, ...]) -> KVStore:
    store = runner.new_store(1, length + rows, layers)
    for layer in range(store.shape.layers):
        for tensor in store.layer(layer):
            tensor.normal_()
    if store.features is not None:
        store.features.normal_()
    store.lengths[0] = length
    return store


def reading(make: Callable[..., Retrieving], runner: TargetRunner, store: KVStore, text: Sequence) -> Retrieving:
    """A drafter that has read the text; its trees are one token."""
    drafter = make()
    drafter.bind(runner, store)
    drafter.observe(Event(text, TokenTree((1,), (-1,)), mode="prefill"))
    return drafter


def drafted(drafter: Retrieving, text: Sequence) -> None:
    """One forward of the draft, over the root alone."""
    if isinstance(drafter, LongSpecDrafter):
        drafter.window.forget(text.slot, len(text.tokens) - 1)  # or the root would be there already
    drafter.propose([text])


def gathered(drafter: Retrieving, slot: int) -> None:
    if isinstance(drafter, LongSpecDrafter):
        assert drafter.retrieved is not None
        drafter.retrieved.read(slot)
    elif isinstance(drafter, SmallLMDrafter):
        drafter.cache.ready(slot, 1)
    else:
        drafter.cache.gather(slot)  # type: ignore[attr-defined]


@torch.inference_mode()
def measured(
    runner: TargetRunner, retrieving: Callable[..., Retrieving], plain: Callable[..., Retrieving], length: int,
    nodes: int, repeats: int,
) -> dict[str, Any]:  # fmt: skip
    device = runner.device
    text = Sequence(0, torch.randint(runner.vocab_size, (length,)).tolist(), 64, device)
    text.append(1)
    store = filled(runner, length, nodes + 64, retrieving().feature_layers(runner))
    drafter, whole = (reading(make, runner, store, text) for make in (retrieving, plain))
    assert drafter.retrieval is not None
    (layer,) = drafter.retrieval.layers(runner.kv_shape.layers)
    # A star: every node a child of the root; the mask costs what any tree's does.
    mask = torch.eye(nodes, dtype=torch.bool)[None].clone()
    mask[:, :, 0] = True
    shape = {} if nodes < 3 else {"depths": [[0, *[1] * (nodes - 1)]], "mask": mask}
    tokens = [list(range(nodes))]
    tapped = Taps(queries=(layer,))
    query = runner.forward(store.block([0], tokens, **shape), store, taps=tapped).queries[layer][0, :, 0]
    drafter.propose([text])
    calls: dict[str, Callable[[], Any]] = {
        "target": lambda: runner.forward(store.block([0], tokens, **shape), store, taps=NO_TAPS),
        "with_tap": lambda: runner.forward(store.block([0], tokens, **shape), store, taps=tapped),
        "score": lambda: drafter.observe(Event(text, TokenTree((1,), (-1,)), queries={layer: query[:, None]})),
        "gather": lambda: gathered(drafter, 0),
        "draft": lambda: drafted(drafter, text),
        "whole": lambda: drafted(whole, text),
    }
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(repeats + 1):  # the first one warms up
        drafter.retrieval.reset(0)  # time to score, and another choice than before
        if isinstance(drafter, SmallLMDrafter):
            drafter._cut(0, length)  # the root is to be fed again
        for name, call in calls.items():
            spent = milliseconds(call, device)
            if i:
                times[name].append(spent)
    median = {name: statistics.median(each) for name, each in times.items()}
    rows = len(drafter.retrieval.rows(0, length))
    return {"context": length, "working": rows, **median, "update": median["score"] + median["gather"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--method", default="specextend-eagle3", choices=["specextend", "specextend-eagle3", "longspec"]
    )
    parser.add_argument("--draft", help="draft folder; the shipped one by default")
    parser.add_argument("--context", type=int, nargs="+")
    parser.add_argument("--chunks", type=int, help="retrieved chunks; the method's own number by default")
    parser.add_argument("--nodes", type=int, default=50, help="rows of a verification")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = longdraft.load(options.model, dtype=options.dtype).model
    given = {"widths": (1,)} | ({"draft": options.draft} if options.draft else {})
    chunks: dict[str, Any] = {} if options.chunks is None else {"chunks": options.chunks}
    without = {"specextend-eagle3": "eagle3", "specextend": "small-lm"}.get(options.method, options.method)
    if options.method != "specextend":
        chunks["retrieval"] = True
    specs = [
        longdraft.Speculator(options.method, target=model, **chunks, **given),
        longdraft.Speculator(without, target=model, **given),
    ]
    runner = specs[0].runner()
    retrieving, plain = (spec.recipe().drafter for spec in specs)
    lengths = options.context or [n for n in (1024 << i for i in range(8)) if n + 64 <= runner.context_length]
    rows = [measured(runner, retrieving, plain, n, options.nodes, options.repeats) for n in lengths]  # type: ignore[arg-type]
    names = ("target", "with_tap", "score", "gather", "update", "draft", "whole")
    table = Table("context", "working", *(name.replace("_", " ") for name in names), box=None)
    for row in rows:
        table.add_row(f"{row['context']:,}", f"{row['working']:,}", *(f"{row[name]:.2f}" for name in names))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "hardware": machine.hardware()}, indent=2))


if __name__ == "__main__":
    main()
