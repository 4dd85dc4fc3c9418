"""The settings of a training run: a YAML file, overridden by ``key=value`` words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from longdraft.errors import ConfigError


@dataclass(frozen=True)
class TrainConfig:
    """Every setting, with its default. Paths are relative to the working directory.

    Attributes:
        data: JSONL files: rows with ``text``, ``messages`` or ``tokens`` (see ``longdraft train data``).
        out: folder of the run: checkpoints, log, and the draft.
        target: the target's folder or hub id; None is the embedded model.
        init: draft folder to start from (a later stage); None starts afresh.
        sample: share of the documents to use, chosen by how they begin.
        held_out: share of the documents kept for measuring, chosen by their content.
        max_length: longer documents are cut into pieces of this many tokens (chats: cut at the end).
        min_length: shorter documents are left out.
        anchor_offset: largest random offset of anchor-offset indices; 0 for plain indices.
        noise: largest shift j of flash noisy training; 1 turns it off. Five levels of drafting need 5.
        window: of self-attention, keys, the query's own included.
        intermediate_size: of the block's MLP; None takes the target's. A draft in ``init`` brings its own.
        final_norm: whether an RMSNorm stands before the head; the paper's block has none.
        vocabulary: size of the draft's vocabulary; None keeps the target's. A draft in ``init`` brings its own.
        vocabulary_from: JSONL files whose tokens that vocabulary is counted on; none takes ``data``'s.
        distill: share of the loss that follows the target's distribution; 0 is plain cross-entropy (the paper).
        top: how many of the target's likeliest tokens are kept for that.
        cache: folder for the target's features; None runs the target in every epoch.
        epochs: passes over the data; a fraction stops part of the way.
        target_dtype: "auto", "float32", "bfloat16" or "float16".
        precision: of the draft's matrix products, "bf16" or "no" (float32); its weights are always float32.
        rows: learned tokens in a batch (packed documents); accumulate: batches a step and process.
        lr, warmup, min_lr: peak, share of the steps spent rising to it, share of it left at the end (cosine between).
        betas, eps, weight_decay: of AdamW; norms and biases do not decay. clip: largest norm of the gradient.
        save_every, measure_every: steps; 0 does it at the end alone. keep: checkpoints kept.
        tensorboard: also log to ``out/tensorboard``.
        threads: of the CPU; None leaves torch's choice.
        device: None takes the best there is; with several processes, each its own.
    """

    data: tuple[str, ...] = ()
    out: str = "draft"
    target: str | None = None
    init: str | None = None
    sample: float = 1.0
    held_out: float = 0.02
    max_length: int = 1024
    min_length: int = 32
    anchor_offset: int = 0
    noise: int = 5
    window: int = 512
    intermediate_size: int | None = None
    final_norm: bool = True
    vocabulary: int | None = None
    vocabulary_from: tuple[str, ...] = ()
    distill: float = 0.0
    top: int = 8
    cache: str | None = None
    target_dtype: str = "auto"
    precision: str = "bf16"
    epochs: float = 1.0
    rows: int = 4096
    accumulate: int = 1
    lr: float = 5e-4
    warmup: float = 0.1
    min_lr: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-6
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_every: int = 200
    measure_every: int = 200
    keep: int = 2
    tensorboard: bool = False
    threads: int | None = None
    device: str | None = None
    fields_set: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        positive = (
            "max_length", "min_length", "rows", "accumulate", "noise", "window", "top", "keep", "lr", "epochs", "clip",
            "intermediate_size", "vocabulary", "threads",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("anchor_offset", "save_every", "measure_every", "eps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("sample", "held_out", "distill", "warmup", "min_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share between 0 and 1, got {getattr(self, name)}")
        if self.precision not in ("bf16", "no"):
            raise ConfigError(f"precision is bf16 or no, got {self.precision}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"betas are two numbers from 0 to below 1, got {self.betas}")

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values.pop("fields_set")
        return values


def read_config(path: Path | str | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A configuration from a YAML file and ``key=value`` overrides.

    Raises:
        ConfigError: naming the file or the word, and the keys there are.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no configuration {path}: check the path.") from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds no settings: it takes lines of the form `key: value`.")
        values.update(loaded)
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value.")
        try:
            values[key.strip()] = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError:
            values[key.strip()] = text.strip()  # a path with a colon or the like
    known = {f.name for f in dataclasses.fields(TrainConfig)} - {"fields_set"}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"No setting {', '.join(map(str, unknown))}. Settings: {', '.join(sorted(known))}.")
    hints = get_type_hints(TrainConfig)
    converted = {name: _converted(name, value, hints[name]) for name, value in values.items()}
    return TrainConfig(**converted, fields_set=tuple(values))


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _converted(name: str, value: Any, hint: Any) -> Any:
    """YAML's value as the setting's type: numbers written like 5e-4 are strings to YAML."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if value is None:
        if type(None) in kinds:
            return None
        raise ConfigError(f"{name} needs a value.")
    kind = next(k for k in kinds if k is not type(None))
    if name == "precision" and value is False:
        value = "no"  # which is how YAML reads it
    try:
        if get_args(kind):  # tuple[str, ...], tuple[float, ...]
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict | list | bool) or item is None for item in items):
                raise ValueError(value)
            return tuple(get_args(kind)[0](item) for item in items)
        if isinstance(value, bool) != (kind is bool) or isinstance(value, dict | list):
            raise ValueError(value)
        if kind is int and float(value) != int(float(value)):
            raise ValueError(value)
        if kind is float and float(value) != float(value):
            raise ValueError(value)
        return kind(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} takes {_KINDS.get(kind, 'a list of values')}, got {value!r}.") from None
