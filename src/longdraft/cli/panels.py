"""The panel of ``--help`` that an option is shown in, for all verbs. Options not named here come first."""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any, get_args, get_origin

from typer.models import OptionInfo

_PANELS = {
    "Sampling": (
        "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "foresee", "stop", "raw",
        "system", "think",
    ),
    "Draft and tree": ("draft", "option", "plan", "tree", "depth", "nodes", "widths", "tree_top_k", "threshold"),
    "Model and memory": (
        "dtype", "device", "weights", "arithmetic", "rope_factor", "threads", "offload", "kv_dtype",
        "deterministic", "kv_cache", "prefix_gib", "snapshots", "snapshot_gib",
    ),
    "Limits": ("queue", "timeout", "max_body", "allow_host", "allow_origin"),
    "Ray": ("ray", "replicas", "ray_config"),
    "Data": ("short", "limit", "preface", "split", "column"),
    "Peers": ("assistant", "gguf", "peers"),
    "Everything else": ("load", "composed", "debug", "profile"),
}  # fmt: skip
PANELS = {name: panel for panel, names in _PANELS.items() for name in names}


def placed(name: str, annotation: Any) -> Any:
    """A parameter's annotation, whose option knows its panel."""
    if name not in PANELS or get_origin(annotation) is not Annotated:
        return annotation
    kind, *rest = get_args(annotation)
    for i, part in enumerate(rest):
        if isinstance(part, OptionInfo):
            rest[i] = copy(part)  # it is other verbs' too
            rest[i].rich_help_panel = PANELS[name]
    parts = kind, *rest
    return Annotated[parts]
