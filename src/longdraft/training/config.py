"""The settings of a training run: a YAML file, overridden by ``key=value`` words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from longdraft.errors import ConfigError

# Levels that simulated acceptance drafts, whatever a draft was trained for.
DEPTH = 5

Config = TypeVar("Config", bound="RunConfig")

# What a number must be, by the settings of all kinds of run.
_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "must be positive": (
        lambda x: x > 0,
        "max_length min_length rows accumulate top keep lr epochs clip intermediate_size vocabulary threads noise "
        "window ttt rank rope_theta rope_original_length layers heads",
    ),
    "must not be negative": (
        lambda x: x >= 0,
        "anchor_offset save_every measure_every eps weight_decay retrieval_layer",
    ),
    "is a share between 0 and 1": (lambda x: 0 <= x <= 1, "sample held_out distill warmup min_lr"),
    "is a share above 0, up to 1": (lambda x: 0 < x <= 1, "decay retain"),
    "stretches, so it is at least 1": (lambda x: x >= 1, "rope_factor rope_factor_inference"),
}


@dataclass(frozen=True)
class RunConfig:
    """What every training run can be told, with its default. Paths are relative to the working directory.

    Attributes:
        data: JSONL files: rows with ``text``, ``messages`` or ``tokens`` (see ``longdraft train data``).
        out: folder of the run: checkpoints, log, and the draft.
        target: the target's folder or hub id; None is the embedded model.
        init: draft folder to start from (a later stage); None starts afresh.
        sample: share of the documents to use, chosen by how they begin.
        held_out: share of the documents kept for measuring, chosen by their content.
        max_length: longer documents are cut into pieces of this many tokens (chats: cut at the end).
        min_length: shorter documents are left out.
        passages: learn the passages too that answers are about, where their features were kept.
        anchor_offset: largest random offset of anchor-offset indices; 0 for plain indices.
        intermediate_size: of the block's MLP; None takes the target's. A draft in ``init`` brings its own.
        vocabulary: size of the draft's vocabulary; None keeps the target's. A draft in ``init`` brings its own.
        vocabulary_from: JSONL files whose tokens that vocabulary is counted on; none takes ``data``'s.
        distill: share of the loss that follows the target's distribution; 0 is plain cross-entropy (the paper).
        top: how many of the target's likeliest tokens are kept for that.
        cache: folder for the target's features; None runs the target in every epoch.
        epochs: passes over the data; a fraction stops part of the way.
        target_dtype: "auto", "float32", "bfloat16" or "float16".
        target_rope_factor: YaRN's factor of the target, for texts longer than its context; None leaves it as it is.
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
    passages: bool = False
    anchor_offset: int = 0
    intermediate_size: int | None = None
    vocabulary: int | None = None
    vocabulary_from: tuple[str, ...] = ()
    distill: float = 0.0
    top: int = 8
    cache: str | None = None
    target_dtype: str = "auto"
    target_rope_factor: float | None = None
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
        for what, (right, names) in _RULES.items():
            for name in names.split():
                value = getattr(self, name, None)
                if isinstance(value, int | float) and not right(value):
                    raise ConfigError(f"{name} {what}, got {value}")
        if self.precision not in ("bf16", "no"):
            raise ConfigError(f"precision is bf16 or no, got {self.precision}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"betas are two numbers from 0 to below 1, got {self.betas}")

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values.pop("fields_set")
        return values


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """A LongSpec run.

    Attributes:
        noise: largest shift j of flash noisy training; 1 turns it off. Five levels of drafting need 5.
        window: of self-attention, keys, the query's own included.
        final_norm: whether an RMSNorm stands before the head; the paper's block has none.
    """

    noise: int = 5
    window: int = 512
    final_norm: bool = True


@dataclass(frozen=True)
class Eagle3Config(RunConfig):
    """An EAGLE-3 run. The target's theta, heads and their size are the draft's.

    Attributes:
        ttt: steps of the training-time test: how deep the draft drafts on its own outputs.
        decay: weight of a step, against the one before.
        retain: share of a batch's documents that goes on from a step to the next; less than 1 makes steps cheaper.
        feature_layers: decoder layers whose output the draft reads (0 is the first); none takes 1, L//2-1 and L-4. A
            draft in ``init`` brings its own.
        window: keys of its own that the draft sees, a row's own included; None for all.
        distill: here, all of the loss follows the target by default.
        rope_theta: base of the draft's rotary embedding; None takes that of the draft in ``init``, or the target's.
        rope_factor: YaRN's factor in training, None for no stretching but what the draft in ``init`` brings;
            rope_factor_inference: the one to decode with, None for the same. rope_original_length: the length that is
            stretched; None takes the one that the draft in ``init`` names, or was trained for.
    """

    ttt: int = 5
    decay: float = 0.8
    retain: float = 1.0
    feature_layers: tuple[int, ...] = ()
    window: int | None = None
    distill: float = 1.0
    rope_theta: float | None = None
    rope_factor: float | None = None
    rope_factor_inference: float | None = None
    rope_original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_factor_inference is not None and self.rope_factor is None:
            raise ConfigError("rope_factor_inference goes with rope_factor, the factor of training: give both.")
        if self.window is not None and self.window <= max(self.ttt, DEPTH):
            raise ConfigError(
                f"window {self.window} leaves nothing beside the {max(self.ttt, DEPTH)} steps of drafting: give more."
            )


@dataclass(frozen=True)
class OnePassConfig(Eagle3Config):
    """A run that trains a one-pass draft. ``init`` may be an EAGLE-3 draft, or a one-pass draft.

    Attributes:
        ttt: here, the tokens that one forward proposes. rank: of the bigram. A one-pass draft in ``init`` brings both.
    """

    ttt: int = 6
    rank: int = 128


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """A run that distils a small language model. The target's heads and their size are the draft's.

    Attributes:
        layers: of the decoder. A draft in ``init`` brings its own, as it does its sizes and its rotary base.
        start_from: layers of the target, as many, whose weights a new draft starts from (0 is the first); None:
            random weights.
        learn_prompts: learn the prompt of an answer too, where both together are shorter than ``max_length``.
        rope_theta: base of the draft's rotary embedding.
        retrieval_layer: decoder layer of the target, from 0, that the draft's folder will name for retrieval; None: the
            last, unless an option says otherwise.
        max_length: here, also the longest stretch of text that the draft will see while drafting. Of a prompt and an
            answer that are longer together, the last tokens are kept.
        distill: here, most of the loss follows the target by default.
    """

    layers: int = 3
    start_from: tuple[int, ...] | None = None
    learn_prompts: bool = True
    rope_theta: float = 10000.0
    retrieval_layer: int | None = None
    distill: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_offset:
            raise ConfigError("anchor_offset is for drafts that read the target: leave it out.")
        if self.start_from is not None and self.init is not None:
            raise ConfigError("start_from begins a new draft and init goes on with one: give one of the two.")
        if self.start_from is not None and len(self.start_from) != self.layers:
            raise ConfigError(
                f"start_from names {len(self.start_from)} layers for a draft of {self.layers}: name as many."
            )


@dataclass(frozen=True)
class HeadsConfig(RunConfig):
    """A run that trains chained heads (TokenSwift, Wu et al. 2025).

    Attributes:
        heads: how many; each says one token further. Those in ``init`` bring their own number.
        decay: weight of a head, against the one before; 1 sums them all alike (the paper).
        lr: of heads that begin as large as the target's states; the paper's 5e-3 is of others.
        weight_decay: here, none.
    """

    heads: int = 3
    decay: float = 1.0
    lr: float = 2e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_offset:
            raise ConfigError("anchor_offset is for drafts with positions of their own; heads have none: leave it out.")
        if self.intermediate_size is not None:
            raise ConfigError("intermediate_size is of an MLP; heads have none: leave it out.")


def read_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    kind: type[Config] = TrainConfig,  # type: ignore[assignment]
) -> Config:
    """A configuration from a YAML file and ``key=value`` overrides.

    Args:
        kind: of the run that it is for.

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
    known = {f.name for f in dataclasses.fields(kind)} - {"fields_set"}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"No setting {', '.join(map(str, unknown))}. Settings: {', '.join(sorted(known))}.")
    hints = get_type_hints(kind)
    converted = {name: _converted(name, value, hints[name]) for name, value in values.items()}
    return kind(**converted, fields_set=tuple(values))


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
