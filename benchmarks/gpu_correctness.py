"""The stage of benchmarks/gpu.py that checks attention, graphs and the output of the exact methods."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import attention_case, filled, star
from gpu_common import (
    Sizes,
    can_be_recorded,
    device_of,
    environment,
    give_back,
    half_of,
    load,
    model_name,
    paths,
    random_llama,
    setups,
    short,
    sizes_of,
)
from gpu_results import Rows, Skipped, Stage
from gpu_texts import decode, exact_methods, prompts_of

from longdraft import Speculator
from longdraft.attention import dispatch, reference, scaled
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.engine.schedule import verify_trees
from longdraft.errors import LongdraftError
from longdraft.model import graphs
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner
from longdraft.native.scaled import Scaled

# Not a path: what serves keys and values in eight bits.
INT8 = "int8"
# Largest error of an attention whose outputs are of unit size.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def correctness(stage: Stage, options: argparse.Namespace) -> None:
    """Checks attention first, because every later check depends on it."""
    device, sizes = device_of(), sizes_of(options)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = paths(device, dtype, sizes.head_dim)
            if dispatch.scaled_unavailable(device, dtype, sizes.head_dim) is None:
                found[INT8] = scaled.or_scaled(reference.attend)
            for name, attend in found.items():
                for lengths in sizes.lengths:
                    unit = f"attention, {name}, {short(dtype)}, {', '.join(f'{n:,}' for n in lengths)}"
                    work = functools.partial(attention_error, name, attend, sizes, lengths, device, dtype)
                    stage.measure(unit, work)
                    give_back(device)
        for dtype in dict.fromkeys((torch.float32, half_of(device))):
            for name in paths(device, dtype, sizes.head_dim):
                unit = f"graphs, {name}, {short(dtype)}"
                stage.measure(unit, functools.partial(graph_errors, name, sizes, device, dtype))
                give_back(device)
    try:
        loaded = load(model_name(options), torch.float32)
    except (LongdraftError, ImportError) as error:
        reason = str(error)

        def missing() -> Rows:
            raise Skipped(f"{reason} (--model FOLDER)")

        stage.measure("exact methods", missing)
        return
    _exact(stage, loaded, sizes, options.smallest)
    for method in exact_methods(loaded.model) if device.type == "cuda" else ("all",):
        stage.measure(f"waits, {method}", functools.partial(waits, loaded, method, sizes))


# --- attention ---


def attention_error(
    name: str,
    attend: reference.Attend,
    sizes: Sizes,
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Rows:
    """The largest difference of a path from the float32 reference, over single rows, trees and chains."""
    errors, largest = [], 0.0
    for rows in sizes.rows:
        for chain in (False, True) if rows > 1 else (False,):
            q, keys, values, block, scale = attention_case(sizes, lengths, rows, device, dtype, chain)
            unpacked = keys.float(), values.float()
            if name == INT8:
                keys, values = Scaled.of(keys), Scaled.of(values)
                unpacked = keys.to(torch.float32), values.to(torch.float32)
            expected = reference.attend(q.float(), *unpacked, block, scale)
            error = (attend(q, keys, values, block, scale).float() - expected).abs().max()
            errors.append(float(error))
            largest = max(largest, float(expected.abs().max()))
    error = float("nan") if any(e != e for e in errors) else max(errors)
    said = ", ".join(f"{n:,}" for n in lengths)
    row = {"what": "attention", "path": name, "dtype": short(dtype), "lengths": said, "error": error}
    return [row | {"output": largest, "right": error <= TOLERANCE[dtype]}]


# --- graphs ---


def graph_errors(path: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Rows:
    """Compares logits of trees with and without CUDA graphs; it is an error if nothing was recorded."""
    if device.type == "cuda" and not can_be_recorded(path, device):
        raise Skipped("this path has no graphs")
    context = min(sizes.contexts)
    model = random_llama(sizes.small, sizes, device, dtype, 2 * context)

    def logits(switch: str | None) -> tuple[list[torch.Tensor], bool]:
        with environment(**{dispatch.ENVIRONMENT: path, graphs.SWITCH: switch}):
            runner = TargetRunner(model)
            store, found = filled(runner, context, max(sizes.nodes)), []
            for nodes in sizes.nodes:
                for _ in range(graphs.USES + 2):
                    out = verify_trees(runner, store, [0], [star(nodes)], [context])
                assert out.logits is not None
                found.append(out.logits.float().clone())
            return found, runner.graphs.recording

    (without, _), (with_graphs, recorded) = logits("0"), logits(None)
    rows: Rows = []
    for nodes, a, b in zip(sizes.nodes, without, with_graphs, strict=True):
        error, size = float((a - b).abs().max()), float(a.abs().max())
        right = error <= TOLERANCE[dtype] * max(1.0, size) and (recorded or device.type != "cuda")
        row = {"what": "graphs", "path": path, "dtype": short(dtype), "recorded": recorded, "nodes": nodes}
        rows.append(row | {"error": error, "right": right})
    return rows


# --- methods ---


def _exact(stage: Stage, loaded: LoadedModel, sizes: Sizes, raw: bool) -> None:
    """Compares each exact method, with its paper's trees, with ``ar``; the default attention path comes first."""
    runner = TargetRunner(loaded.model)
    device, head_dim = runner.device, runner.kv_shape.head_dim
    for setup, values in setups(device, loaded.model.dtype, head_dim).items():
        for method in exact_methods(loaded.model):
            stage.measure(
                f"exact, {setup}, {method}", functools.partial(exact, stage, loaded, sizes, raw, setup, values, method)
            )
            give_back(device)


