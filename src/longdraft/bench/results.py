"""The bench's results file: a run that was stopped goes on where it was. Format: docs/figures.md."""

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
_CACHE = "LONGDRAFT_CACHE"


def bench_header(
    bench: Bench, prompts: Sequence[Prompt], model: str, data: Sequence[str], limit: int | None
) -> dict[str, Any]:
    """A run's header: everything that its figures depend on, and remarks.

    Args:
        model, data, limit: as the user gave them.
    """
    s, target = bench.settings, bench.target
    tokens = hashlib.sha256()
    for prompt in prompts:
        tokens.update(json.dumps([prompt.sample.dataset, prompt.context, prompt.token_ids]).encode())
    ours = [name for name in s.contenders if name not in PEERS]
    alike = ("contexts", "batches", "max_tokens", "repeats", "seed", "raw", "asked", "ignore_eos", "cold")
    content = {
        "settings": {
            "contenders": bench.names,
            "options": {name: jsonable(s.options(name)) for name in ours},
            "plan": {name: s.plan_of(name) for name in ours},
            "exact": {c.name: c.is_comparable(s.sampling.greedy, 1) for c in bench.contenders.values()},
            **{name: getattr(s, name) for name in alike},
            "sampling": asdict(s.sampling),
            "offload": s.offload,
            "data": data,
            "limit": limit,
            # The package's switches; all but the place of its cache change how fast something is.
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("LONGDRAFT_") and k != _CACHE},
        },
        "model": model_entry(target, model),
        "drafts": {c.name: fingerprint(c.draft) for c in bench.contenders.values() if c.draft is not None},
        "prompts": tokens.hexdigest()[:16],
        **environment_info(),
        "notes": bench.notes,
    }
    return make_header(FORMAT, VERSION, content)


def unit_header(
    format_name: str, content: Mapping[str, Any], loaded: LoadedModel, name: str, tokens: Any
) -> dict[str, Any]:
    """All that records of :func:`longdraft.bench.experiment.of_units` depend on.

    Args:
        form: the format's name. content: settings. name: the model's. tokens: of the prompts, as JSON can hold them.
    """
    prompts = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    model = {"model": model_entry(TargetRunner(loaded.model), name), "prompts": prompts}
    return make_header(format_name, VERSION, {**content, **model, **environment_info()})


def model_entry(target: TargetRunner, name: str) -> dict[str, Any]:
    """The header's entry for a model, by the name the user gave."""
    return {
        "name": name,
        "dtype": str(target.kv_shape.dtype).removeprefix("torch."),
        "device": target.device.type,
        "weights": target.fingerprint,
    }
