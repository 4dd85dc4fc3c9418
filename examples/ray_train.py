"""Training with Ray Train: Ray starts the processes of a cluster, and accelerate finds them in their environment.

Needs: pip install "longdraft[train]" "ray[train]"
Run with: python examples/ray_train.py WORKERS data=answers.jsonl target=MODEL out=DRAFT (all must see the same disk)
"""

import sys

import torch
from ray import train
from ray.train.torch import TorchTrainer

from longdraft.training.config import LongSpecConfig, read_config
from longdraft.training.longspec import train_longspec


def work(loop: dict[str, list[str]]) -> None:
    """Trains in each worker. A killed run that is started again continues from its last checkpoint in ``out``."""
    for report in train_longspec(read_config(None, loop["settings"], LongSpecConfig)):
        train.report({"step": report.step, "loss": report.loss, "tokens_per_second": report.tokens_per_second})


if __name__ == "__main__":
    workers, *settings = sys.argv[1:]
    scaling = train.ScalingConfig(num_workers=int(workers), use_gpu=torch.cuda.is_available())
    TorchTrainer(work, train_loop_config={"settings": settings}, scaling_config=scaling).fit()
