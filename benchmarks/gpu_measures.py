"""What benchmarks/gpu.py measures by itself: attention against the reference, kernels, steps of a large model."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import attention_triton as kernel_timing
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from longdraft.attention import dispatch, reference
from longdraft.attention.block import Block
from longdraft.errors import MemoryBudgetError
from longdraft.host import graphs
from longdraft.host.runner import Taps, TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.verify.schedule import verify_trees
from longdraft.verify.specpv import partial_view
from longdraft.views.cache import TrueCache

# How much of the time has to be over before a part begins nothing more.
SHARES = {"attention": 0.15, "methods": 0.4, "kernels": 0.55, "steps": 0.8, "end_to_end": 1.0}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """What is measured: the defaults on a GPU, :data:`SMALLEST` anywhere.

    Attributes:
        heads, kv_heads, head_dim: of the attention that is checked and timed.
        model: of the random Llama whose steps are timed.
        texts: contexts in tokens of what is decoded; tokens: new ones; samples: of each context.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    lengths: tuple[int, ...] = (0, 1000, 5001)
    rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    nodes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    budget: int = 2048
    model: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
        }
    )  # fmt: skip
    checked_texts: tuple[int, ...] = (1024,)
    texts: tuple[int, ...] = (1024, 4096, 7000)
    tokens: int = 128
    samples: int = 2
    repeats: int = 5


SMALLEST = Sizes(
    4, 2, 16, (0, 70, 130), (1, 5), (128, 384), (1, 4), 192,
    {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128},
    (192,), (128, 256), 8, 1, 1,
)  # fmt: skip


class Clock:
    """The time that there is. ``left_out``: what it did not suffice for."""

    def __init__(self, minutes: float) -> None:
        self._start, self._seconds = time.perf_counter(), 60 * minutes
        self.left_out: list[str] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def allows(self, part: str, what: str, portion: float = 1.0) -> bool:
        """Whether a part may begin another measurement; notes it where it may not.

        Args:
            portion: of the part's time; what is measured first must not take all of it.
        """
        before = max((share for share in SHARES.values() if share < SHARES[part]), default=0.0)
        if self.seconds < (before + portion * (SHARES[part] - before)) * self._seconds:
            self.say(f"{part}: {what}")
            return True
        self.left_out.append(f"{part}: {what}")
        return False

    def say(self, line: str) -> None:
        print(f"[{self.seconds:4.0f} s] {line}", file=sys.stderr, flush=True)


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Sets variables, and puts them back; None: unset."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def setups(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, dict[str, str | None]]:
    """Ways to run a target here, by name: the default path, and on a GPU Triton's without graphs and with them."""
    plain: dict[str, str | None] = {dispatch.ENVIRONMENT: None, graphs.SWITCH: None}
    with environment(**plain):
        found = {dispatch.choose(device, dtype, head_dim): plain}
    if device.type == "cuda" and dispatch.unavailable("triton", device, dtype, head_dim) is None:
        found["triton, no graphs"] = {dispatch.ENVIRONMENT: "triton", graphs.SWITCH: "0"}
        found["triton"] = {dispatch.ENVIRONMENT: "triton", graphs.SWITCH: None}
    return found


# --- attention ---


def attention_case(
    sizes: Sizes, lengths: tuple[int, ...], rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block, float]:
    """Arguments of an attention path: random q, keys and values, a tree of so many rows behind each prefix."""
    batch, capacity = len(lengths), max(lengths) + rows
    g = torch.Generator(device).manual_seed(rows)

    def randn(heads: int, n: int) -> torch.Tensor:
        return torch.randn(batch, heads, n, sizes.head_dim, generator=g, device=device, dtype=dtype)

    block = Block.make(range(batch), lengths, rows, kernel_timing.tree_mask(batch, rows), device)
    q, keys, values = randn(sizes.heads, rows), randn(sizes.kv_heads, capacity), randn(sizes.kv_heads, capacity)
    return q, keys, values, block, sizes.head_dim**-0.5


def paths(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, dispatch.Attend]:
    """The attention paths that run here, but for the reference."""
    found = {}
    for name in dispatch.PATHS:
        if name != "reference" and dispatch.unavailable(name, device, dtype, head_dim) is None:
            with environment(**{dispatch.ENVIRONMENT: name}):
                found[name] = dispatch.resolve(device, dtype, head_dim)[1]
    return found


def check_attention(sizes: Sizes, device: torch.device, clock: Clock) -> Rows:
    """Each path's largest difference from the reference, over all rows and prefixes of a batch."""
    found: Rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, attend in paths(device, dtype, sizes.head_dim).items():
            if not clock.allows("attention", f"{name}, {short(dtype)}"):
                continue
            errors = []
            for rows in sizes.rows:
                case = attention_case(sizes, sizes.lengths, rows, device, dtype)
                got, expected = attend(*case), reference.attend(*case)
                errors.append(float((got.float() - expected.float()).abs().max()))
            error = float("nan") if any(e != e for e in errors) else max(errors)
            found.append({"path": name, "dtype": short(dtype), "error": error, "right": error <= TOLERANCE[dtype]})
    return found


