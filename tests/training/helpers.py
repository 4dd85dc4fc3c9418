"""Plain computations that the tests compare with, and runs in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from longdraft.drafters.longspec_block import LongSpecBlock
from longdraft.training.config import RunConfig
from longdraft.training.features import Features

WORDS = ["the", "rain", "in", "spain", "stays", "mainly", "plain", "and", "so", "it", "goes", "on", "old", "man", "sea"]
ROOT = Path(__file__).parents[2]


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q (Hq, T, d), k, v (Hkv, S, d), seen (T, S) bool -> (Hq, T, d); zeros where nothing is seen."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def plain_logits(block: LongSpecBlock, parts, document: Features, shift: int, head: torch.Tensor) -> torch.Tensor:
    """(L, V): the draft's logits at every row of a text, drafting at level ``shift``, with full masks."""
    length, window = len(document.tokens), block.shape.window
    at = torch.arange(length)
    behind = at[:, None] - at
    x = parts.embedding(document.tokens)
    cos, sin = parts.rotary(document.positions)
    hidden = block(
        x, cos, sin,
        lambda q, k, v: masked_attention(q, k, v, (behind >= 0) & (behind < window)),
        lambda q: masked_attention(q, document.keys, document.values, behind >= shift),
    )  # fmt: skip
    return hidden @ head.T


def checkpoint_tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    found = dict(load_file(folder / "model.safetensors"))
    state = torch.load(folder / "optimizer.bin", weights_only=True)["state"]
    return found | {f"{i}.{name}": t for i, s in state.items() for name, t in s.items()}


def losses_of(out: Path) -> list[float]:
    """The losses in the log of a run."""
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def run_elsewhere(config: RunConfig, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs :mod:`tests.training.worker` in a process of its own, or in several."""
    settings = {k: v for k, v in config.as_dict().items() if v is not None}
    command = [sys.executable, *launcher, "-m", "tests.training.worker", json.dumps(settings), *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
