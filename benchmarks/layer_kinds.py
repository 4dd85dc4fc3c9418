"""Measures a plain step and a verification of eight rows for each kind of layer, with our kernels and without them.

    python benchmarks/layer_kinds.py [--context 4096] [--layers 4] [--hidden 1024] [--repeats 15] [KIND ...]

A kind is a model of so many layers of that kind (the last is of full attention where it needs one), with random weights
in bfloat16, which are read as stored; the text before the rows is of random tokens.

    step       ms of a forward of one row, head included; the median of forwards of random tokens
    8 rows     seconds of a forward of a chain of eight rows, over those of a step
    no kernels the step in a process with LONGDRAFT_NATIVE=0, over the step
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from longdraft.bench import machine
from longdraft.model import stored
from longdraft.model.runner import TargetRunner
from longdraft.model.stored_experts import keep_experts

VOCABULARY, VERIFIED, PIECE = 4096, 8, 512
CHUNKS = {
    "layer_types": "chunked_attention", "attention_chunk_size": 2048, "moe_layers": [], "intermediate_size_mlp": 3072,
}  # fmt: skip
# Kind -> model type, and what its configuration needs; the sizes are those of the command line.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "windows": ("gemma3_text", {"layer_types": "sliding_attention", "sliding_window": 512}),
    "windows, caps": ("gemma2", {"layer_types": "sliding_attention", "sliding_window": 512}),
    "full, caps": ("gemma2", {"layer_types": "full_attention"}),
    "windows, sinks": ("gpt_oss", {"layer_types": "sliding_attention", "num_local_experts": 4}),
    "full, sinks": ("gpt_oss", {"layer_types": "full_attention", "num_local_experts": 4}),
    "chunks": ("llama4_text", CHUNKS),
    "gated DeltaNet": ("qwen3_5_text", {"layer_types": "linear_attention", "last": "full_attention"}),
    "Mamba-2": ("mamba2", {"num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1}),
    "short convolution": ("lfm2", {"layer_types": "conv", "last": "full_attention"}),
    "latent": ("deepseek_v3", {"first_k_dense_replace": 64}),
}  # fmt: skip


def network(kind: str, args: argparse.Namespace) -> PreTrainedModel:
    model_type, more = KINDS[kind]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers, "num_attention_heads": args.hidden // 64, "num_key_value_heads": 4,
        "head_dim": 64, "max_position_embeddings": 1 << 17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    given = sizes | more
    if isinstance(named := given.get("layer_types"), str):
        given["layer_types"] = [*[named] * (args.layers - 1), given.pop("last", named)]
    if model_type == "deepseek_v3":  # its heads' sizes have names of their own
        given = {k: v for k, v in given.items() if k not in ("head_dim", "num_key_value_heads")}
    config = CONFIG_MAPPING[model_type](**given)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02)
    keep_experts(model)  # as the loader does
    return stored.keep_stored(model.eval().requires_grad_(False))


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    model, tokens = network(kind, args), random.Random(0)
    runner = TargetRunner(model)
    store = runner.new_store(1, args.context + VERIFIED)

    def draw(rows: int) -> list[int]:
        return [tokens.randrange(3, VOCABULARY) for _ in range(rows)]

    for start in range(0, args.context, PIECE):
        rows = min(PIECE, args.context - start)
        runner.forward(store.block([0], [draw(rows)], prompt=True), store, logits="none")
        store.commit(0, range(rows))
    seconds: dict[int, list[float]] = {1: [], VERIFIED: []}
    for turn in range(args.repeats + 2):  # the first ones warm up
        for rows, found in seconds.items():
            block, begun = store.block([0], [draw(rows)]), time.perf_counter()
            runner.forward(block, store)
            if turn > 1:
                found.append(time.perf_counter() - begun)
    step = median(seconds[1])
    return {"step": 1000 * step, "rows": median(seconds[VERIFIED]) / step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    for name, value in (("context", 4096), ("layers", 4), ("hidden", 1024), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure(args.kinds[0], args)))
        return
    found = machine.hardware()
    print(f"{found['cpu']}, {found['threads']} threads; {args.layers} layers of {args.hidden}, {args.context} tokens\n")
    print("| layers | step, ms | 8 rows | no kernels |\n|---|---|---|---|")
    for kind in args.kinds:
        settings = [f"--{name}={getattr(args, name)}" for name in ("context", "layers", "hidden", "repeats")]
        command, cells = [sys.executable, __file__, kind, "--once", *settings], []
        for native in ("1", "0"):
            ended = subprocess.run(
                command, env=os.environ | {"LONGDRAFT_NATIVE": native}, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                sys.exit(f"{kind}: {ended.stderr}")
            cells.append(json.loads(ended.stdout.splitlines()[-1]))
        own, slow = cells
        print(f"| {kind} | {own['step']:.2f} | {own['rows']:.2f} | {slow['step'] / own['step']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
