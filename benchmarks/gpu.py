"""Times longdraft and transformers on a GPU, on a model of 8B's shape with random weights.

    python benchmarks/gpu.py [--out gpu-results] [--seconds 240] [--contexts 4096 16384 61440] [--only steps] [--tiny]

A configuration is an attention path, with CUDA graphs or without, with fused layers or without.

machine       the GPU, versions, bandwidth of a large copy
steps         milliseconds of a forward of 1, 16 and 64 tokens (a plain step, trees) at each context length; the same
              with KV in int8 and int4
transformers  the same tokens through the model's own forward with sdpa and a DynamicCache
rounds        milliseconds of a round of each method, and of a plain step; drafts are random, so acceptance is forced:
              --accepted nodes of a tree's path are accepted; with the methods' trees and, for the longest and the
              shortest context, with the planner's, and with graphs of levels and verifications in place of whole rounds
batches       the same rounds with a batch of eight sequences
products      milliseconds of a layer of 1, 16 and 64 tokens with quantised weights, and with weights in 16 bits
bounds        72 tokens in a store with memory for four times their context
offloaded     rounds with the KV in host memory
kernels       launches and longest kernels of a step without CUDA graphs, and of rounds, by torch's profiler

Each figure is written to OUT/gpu.json at once; a unit that fails is written with its error. The most important units
come first; those beyond --seconds are left out and named. With --tiny everything is small and runs on any device: a
rehearsal, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from longdraft import PromptCache, Speculator
from longdraft.bench import machine
from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafters.longspec import LongSpecBlock, LongSpecShape
from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.drafts import draft_folder
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.engine import loop
from longdraft.engine.accept import accept_path
from longdraft.engine.verifier import verify_trees
from longdraft.model.gpu import merged_linear
from longdraft.model.quant.planes import PlanesLinear, planes_of
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import describe_target
from longdraft.native.quantized_kv import INT4
from longdraft.native.quantized_matrix import QuantizedMatrix, quantize_blocks
from longdraft.trees.tree import TokenTree

EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
ROWS = (1, 16, 64)
BATCHES = (8,)
# Forwards of a size before it is timed; the third is captured as a CUDA graph.
WARM_UP = 5
SWITCHES = ("LONGDRAFT_ATTENTION", "LONGDRAFT_GRAPHS", "LONGDRAFT_FUSED")
# Attention path, graphs, fused layers; the default comes first.
CONFIGURATIONS = (
    [("hybrid", graphs, fused) for graphs, fused in ("11", "01", "10", "00")]
    if GPU
    else [("cpu", "1", "1"), ("sdpa", "1", "0")]
)
METHODS: dict[str, dict[str, Any]] = {
    "ar": {},
    "longspec": {"draft": "longspec"},
    "eagle3": {"draft": "eagle3"},
    "self": {},
    "specpv": {"draft": "eagle3", "drafter": "eagle3", "budget": 4096},
    "specextend-eagle3": {"draft": "eagle3"},
    "prompt-lookup": {},
}


class Run:
    """Measures units until the time is over. Writes each result at once."""

    def __init__(self, out: Path, seconds: float, only: list[str]) -> None:
        self.file, self.only, self.end = out / "gpu.json", only, time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def measure(self, what: str, work: Callable[[], dict[str, Any]], **unit: Any) -> None:
        row: dict[str, Any] = {"what": what, **unit}
        if self.only and what not in self.only:
            return
        if time.monotonic() > self.end:
            row["left_out"] = True
        else:
            begin = time.monotonic()
            try:
                row |= work()
            except Exception as error:  # the other units go on
                traceback.print_exc()
                row["failed"] = f"{type(error).__name__}: {error}"[:500]
            row["seconds"] = round(time.monotonic() - begin, 2)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "argv": sys.argv[1:], "rows": self.rows}))


@contextmanager
def switched(path: str, graphs: str, fused: str) -> Iterator[None]:
    """Sets a configuration by environment variables, as users do."""
    before = {name: os.environ.get(name) for name in SWITCHES}
    os.environ |= dict(zip(SWITCHES, (path, graphs, fused), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def median_ms(call: Callable[[], Any], repeats: int = 10, warm_up: int = WARM_UP) -> float:
    """Median milliseconds of a call by the host's clock, with synchronization."""
    times = []
    for i in range(warm_up + repeats):
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 3)


# --- the model and its drafts ---


def random_model(shape: dict[str, int], context: int) -> PreTrainedModel:
    """A Llama of random weights on the device, with merged projections as longdraft loads them."""
    config = LlamaConfig(
        **shape, max_position_embeddings=context, tie_word_embeddings=False, rope_theta=5e5,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)
    if GPU:
        merged_linear.join(model)
    return model