def exact(
    stage: Stage, loaded: LoadedModel, sizes: Sizes, raw: bool, setup: str, values: dict[str, str | None], method: str
) -> Rows:
    """The bench's rows of one method; a difference that is not a near tie makes a row wrong."""
    settings = Settings(
        methods=(method,), max_tokens=sizes.tokens // 2, contexts=sizes.checked_texts, repeats=1, raw=raw,
        ignore_eos=True, cold=False, plan="fixed",
    )  # fmt: skip
    with environment(**values):
        groups = [(prompt,) for prompt in prompts_of(loaded, settings, sizes.samples)]
        rows = decode(stage, Bench(loaded, settings), groups, "exact", setup)
    return [row | {"right": not row["mismatches"]} for row in rows if row["method"] == method]


# --- waiting ---


def waits(loaded: LoadedModel, method: str, sizes: Sizes) -> Rows:
    """Number of waits for the GPU in a round of a method, counted by torch's warnings, with the planner on."""
    if device_of().type != "cuda":
        raise Skipped("it takes a GPU; tests/test_device_discipline.py counts what would wait")
    return [{"what": "waits", "method": method} | counted(loaded, method, sizes.tokens // 2)]


def counted(
    loaded: LoadedModel, method: str, tokens: int, switch: Callable[[str], Any] = torch.cuda.set_sync_debug_mode
) -> dict[str, Any]:
    """Number of rounds and mean waits in a round, without the first round.

    Args:
        switch: called with "warn" to have torch warn of whatever waits, and with "default" to end that.
    """
    spec = Speculator(method, target=loaded.model, tokenizer=loaded.tokenizer)
    prompt = loaded.tokenizer.encode("def wrap(text, width):\n    return text[:width]\n" * 8)
    run, found = spec.stream([prompt], max_new_tokens=tokens, eos_token_ids=[]), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        switch("warn")
        try:
            for step in run:
                if step.mode != "prefill":
                    found.append(sum("synchroniz" in str(w.message) for w in seen))
                seen.clear()
        finally:
            switch("default")
    later = found[1:]
    return {"rounds": len(later), "waits": sum(later) / len(later) if later else None}