def time_kernels(sizes: Sizes, device: torch.device, clock: Clock) -> Rows:
    """Milliseconds of one layer's attention, by context, rows and path."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    attends = paths(device, dtype, sizes.head_dim)
    if not cuda:
        attends.pop("triton", None)  # an interpreter: there is nothing to time
    bandwidth = kernel_timing.copy_bandwidth() if cuda else None
    found: Rows = []
    for context in sizes.contexts:
        for rows in sizes.rows:
            if not clock.allows("kernels", f"{context:,} tokens, {rows} rows"):
                continue
            case = attention_case(sizes, (context,), rows, device, dtype)
            runs: dict[str, Callable[[], torch.Tensor]] = {
                name: lambda attend=attend, case=case: attend(*case)  # type: ignore[misc]
                for name, attend in attends.items()
            }
            for name in dispatch.CAPTURABLE if cuda else ():
                if name in runs:
                    runs[name]()  # Triton tunes
                    runs[f"{name} graph"] = kernel_timing.captured(runs[name])
            for name, ms in _milliseconds(runs, sizes.repeats, device).items():
                read = 2 * case[1].numel() * case[1].element_size()
                share = None if bandwidth is None else read / (ms / 1e3) / bandwidth
                found.append({"context": context, "rows": rows, "path": name, "ms": ms, "of_bandwidth": share})
    return found


def _milliseconds(runs: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median of each, in turn; GPU time where there is a GPU."""
    if device.type == "cuda":
        return kernel_timing.milliseconds(runs, 3 * repeats)
    return {name: _median_ms(run, repeats, 1, device) for name, run in runs.items()}


def _median_ms(call: Callable[[], Any], repeats: int, warm_up: int, device: torch.device) -> float:
    """Median time of a call as the host sees it, results waited for."""
    times = []
    for i in range(warm_up + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


# --- steps of a large model ---


def random_llama(sizes: Sizes, device: torch.device, context: int) -> PreTrainedModel:
    """A Llama with random weights, made on the device."""
    config = LlamaConfig(
        **sizes.model,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=context,
        initializer_range=0.2 if sizes is SMALLEST else 0.02,  # so that a tiny one does not repeat one token for ever
        tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def star(nodes: int) -> TokenTree:
    """A root with nodes - 1 children; a chain of two where there is one."""
    return TokenTree(tuple(range(nodes)), (-1, *[0] * (nodes - 1)))


@torch.inference_mode()
def time_steps(
    sizes: Sizes, device: torch.device, clock: Clock, skipped: dict[str, str], failed: dict[str, str]
) -> Rows:
    """Milliseconds of a forward, by setup, context and nodes; on a partial cache with ``sizes.budget`` too."""
    if not clock.allows("steps", "a model with random weights"):
        return []
    most = max(sizes.contexts) + 2 * max(sizes.nodes)
    model = random_llama(sizes, device, most)
    found: Rows = []
    ways = setups(device, model.dtype, sizes.head_dim)
    for i, (name, values) in enumerate(ways.items(), 1):
        with environment(**values):
            runner = TargetRunner(model)
            for context in sizes.contexts:
                if not clock.allows("steps", f"{name}, {context:,} tokens", i / len(ways)):
                    continue
                try:
                    found += _steps_at(runner, name, context, sizes, clock)
                except (MemoryBudgetError, torch.OutOfMemoryError) as error:
                    skipped[f"steps: {name}, {context:,} tokens"] = str(error)
                except Exception as error:  # one setup that breaks must not cost the figures of the others
                    failed[f"steps: {name}, {context:,} tokens"] = repr(error)
                give_back(device)
    return found


def _steps_at(runner: TargetRunner, name: str, context: int, sizes: Sizes, clock: Clock) -> Rows:
    nodes = max(sizes.nodes)
    full = runner.new_store(1, context + nodes)
    for tensor in (full.keys, full.values):
        for layer in tensor:
            layer.normal_()  # what a forward costs does not depend on what the keys say
    full.lengths[0] = context
    partial = TrueCache(full, runner.new_store, partial_view(sizes.budget), 2 * (nodes + 1))
    every = Taps(queries=tuple(range(full.shape.layers)))
    asked = verify_trees(runner, full, [0], [star(1)], taps=every).queries
    partial.choose(0, {layer: q[0] for layer, q in asked.items()})
    found: Rows = []
    for size in sizes.nodes:
        if not clock.allows("steps", f"{name}, {context:,} tokens, {size} nodes"):
            break
        row: dict[str, Any] = {"setup": name, "context": context, "nodes": size, "budget": sizes.budget}
        for kind, store in (("full", full), ("partial", partial.store)):
            row[f"{kind}_ms"] = _median_ms(
                lambda store=store, size=size: verify_trees(runner, store, [0], [star(size)], [context]),  # type: ignore[misc]
                sizes.repeats,
                graphs.USES + 2,
                runner.device,
            )
        found.append(row)
    return found


def give_back(device: torch.device) -> None:
    """Memory that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
