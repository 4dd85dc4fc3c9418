"""Makes headers of results files (format: docs/figures.md). A run continues a file that has an equal header."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longdraft.bench import machine
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Prompt
from longdraft.bench.records import fingerprint, jsonable, make_header
from longdraft.bench.run import Bench
from longdraft.model.load.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

FORMAT, VERSION = "longdraft-bench", 1
Json = dict[str, Any]
# This environment variable names a folder and changes no figure. longdraft's other variables may.
_IGNORED_VARIABLE = "LONGDRAFT_CACHE"


def bench_header(bench: Bench, prompts: Sequence[Prompt], model: str, data: Sequence[str], limit: int | None) -> Json:
    """Makes the header of a file of ``bench``: everything that the figures depend on, and remarks.

    Args:
        model, data, limit: the options --model, --data and --limit as the user wrote them.
    """
    settings, target = bench.settings, bench.target
    prompts_digest = hashlib.sha256()
    for prompt in prompts:
        prompts_digest.update(json.dumps([prompt.sample.dataset, prompt.context, prompt.token_ids]).encode())
    methods = [name for name in settings.contenders if name not in PEERS]
    environment = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("LONGDRAFT_")}
    environment.pop(_IGNORED_VARIABLE, None)
    is_greedy = settings.sampling.greedy
    copied_settings = ("contexts", "batches", "max_tokens", "repeats", "seed", "raw", "ignore_eos", "cold")
    content = {
        "settings": {
            "contenders": bench.names,
            "options": {name: jsonable(settings.options(name)) for name in methods},
            "plan": {name: settings.plan_of(name) for name in methods},
            "exact": {name: contender.is_comparable(is_greedy, 1) for name, contender in bench.contenders.items()},
            **{name: getattr(settings, name) for name in copied_settings},
            "asked": dict(settings.template_kwargs),
            "sampling": asdict(settings.sampling), "offload": settings.offload,
            "data": data, "limit": limit, "environment": environment,
        },
        "model": model_entry(target, model),
        "drafts": {name: fingerprint(c.draft) for name, c in bench.contenders.items() if c.draft is not None},
        "prompts": prompts_digest.hexdigest()[:16],
        **machine.environment(), "notes": bench.notes,
    }  # fmt: skip
    return make_header(FORMAT, VERSION, content)


def unit_header(format_name: str, content: Mapping[str, Any], loaded: LoadedModel, name: str, tokens: Any) -> Json:
    """Makes the header of a :func:`~longdraft.bench.experiment.unit_experiment`: everything that the records depend on.

    Args:
        name: the model's name as the user wrote it.
        tokens: the token ids of the prompts, as a JSON value.
    """
    prompts_digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    inputs = {"model": model_entry(TargetRunner(loaded.model), name), "prompts": prompts_digest}
    return make_header(format_name, VERSION, {**content, **inputs, **machine.environment()})


def model_entry(target: TargetRunner, name: str) -> dict[str, Any]:
    """Makes the header's entry for a model. ``name``: the model's name as the user wrote it."""
    return {
        "name": name,
        "dtype": str(target.kv_shape.dtype).removeprefix("torch."),
        "device": target.device.type,
        "weights": target.fingerprint,
    }
