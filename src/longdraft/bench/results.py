"""Headers of results files. An interrupted run continues a file if the headers are equal. Format: docs/figures.md."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Prompt
from longdraft.bench.records import fingerprint, jsonable, make_header
from longdraft.bench.run import Bench
from longdraft.bench.tables import environment_info
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

FORMAT, VERSION = "longdraft-bench", 1
Json = dict[str, Any]
_IGNORED = "LONGDRAFT_CACHE"  # a folder; longdraft's other environment variables may change figures


def bench_header(bench: Bench, prompts: Sequence[Prompt], model: str, data: Sequence[str], limit: int | None) -> Json:
    """The header of a file of ``bench``: all that its figures depend on, and remarks.

    Args:
        model, data, limit: the options as the user wrote them.
    """
    s, target = bench.settings, bench.target
    prompts_digest = hashlib.sha256()
    for prompt in prompts:
        prompts_digest.update(json.dumps([prompt.sample.dataset, prompt.context, prompt.token_ids]).encode())
    methods = [name for name in s.contenders if name not in PEERS]
    copied = ("contexts", "batches", "max_tokens", "repeats", "seed", "raw", "ignore_eos", "cold")
    content = {
        "settings": {
            "contenders": bench.names,
            "options": {name: jsonable(s.options(name)) for name in methods},
            "plan": {name: s.plan_of(name) for name in methods},
            "exact": {c.name: c.is_comparable(s.sampling.greedy, 1) for c in bench.contenders.values()},
            **{name: getattr(s, name) for name in copied},
            "asked": dict(s.template_kwargs),
            "sampling": asdict(s.sampling),
            "offload": s.offload,
            "data": data,
            "limit": limit,
            "environment": {
                k: os.environ[k] for k in sorted(os.environ) if k.startswith("LONGDRAFT_") and k != _IGNORED
            },
        },
        "model": model_entry(target, model),
        "drafts": {c.name: fingerprint(c.draft) for c in bench.contenders.values() if c.draft is not None},
        "prompts": prompts_digest.hexdigest()[:16],
        **environment_info(),
        "notes": bench.notes,
    }
    return make_header(FORMAT, VERSION, content)


def unit_header(format_name: str, content: Mapping[str, Any], loaded: LoadedModel, name: str, tokens: Any) -> Json:
    """The header of a :func:`~longdraft.bench.experiment.unit_experiment`: all that its records depend on.

    Args:
        content: the settings.
        name: the model's name as the user wrote it.
        tokens: the prompts' token ids as a JSON value.
    """
    prompts = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    model = {"model": model_entry(TargetRunner(loaded.model), name), "prompts": prompts}
    return make_header(format_name, VERSION, {**content, **model, **environment_info()})


def model_entry(target: TargetRunner, name: str) -> dict[str, Any]:
    """The header's entry for a model. ``name``: as the user wrote it."""
    return {
        "name": name,
        "dtype": str(target.kv_shape.dtype).removeprefix("torch."),
        "device": target.device.type,
        "weights": target.fingerprint,
    }