def random_drafts(model: PreTrainedModel, folder: Path) -> dict[str, Path]:
    """Folders of a LongSpec and an EAGLE-3 draft with random weights, at their papers' sizes."""
    c, target = model.config, describe_target(model)
    sizes = (c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    layers = [2, c.num_hidden_layers // 2, c.num_hidden_layers - 3]
    vocabulary = min(32000, c.vocab_size)
    with torch.device(DEVICE):
        longspec = LongSpecBlock(LongSpecShape(*sizes))
        eagle3 = Eagle3Block(Eagle3Shape(*sizes, 3 * c.hidden_size, vocabulary))
    common = {"trained_length": c.max_position_embeddings}
    rope = {
        "feature_layers": layers, "window": None, "rope_theta": 5e5, "rope_factor": None, "rope_factor_trained": None,
        "rope_original_length": c.max_position_embeddings,
    }  # fmt: skip
    for kind, block, more, kept in (
        ("longspec", longspec, common, None),
        ("eagle3", eagle3, common | rope, torch.arange(vocabulary)),
    ):
        for name, weight in block.named_parameters():
            weight.detach().normal_(0, 0.02) if "norm" not in name else weight.detach().fill_(1.0)
        weights = {name: t.cpu() for name, t in block.to(torch.bfloat16).state_dict().items()}
        config = asdict(block.shape) | more
        draft_folder.save(folder / kind, draft_folder.from_training(kind, config, weights, kept, target))
    return {kind: folder / kind for kind in ("longspec", "eagle3")}


# --- units ---


def about_the_machine() -> dict[str, Any]:
    found: dict[str, Any] = {"hardware": machine.hardware(), "versions": machine.versions()}
    if GPU:
        source = torch.empty(2**30, dtype=torch.int8, device=DEVICE)
        target = torch.empty_like(source)
        ms = median_ms(lambda: target.copy_(source))
        found["copy_bytes_per_second"] = round(2 * source.numel() / ms * 1e3)
    return found


def star(rows: int) -> TokenTree:
    """A root and its children. It costs as much as any other tree of that size."""
    return TokenTree(tuple(range(rows)), (-1, *[0] * (rows - 1)))


def steps(
    model: PreTrainedModel,
    context: int,
    kv_dtype: torch.dtype | None = None,
    rows: tuple[int, ...] = ROWS,
    room: int = 1,
) -> dict[str, Any]:
    """A forward of each number of tokens behind random keys and values (with ``kv_dtype``: whatever the memory has), in
    a store with memory for ``room`` times the context."""
    runner = TargetRunner(model, kv_dtype=kv_dtype)
    store = runner.new_store(1, room * context + max(rows))
    if kv_dtype is None:
        for tensor in (store.keys, store.values):
            for layer in tensor:
                layer.normal_()
    store.lengths[0] = context
    found: dict[str, Any] = {"path": runner.attention_path, "recorded": runner.graphs.enabled}
    found["fused"] = bool(runner.execution_model.fused.layers)
    for n in rows:
        found[f"rows_{n}_ms"] = median_ms(lambda n=n: verify_trees(runner, store, [0], [star(n)]))  # type: ignore[misc]
    return found


def products(shape: dict[str, int], name: str) -> dict[str, Any]:
    """A layer of the MLP of random weights in a format of GGUF, or in 16 bits."""
    size, out = shape["hidden_size"] // 32 * 32, shape["intermediate_size"]
    layer: torch.nn.Module = torch.nn.Linear(size, out, bias=False, dtype=DTYPE)
    if name != "16 bits":
        matrix = quantize_blocks(torch.randn(out, size), name)  # type: ignore[arg-type]
        sorted_planes = planes_of(QuantizedMatrix(matrix, name))
        assert sorted_planes is not None
        layer = PlanesLinear(sorted_planes)
    layer.to(DEVICE)
    inputs = {rows: torch.randn(rows, size, device=DEVICE, dtype=DTYPE) for rows in ROWS}
    return {f"rows_{rows}_ms": median_ms(lambda x=x: layer(x)) for rows, x in inputs.items()}  # type: ignore[misc]


def transformers_steps(model: PreTrainedModel, context: int) -> dict[str, Any]:
    """The model's own forward with sdpa: a chain of tokens behind random keys and values in a DynamicCache."""
    c, found = model.config, dict[str, Any]()
    model.set_attn_implementation("sdpa")
    for rows in ROWS:
        cache = DynamicCache(config=c)
        for layer in range(c.num_hidden_layers):
            k, v = torch.randn(2, 1, c.num_key_value_heads, context, c.head_dim, device=DEVICE, dtype=DTYPE)
            cache.update(k, v, layer)
        ids = torch.zeros(1, rows, dtype=torch.long, device=DEVICE)
        call = lambda cache=cache, ids=ids: model(ids, past_key_values=cache, use_cache=True).logits  # noqa: E731
        found[f"rows_{rows}_ms"] = median_ms(call, repeats=5, warm_up=2)
    return found


def rounds(
    spec: Speculator, prompt: list[int], tokens: int, cache: PromptCache | None = None, batch: int = 1
) -> dict[str, Any]:
    """Milliseconds and tokens of a round of the batch: medians without the first rounds."""
    run = spec.stream([prompt] * batch, batch=batch, max_new_tokens=tokens, eos_token_ids=[], cache=cache)
    steps = [step for step in run if step.mode != "prefill"]
    run.close()
    # The sequences are equal, so every round has a step of each.
    by_round = [steps[i : i + batch] for i in range(0, len(steps) - batch + 1, batch)]
    ms = [1e3 * sum(step.seconds for step in group) for group in by_round]
    emitted = [sum(len(step.token_ids) for step in group) for group in by_round]
    accepted, drafted = (
        [sum(getattr(s, name) for s in group) for group in by_round] for name in ("accepted", "drafted")
    )
    kept = slice(min(2 * WARM_UP, len(ms) // 2), None)
    return {
        "round_ms": round(statistics.median(ms[kept]), 3), "mean_ms": round(statistics.fmean(ms[kept]), 3),
        "tokens_a_round": round(statistics.fmean(emitted[kept]), 2), "drafted": statistics.fmean(drafted[kept]),
        "accepted": round(statistics.fmean(accepted[kept]), 2), "rounds": len(ms[kept]),
    }  # fmt: skip


def with_forced_acceptance(accept_path: Callable[..., Any], accepted: int) -> Callable[..., Any]:
    """:func:`longdraft.engine.accept.accept_path`, but ``accepted`` nodes of a tree are, if it is so deep."""

    def accept(tree: TokenTree, *args: Any) -> Any:
        *others, tokens = args
        path = tree.path(tree.depths.index(min(accepted, max(tree.depths))))
        for parent, node in itertools.pairwise(path):
            tokens[parent] = tree.tokens[node]
        return accept_path(tree, *others, tokens)

    return accept


@contextmanager
def by_levels() -> Iterator[None]:
    """Captures levels and verifications apart, as for trees without a fixed shape."""
    replay_round = BlockDrafter.replay_round
    BlockDrafter.replay_round = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockDrafter.replay_round = replay_round  # type: ignore[method-assign]


def profiled(call: Callable[[], Any], times: int = 1) -> dict[str, Any]:
    """Milliseconds, launches and the ten longest kernels of a call by torch's profiler, divided by ``times``."""
    kind = DeviceType.CUDA if GPU else DeviceType.CPU
    begin = time.perf_counter()
    with torch.profiler.profile() as seen:
        call()
        synchronize()
    events = [e for e in seen.events() if e.device_type == kind]
    spent: dict[str, list[float]] = {}
    for e in events:
        spent.setdefault(e.name[:60], []).append(e.time_range.elapsed_us() if GPU else e.self_cpu_time_total)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:10]
    return {
        "profiled_ms": round(1e3 * (time.perf_counter() - begin) / times, 3),
        "busy_ms": round(sum(map(sum, spent.values())) / 1e3 / times, 3), "launches": round(len(events) / times, 1),
        "longest": {name: [round(len(us) / times, 1), round(sum(us) / 1e3 / times, 3)] for name, us in longest},
    }  # fmt: skip


def kernels(model: PreTrainedModel, context: int, rows: int) -> dict[str, Any]:
    """The kernels of a forward of ``rows`` tokens."""
    runner = TargetRunner(model)
    store = runner.new_store(1, context + rows)
    store.lengths[0] = context
    call = lambda: verify_trees(runner, store, [0], [star(rows)])  # noqa: E731
    return {"wall_ms": median_ms(call)} | profiled(call)


def kernels_of_rounds(spec: Speculator, prompt: list[int], tokens: int, cache: PromptCache) -> dict[str, Any]:
    """The kernels of four rounds, after those that capture CUDA graphs."""
    run = spec.stream([prompt], max_new_tokens=tokens, eos_token_ids=[], cache=cache)
    steps = (step for step in run if step.mode != "prefill")
    ms = [1e3 * next(steps).seconds for _ in range(9)]
    found = profiled(lambda: [next(steps) for _ in range(4)], 4)
    run.close()
    return {"wall_ms": round(statistics.median(ms[5:]), 3)} | found


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not GPU and not options.tiny:
        print("No CUDA device. --tiny rehearses on any machine.", file=sys.stderr)
        return 2
    contexts = options.contexts or ([96, 192] if options.tiny else [4096, 16384, 61440])
    tokens = 64 if options.tiny else 96
    run = Run(options.out, options.seconds, options.only)
    run.measure("machine", about_the_machine)
    model = random_model(TINY if options.tiny else EIGHT_B, 2 * max(contexts))
    prompt = torch.randint(1000 if GPU else 100, (max(contexts),), generator=torch.Generator().manual_seed(0)).tolist()
    for switches, context in itertools.product(CONFIGURATIONS, contexts):
        with switched(*switches):
            unit = {"configuration": " ".join(switches), "context": context}
            run.measure("steps", partial(steps, model, context), **unit)
    for context, (name, kv_dtype) in itertools.product(contexts, {"int8": torch.int8, "int4": INT4}.items()):
        run.measure("steps", partial(steps, model, context, kv_dtype), configuration=name, context=context)
    middle = contexts[len(contexts) // 2]
    run.measure("bounds", partial(steps, model, middle, rows=(72,), room=4), context=middle)
    for name in ("16 bits", "Q4_0", "Q8_0"):
        shape = TINY if options.tiny else EIGHT_B
        run.measure("products", partial(products, shape, name), weights=name)
    for context in contexts:
        run.measure("transformers", partial(transformers_steps, model, context), context=context)
    for rows, switches in itertools.product(ROWS, CONFIGURATIONS):
        if switches[1] == "0" or not GPU:  # a replay shows no launches
            with switched(*switches):
                work = partial(kernels, model, contexts[0], rows)
                run.measure("kernels", work, rows=rows, configuration=" ".join(switches))
    with tempfile.TemporaryDirectory() as folder:
        drafts = random_drafts(model, Path(folder))
        loop.accept_path = with_forced_acceptance(accept_path, options.accepted)  # type: ignore[attr-defined]

        def options_of(method: str) -> dict[str, Any]:
            own = METHODS[method]
            return {**own, "draft": drafts[own["draft"]]} if "draft" in own else own

        for method, batch in itertools.product(("ar", "longspec", "eagle3"), BATCHES):
            chosen = options_of(method)

            def together(method: str = method, chosen: Any = chosen, batch: int = batch) -> dict[str, Any]:
                spec = Speculator(method, target=model, plan="fixed", **chosen)
                return rounds(spec, prompt[: contexts[0]], tokens, batch=batch)

            run.measure("batches", together, method=method, batch=batch, context=contexts[0])
        for switches, context in itertools.product(CONFIGURATIONS[:4], contexts):
            cache: PromptCache | None = None
            for method, measured in itertools.product(METHODS, (rounds, kernels_of_rounds)):
                if measured is kernels_of_rounds and switches != CONFIGURATIONS[0]:
                    continue
                chosen = options_of(method)

                def timed(
                    method: str = method, chosen: Any = chosen, context: int = context, measured: Any = measured,
                    plan: Any = "fixed",
                ) -> dict[str, Any]:  # fmt: skip
                    nonlocal cache
                    if cache is None:
                        eagle3 = Speculator("eagle3", target=model, draft=drafts["eagle3"])
                        cache = PromptCache(eagle3.feature_layers())
                    spec = Speculator(method, target=model, plan=plan, **chosen)
                    return measured(spec, prompt[:context], tokens, cache)

                with switched(*switches):
                    unit = {"configuration": " ".join(switches), "method": method, "context": context}
                    run.measure("rounds" if measured is rounds else "kernels of rounds", timed, **unit)
                    is_default = measured is rounds and switches == CONFIGURATIONS[0]
                    if is_default and method in ("longspec", "eagle3") and context in (contexts[0], contexts[-1]):
                        run.measure("rounds", partial(timed, plan="auto"), **unit, plan="auto")
                        with by_levels():
                            run.measure("rounds", timed, **unit, by_levels=True)
        for method in ("ar", "specpv") if GPU else ():  # the KV of a model on a CPU is in host memory already
            chosen = options_of(method)

            def offloaded(method: str = method, chosen: Any = chosen) -> dict[str, Any]:
                spec = Speculator(method, target=model, plan="fixed", offload="host", **chosen)
                return rounds(spec, prompt, tokens)

            run.measure("offloaded", offloaded, method=method, context=contexts[-1])
    failed = [row for row in run.rows if "failed" in row]
    left = sum("left_out" in row for row in run.rows)
    print(f"{len(run.rows) - len(failed) - left} measured, {len(failed)} failed, {left} left out: {run.file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
