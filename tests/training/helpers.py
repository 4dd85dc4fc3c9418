"""Reference computations, and runs of all kinds of draft, in this process or in others."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from longdraft.registry import KINDS
from longdraft.training.config import RunConfig
from longdraft.training.dataset import TokenDataset, TokenShard
from longdraft.training.documents import Document
from longdraft.training.loop import StepReport
from tests.support import elsewhere

WORDS = ["the", "rain", "in", "spain", "stays", "mainly", "plain", "and", "so", "it", "goes", "on", "old", "man", "sea"]
ROOT = Path(__file__).parents[2]
# The kinds of draft that are trained, by the name of their command.
TRAININGS = {t.command or kind.name: t for kind in KINDS.values() if (t := kind.training)}
_EAGLE3 = {"ttt": 3, "feature_layers": (0, 1, 2), "vocabulary": 40, "window": 12, "intermediate_size": 64}
# Settings that make each kind small.
SMALL: dict[str, dict[str, Any]] = {
    "longspec": {"window": 12, "intermediate_size": 64},
    "eagle3": _EAGLE3,
    "eagle": {"intermediate_size": 64, "lr": 3e-3},
    "mtp": {"lr": 3e-3},
    "dflash": {"layers": 2, "block_size": 4, "feature_layers": (0, 2), "intermediate_size": 64},
    "lm": {"layers": 2, "intermediate_size": 64},
    "tokenswift": {"lr": 2e-3},
}


def settings(kind: str, target: Path, data: Path, out: Path, **over: Any) -> RunConfig:
    """Settings of a run of a dozen steps in float32 on the CPU."""
    common = {
        "data": (str(data),), "target": str(target), "out": str(out), "max_length": 64, "min_length": 16, "rows": 256,
        "lr": 3e-3, "precision": "no", "held_out": 0.1, "save_every": 3, "measure_every": 5, "device": "cpu",
        "threads": 1,
    }  # fmt: skip
    config: RunConfig = TRAININGS[kind].load_settings()(**(common | SMALL[kind] | over))
    return config


def begun(config: RunConfig, *arguments: Any) -> Any:
    """Yields the reports of a run while it trains."""
    training = next(t for t in TRAININGS.values() if t.load_settings() is type(config))
    return training.load_run()(config, *arguments)


def steps(config: RunConfig) -> list[StepReport]:
    return list(begun(config))


def in_memory(documents: Iterable[Document]) -> TokenDataset:
    """Documents as a dataset in memory."""
    found = TokenDataset()
    found.add_shard(TokenShard.from_documents(documents))
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q (Hq, T, d), k, v (Hkv, S, d), mask (T, S) bool -> (Hq, T, d); zeros where all is masked."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def checkpoint_tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    state = torch.load(folder / "optimizer.bin", weights_only=True)["state"]
    moments = {f"{i}.{name}": t for i, s in state.items() for name, t in s.items()}
    return dict(load_file(folder / "model.safetensors")) | moments


def losses_of(out: Path) -> list[float]:
    """The losses in the log of a run."""
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


class Ended(NamedTuple):
    """The end of a run in other processes: the first exit status that is not 0 (minus the signal), and its output."""

    returncode: int
    stderr: str


def run_elsewhere(config: RunConfig, *arguments: str, processes: int = 1) -> Ended:
    """Runs :mod:`tests.training.worker` in a process of its own, or in several that train together."""
    kind = next(name for name, t in TRAININGS.items() if t.load_settings() is type(config))
    words = json.dumps({k: v for k, v in config.as_dict().items() if v is not None})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, f"{rank}") for rank in range(processes)]
        running = [
            elsewhere.start(output[rank], _worker, rank, processes, port, kind, words, *arguments)
            for rank in range(processes)
        ]
        codes = [elsewhere.wait_for_exit(process, 300) for process in running]
        return Ended(next((code for code in codes if code), 0), "".join(path.read_text() for path in output))


def _worker(rank: int, processes: int, port: int, *arguments: str) -> None:
    if processes > 1:  # as torchrun says it
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {name: f"{number}" for name, number in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    from tests.training import worker

    worker.main(*arguments)
