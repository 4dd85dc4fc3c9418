"""A training run in its own process, which can be killed at a step.

Manners: ``step`` dies by SIGKILL after a step, ``checkpoint`` in the middle of writing that step's checkpoint;
``fsdp`` shards with FSDP2, and one process is told to stop after a step if one is named.
"""

from __future__ import annotations

import json
import os
import signal

import torch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shard() -> None:
    """accelerate shards only on accelerators; this makes it shard on a CPU."""
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


def main(kind: str, settings: str, manner: str = "", step: str = "0") -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator

    from tests.training.helpers import TRAININGS, begun

    values = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(settings).items()}
    stop = []
    reports = begun(TRAININGS[kind].load_settings()(**values), lambda *what: None, lambda: bool(stop))
    if manner == "checkpoint":
        whole = Accelerator.save_state

        def cut(accelerator, path):
            whole(accelerator, path)
            if int(step) == int(path.rpartition("step-")[2].removesuffix(".part")):
                die()

        Accelerator.save_state = cut
    if manner == "fsdp":
        shard()
    for report in reports:
        if manner == "fsdp" and report.step == int(step) and os.environ["RANK"] == "1":
            stop.append(1)  # one process alone was told
        if manner == "step" and report.step == int(step):
            die()
