"""Measures what a verification of several rows costs on a mixture of experts, and how many experts it reads.

    python benchmarks/experts.py [--rows 1 2 4 8 16] [--layers 4] [--format Q4_0] [--experts 128] [--chosen 8]
        [--hidden 2048] [--inner 768] [--repeats 15]

The shape is that of Qwen3-30B-A3B, cut to a few layers and a small vocabulary, with random weights as a GGUF file has
them and a router that chooses. Each forward has other tokens. "One token" repeats one token in all rows, which are then
routed alike: what a verification would seem to cost without routing. Tokens of a real text are between the two.

    distinct experts   that a layer reads, on average; at most rows * chosen
    ms                 of a forward on 256 tokens of text, the median; and in plain steps (forwards of one row)
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from longdraft.bench import machine
from longdraft.model import stored
from longdraft.model.runner import TargetRunner
from longdraft.model.stored_experts import StoredExperts
from longdraft.native import Stored
from longdraft.native.dequantise import FORMATS

TEXT, VOCABULARY = 256, 4096
# A block's scale, a half before its numbers.
SCALES = {"Q4_0": 0.005, "Q8_0": 0.0003}


def blocks(outs: int, size: int, kind: str) -> Stored:
    """A random matrix whose weights are some hundredths."""
    weights, count, _ = FORMATS[kind]
    data = torch.randint(256, (outs, size // weights, count), dtype=torch.uint8)
    if kind == "Q4_0":  # a number of 0 stands for -8: without it the mean is 0, and rows do not become alike
        low, high = data & 15, data >> 4
        data = torch.where(low == 0, 8, low) | torch.where(high == 0, 8, high) << 4
    data[..., :2] = torch.tensor([SCALES[kind]], dtype=torch.float16).view(torch.uint8)
    return Stored(data.view(outs, -1), kind, int8=True)


def mixture(args: argparse.Namespace) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=args.inner, num_hidden_layers=args.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=args.experts,
        num_experts_per_tok=args.chosen, moe_intermediate_size=args.inner, norm_topk_prob=True, decoder_sparse_step=1,
        max_position_embeddings=4096,
    )  # fmt: skip
    with stored.without_memory():
        model = Qwen3MoeForCausalLM(config)
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        made: nn.Module
        if type(module) is nn.Linear:
            made = stored.StoredLinear(blocks(module.out_features, module.in_features, args.format))
        elif name.endswith("mlp.experts"):
            kinds = {
                "gate": (args.inner, args.hidden),
                "up": (args.inner, args.hidden),
                "down": (args.hidden, args.inner),
            }
            matrices = {k: blocks(args.experts * outs, size, args.format) for k, (outs, size) in kinds.items()}
            made = StoredExperts(module, matrices, {}, args.experts)
        else:
            continue
        setattr(model.get_submodule(parent), child, made)
    for name, weight in list(model.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        data = torch.randn(weight.shape) if weight.dim() > 1 else torch.ones(weight.shape)
        setattr(model.get_submodule(parent), leaf, nn.Parameter(data, requires_grad=False))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--format", choices=SCALES, default="Q4_0")
    for name, value in (("layers", 4), ("experts", 128), ("chosen", 8), ("hidden", 2048), ("inner", 768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokens = mixture(args), random.Random(0)
    chosen: list[int] = []
    runner = TargetRunner(model)
    store = runner.new_store(1, TEXT + max(args.rows))

    def draw(rows: int, alike: bool) -> list[int]:
        found = [tokens.randrange(VOCABULARY) for _ in range(rows)]
        return found[:1] * rows if alike else found

    def forward(rows: list[int]) -> float:
        start = time.perf_counter()
        runner.forward(store.block([0], [rows]), store)
        return time.perf_counter() - start

    runner.forward(store.block([0], [draw(TEXT, False)], prompt=True), store, logits="none")
    store.commit(0, range(TEXT))
    cases = [(rows, alike) for alike in (False, True) for rows in args.rows]
    seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(args.repeats + 1):  # all in turn; the first turn warms up
        for case in cases:
            seconds[case].append(forward(draw(*case)))

    def count(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        chosen.append(len(inputs[1].unique()))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(count)
    runner, distinct = TargetRunner(model), dict[int, float]()
    for rows in args.rows:
        chosen.clear()
        for _ in range(args.repeats):
            forward(draw(rows, False))
        distinct[rows] = mean(chosen)
    found = machine.hardware()
    print(f"{found['cpu']}, {found['threads']} threads, {runner.attention_path}\n")
    print("| rows | distinct experts | ms | plain steps | one token: ms | plain steps |\n|---|---|---|---|---|---|")
    times = {case: 1000 * median(found[1:]) for case, found in seconds.items()}
    for rows in args.rows:
        own = [times[rows, alike] for alike in (False, True)]
        plain = [times[args.rows[0], alike] for alike in (False, True)]
        cells = [f"{x:.1f} | {x / one:.2f}" for x, one in zip(own, plain, strict=True)]
        print(f"| {rows} | {distinct[rows]:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
