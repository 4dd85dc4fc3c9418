"""Plain computations that the tests compare with, and runs in other processes."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from longdraft.drafters.longspec import LongSpecBlock
from longdraft.training.config import RunConfig
from longdraft.training.features import Features
from tests import elsewhere

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


class Ended(NamedTuple):
    """How a run in other processes ended: the first exit status that is not 0 (minus the signal), and what it said."""

    returncode: int
    stderr: str


def run_elsewhere(config: RunConfig, *arguments: str, processes: int = 1) -> Ended:
    """Runs :mod:`tests.training.worker` in a process of its own, or in several that train together."""
    settings = json.dumps({k: v for k, v in config.as_dict().items() if v is not None})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, f"{rank}") for rank in range(processes)]
        running = [
            elsewhere.start(said[rank], _worker, rank, processes, port, settings, *arguments)
            for rank in range(processes)
        ]
        codes = [elsewhere.ended(process, 300) for process in running]
        return Ended(next((code for code in codes if code), 0), "".join(path.read_text() for path in said))


def _worker(rank: int, processes: int, port: int, *arguments: str) -> None:
    if processes > 1:  # as torchrun says it
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {name: f"{number}" for name, number in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    from tests.training import worker

    worker.main(*arguments)
