"""A training run in a process of its own, which may be told to die: ``worker.py SETTINGS [MANNER [STEP]]``.

Manners: ``step`` dies by SIGKILL after a step, ``checkpoint`` in the middle of writing that step's checkpoint;
``fsdp`` shards with FSDP2, and one process is told to stop after a step if one is named.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shard() -> None:
    """accelerate shards on accelerators only; what it then does works on a CPU too."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from longdraft.training import session

    def sharding(**options) -> Accelerator:
        made = Accelerator(**options)
        PartialState._shared_state["distributed_type"] = made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap",
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
        if options["mixed_precision"] != "no":
            made.state.fsdp_plugin.set_mixed_precision(options["mixed_precision"])
        return made

    session.Accelerator = sharding


def main(settings: str, manner: str = "", step: str = "0") -> None:
    torch.set_num_threads(1)
    from longdraft.training import checkpoints
    from longdraft.training.config import Eagle3Config, HeadsConfig, LmConfig, TrainConfig
    from longdraft.training.eagle3 import train_eagle3
    from longdraft.training.heads import train_heads
    from longdraft.training.lm import train_lm
    from longdraft.training.longspec import train_longspec

    values = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(settings).items()}
    if "ttt" in values:
        reports = train_eagle3(Eagle3Config(**values), stop=lambda: bool(stop))
    elif "learn_prompts" in values:
        reports = train_lm(LmConfig(**values), stop=lambda: bool(stop))
    elif "heads" in values:
        reports = train_heads(HeadsConfig(**values), stop=lambda: bool(stop))
    else:
        reports = train_longspec(TrainConfig(**values), stop=lambda: bool(stop))
    if manner == "checkpoint":
        whole = checkpoints.save

        def cut(accelerator, folder, at, state, keep):
            if at == int(step):
                accelerator.save_state = lambda path, inner=accelerator.save_state: (inner(path), die())
            whole(accelerator, folder, at, state, keep)

        checkpoints.save = cut
    if manner == "fsdp":
        shard()
    stop = []
    for report in reports:
        if manner == "fsdp" and report.step == int(step) and os.environ["RANK"] == "1":
            stop.append(1)  # one process alone was told
        if manner == "step" and report.step == int(step):
            die()


if __name__ == "__main__":
    main(*sys.argv[1:])
