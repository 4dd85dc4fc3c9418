"""Settings of training runs, a class for each kind of draft, and how they are read from YAML and ``key=value``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from longdraft.errors import ConfigError, values_checked
from longdraft.files import errors_name, require_regular
from longdraft.options import Option, Options, declared, number, option

Config = TypeVar("Config")


PRESETS = Path(__file__).with_name("presets")
# Levels that simulated acceptance drafts, whatever number a draft was trained for.
EVAL_DEPTH = 5


@dataclass(frozen=True)
class RunConfig(Options):
    """The settings of every training run. Paths are relative to the working directory.

    Raises:
        ConfigError: a value is outside its range.
    """

    data: tuple[str, ...] = option((), help="files, folders of these, or folders of tokens; see docs/training.md")
    out: str = option("draft", help="folder of the run: checkpoints, log, and the draft in best and last")
    target: str | None = option(None, help="the target's folder, GGUF file or hub id; none: the embedded model")
    init: str | None = option(None, help="draft folder to continue from (a later stage); none: a new draft")
    sample: float = option(1.0, help="share of the documents to use, chosen by how they begin", min=0, most=1)
    held_out: float = option(0.02, help="share of the documents to measure on, chosen by how they begin", min=0, most=1)
    max_length: int = option(1024, help="tokens: longer texts are cut into pieces, chats at their end", min=1)
    min_length: int = option(32, help="tokens: shorter documents are left out", min=1)
    learn: str = option(
        "answers", help="of chats: the assistant's turns, or all from its first on", choices=("answers", "all")
    )
    chat_template: tuple[str, ...] = option((), help="settings of the chat template, as in enable_thinking=false")
    anchor_offset: int = option(0, help="largest random offset of anchor-offset indices; 0: plain indices", min=0)
    intermediate_size: int | None = option(None, help="size of the draft's MLP; none: the target's, or init's", min=1)
    vocabulary: int | None = option(None, help="tokens that the draft can propose; none: all, or init's", min=1)
    vocabulary_from: tuple[str, ...] = option((), help="files to count the vocabulary's tokens on; none: data")
    distill: float = option(0.0, help="share of the loss that follows the target's distribution", min=0, most=1)
    cache: str | None = option(None, help="folder for the target's features; none: the target runs in every epoch")
    target_dtype: str = option("auto", help="dtype of the target", choices=("auto", "float32", "bfloat16", "float16"))
    target_rope_factor: float | None = option(None, help="YaRN's factor for the target; none: as it is", min=1)
    precision: str = option("bf16", help="dtype of the draft's products (no: float32)", choices=("bf16", "no"))
    epochs: float = option(1.0, help="passes over the data; a fraction stops part of the way", above=0)
    max_steps: int | None = option(None, help="steps after which the run ends; none: with its epochs", min=1)
    rows: int = option(4096, help="learned tokens in a batch (documents are packed)", min=1)
    accumulate: int = option(1, help="batches per step and process", min=1)
    lr: float = option(5e-4, help="peak of the learning rate", above=0)
    warmup: float = option(0.1, help="share of the steps spent rising to the peak; a cosine leads down", min=0, most=1)
    min_lr: float = option(0.0, help="share of the peak that is left at the end", min=0, most=1)
    betas: tuple[float, ...] = option((0.9, 0.95), help="betas of AdamW", min=0, below=1, size=2)
    eps: float = option(1e-6, help="epsilon of AdamW", min=0)
    weight_decay: float = option(0.1, help="weight decay of AdamW; norms and biases do not decay", min=0)
    clip: float = option(1.0, help="largest norm of the gradient", above=0)
    seed: int = option(0, help="seed of initial weights, batches and offsets")
    save_every: int = option(200, help="steps between checkpoints; 0: only at the end", min=0)
    measure_every: int = option(200, help="steps between measurements; 0: only at the end", min=0)
    keep: int = option(2, help="checkpoints to keep", min=1)
    recompute: bool = option(False, help="compute the draft's layers again in the backward pass: less memory")
    track: tuple[str, ...] = option((), help="trackers of accelerate that get the figures too: tensorboard, wandb, ...")
    threads: int | None = option(None, help="CPU threads; none: torch's choice", min=1)
    device: str | None = option(None, help="cpu, cuda, cuda:N, mps; none: the best there is, a GPU for each process")
    fields_set: tuple[str, ...] = field(default=(), repr=False, compare=False)
    unused_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that this kind of draft has no use for."""

    def __post_init__(self) -> None:
        with values_checked(ConfigError):
            super().__post_init__()
        for name in self.unused_settings:
            if getattr(self, name):
                raise ConfigError(f"{name} is of no use to this kind of draft: leave it out.")
        _ = self.template_kwargs

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Further arguments of the chat template."""
        return parse_template_kwargs(self.chat_template)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "fields_set"}


@dataclass(frozen=True)
class LongSpecConfig(RunConfig):
    """A LongSpec run."""

    noise: int = option(5, help="largest shift j of flash noisy training: levels of drafting; 1 turns it off", min=1)
    window: int = option(512, help="keys that self-attention sees, the query's own included", min=1)
    final_norm: bool = option(True, help="put an RMSNorm before the head; the paper's block has none")


@dataclass(frozen=True)
class Eagle3Config(RunConfig):
    """An EAGLE-3 run. The draft has the target's head counts, head size and rotary base."""

    ttt: int = option(5, help="steps of the training-time test: how deep it drafts on its own outputs", min=1)
    decay: float = option(0.8, help="weight of a step relative to the step before it", above=0, most=1)
    retain: float = option(1.0, help="share of a batch's documents that goes on to the next step", above=0, most=1)
    feature_layers: tuple[int, ...] = option((), help="layers that it reads; none: 1, L//2-1 and L-4, or init's")
    window: int | None = option(None, help="keys that the draft sees, a row's own included; none: all", min=1)
    distill: float = option(1.0, help="share of the loss that follows the target's distribution", min=0, most=1)
    rope_theta: float | None = option(None, help="base of the draft's RoPE; none: init's, or the target's", above=0)
    rope_factor: float | None = option(None, help="YaRN's factor in training; none: as in init, else unused", min=1)
    rope_factor_inference: float | None = option(None, help="YaRN's factor in decoding; none: that of training", min=1)
    rope_original_length: int | None = option(None, help="tokens, the length that is stretched; none: init's", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_factor_inference is not None and self.rope_factor is None:
            raise ConfigError("rope_factor_inference needs rope_factor, the factor of training: give both.")
        if self.window is not None and self.window <= max(self.ttt, EVAL_DEPTH):
            raise ConfigError(
                f"window {self.window} must be more than the {max(self.ttt, EVAL_DEPTH)} steps of drafting."
            )


@dataclass(frozen=True)
class EagleConfig(RunConfig):
    """An EAGLE-1 run (Li et al. 2024, EAGLE). The draft has the target's head counts and vocabulary."""

    classification: float = option(0.1, help="weight of the cross-entropy beside the regression (its code)", min=0)
    feature_noise: float = option(0.1, help="states are moved by uniform noise of this size; 0: not", min=0)
    distill: float = option(1.0, help="share of the loss that follows the target's distribution", min=0, most=1)
    lr: float = option(3e-5, help="peak of the learning rate (its code: 3e-5)", above=0)
    clip: float = option(0.5, help="largest norm of the gradient", above=0)
    rope_theta: float | None = option(None, help="base of a new draft's RoPE; none: the target's", above=0)
    unused_settings = ("vocabulary",)


@dataclass(frozen=True)
class OnePassConfig(Eagle3Config):
    """A one-pass run. ``init`` may be an EAGLE-3 draft or a one-pass draft."""

    ttt: int = option(6, help="tokens that one forward proposes; a one-pass draft in init keeps its own", min=1)
    rank: int = option(128, help="rank of the bigram; a one-pass draft in init keeps its own", min=1)


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """A run that distils a small language model. The draft has the target's head counts and head size."""

    layers: int = option(3, help="decoder layers; a draft in init keeps its layers, sizes and rotary base", min=1)
    start_from: tuple[int, ...] | None = option(None, help="the target's layers to begin as; none: random weights")
    learn_prompts: bool = option(True, help="also learn an answer's prompt, if both together fit max_length")
    rope_theta: float = option(10000.0, help="base of the draft's rotary embedding", above=0)
    retrieval_layer: int | None = option(None, help="the target's layer that ranks chunks; none: the last", min=0)
    max_length: int = option(1024, help="tokens that it sees at once; of a longer prompt and answer, the end", min=1)
    distill: float = option(0.8, help="share of the loss that follows the target's distribution", min=0, most=1)
    unused_settings = ("anchor_offset",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_from is not None and self.init is not None:
            raise ConfigError("start_from makes a new draft and init continues one: give one of the two.")
        if self.start_from is not None and len(self.start_from) != self.layers:
            raise ConfigError(f"start_from names {len(self.start_from)} layers, but the draft has {self.layers}.")


@dataclass(frozen=True)
class HeadsConfig(RunConfig):
    """A run that trains chained heads (TokenSwift, Wu et al. 2025)."""

    heads: int = option(3, help="number of heads, one for each token ahead; those in init keep their number", min=1)
    decay: float = option(1.0, help="weight of a head relative to the head before it (paper: 1)", above=0, most=1)
    lr: float = option(2e-3, help="peak of the learning rate; heads begin as large as states (paper: 5e-3)", above=0)
    weight_decay: float = option(0.0, help="weight decay of AdamW", min=0)
    unused_settings = ("anchor_offset", "intermediate_size")


# --- reading ---


def parse_template_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Settings of a chat template of words name=value, whose values are YAML. Raises ConfigError for another form."""
    wrong = [word for word in words if not re.fullmatch(r"\w+=.*", word, re.S)]
    if wrong:
        raise ConfigError(f"chat_template takes name=value, as in enable_thinking=false, not {wrong[0]!r}.")
    try:
        return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    except yaml.YAMLError as error:
        raise ConfigError(f"chat_template: {error}") from None


def settings_table(config: type[Any]) -> list[tuple[str, str, str, str]]:
    """Name, default, values and meaning of a configuration's settings: those that its class adds or redefines first."""
    added = inspect.get_annotations(config)
    known = sorted(declared(config).values(), key=lambda each: each.name not in added)
    return [(each.name, each.default_in_words or "none", each.range, each.help) for each in known]


def read_config(path: Path | str | None, overrides: Sequence[str], config_class: type[Config]) -> Config:
    """A configuration of class ``config_class``, from a YAML file or a preset's name, and ``key=value`` overrides.

    Raises:
        ConfigError: an unreadable file, an unknown setting or a wrong value, which it names.
    """
    values = {} if path is None else _read_yaml(preset_path(path))
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value.")
        try:
            values[key.strip()] = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError:
            values[key.strip()] = text.strip()  # a path with a colon or the like
    with errors_name(path or ""):
        known = declared(config_class)
        if unknown := sorted(map(str, set(values) - {*known})):
            close = get_close_matches(unknown[0], known, n=1)
            advice = f"Did you mean {close[0]}? " if close else ""
            raise ConfigError(f"No setting {', '.join(unknown)}. {advice}Settings: {', '.join(sorted(known))}.")
        made: Any = config_class
        found: Config = made(**{n: _converted(known[n], v) for n, v in values.items()}, fields_set=tuple(values))
        return found


def preset_paths() -> dict[str, Path]:
    """The files of settings that come with the package, by name, such as "longspec/1-short"."""
    return {path.relative_to(PRESETS).with_suffix("").as_posix(): path for path in sorted(PRESETS.rglob("*.yaml"))}


def preset_path(path: Path | str) -> Path:
    """The file of settings that a path or a preset's name says. Raises ConfigError if there is none."""
    if Path(path).exists():
        return Path(path)
    name = Path(path).as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name in (known := preset_paths()):
        return known[name]
    close = get_close_matches(name, known, n=1)
    advice = (
        f"did you mean the preset {close[0]}?" if close else "check the path. `longdraft train presets` lists ours."
    )
    raise ConfigError(f"There is no configuration {path}: {advice}")


def _read_yaml(path: Path | str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(require_regular(Path(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: it takes lines of the form `key: value`.")
    return values


def _converted(each: Option, value: Any) -> Any:
    """YAML's value as the setting's kind, where it can be: YAML reads 5e-4 as text, 1e3 as a float, no as false."""
    if each.kind is tuple and value is not None:
        item = replace(each, kind=each.items)
        return tuple(_converted(item, one) for one in (value if isinstance(value, list) else [value]))
    if isinstance(value, bool):
        return "no" if "no" in each.choices and not value else value
    if each.kind is str:
        return value if value is None or isinstance(value, dict | list) else str(value)
    value = number(value) if isinstance(value, str) and each.kind in (int, float) else value
    if each.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return float(value) if each.kind is float and isinstance(value, int) and abs(value) < 2**53 else value
