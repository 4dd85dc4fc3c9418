"""Settings of training runs: a config class for each kind of draft, read from YAML and ``key=value`` arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from longdraft.errors import ConfigError, values_checked
from longdraft.files import file_errors, prefix_errors_with, require_regular
from longdraft.options import Option, Options, declared, option, parse_number, suggestion

Config = TypeVar("Config")

PRESETS = Path(__file__).with_name("presets")
# Drafted tokens of a round in simulated acceptance, whatever depth a draft is trained for.
EVAL_DEPTH = 5


@dataclass(frozen=True)
class RunConfig(Options):
    """The settings of every training run. Paths are relative to the working directory.
    Raises ConfigError if a value is outside its range."""

    data: tuple[str, ...] = option((), help="training data: files, folders of files, or folders of encoded tokens")
    out: str = option("draft", help="folder of the run: checkpoints, log, and the draft in best and last")
    target: str | None = option(None, help="the target model: folder, GGUF file or hub id; none: the embedded model")
    init: str | None = option(None, help="draft folder to continue training (a later stage); none: a new draft")
    sample: float = option(1.0, help="fraction of the documents to use, chosen by a hash", min=0, most=1)
    held_out: float = option(0.02, help="fraction of the documents kept to measure on, by a hash", min=0, most=1)
    max_length: int = option(1024, help="longest document in tokens: texts are split, chats lose their end", min=1)
    min_length: int = option(32, help="shortest document in tokens; shorter ones are left out", min=1)
    learn: str = option(
        "answers", help="chat tokens in the loss: answers, or all from the first answer", choices=("answers", "all")
    )
    chat_template: tuple[str, ...] = option((), help="arguments of the chat template, such as enable_thinking=false")
    anchor_offset: int = option(0, help="largest random offset (LongSpec, 3.2) of positions 4, 5, ...; 0: none", min=0)
    intermediate_size: int | None = option(None, help="width of the draft's MLP; none: the target's, or init's", min=1)
    vocabulary: int | None = option(None, help="size of the draft's vocabulary in tokens; none: all, or init's", min=1)
    vocabulary_from: tuple[str, ...] = option((), help="files to count token frequencies in; none: data")
    distill: float = option(0.0, help="share of the loss that distils the target's distribution", min=0, most=1)
    cache: str | None = option(None, help="folder that keeps the target's features; none: compute them in every epoch")
    target_dtype: str = option("auto", help="dtype of the target", choices=("auto", "float32", "bfloat16", "float16"))
    target_rope_factor: float | None = option(None, help="YaRN factor of the target; none: the model's own", min=1)
    precision: str = option("bf16", help="dtype of the draft's matmuls; no: float32", choices=("bf16", "no"))
    epochs: float = option(1.0, help="passes over the data; may be a fraction", above=0)
    max_steps: int | None = option(None, help="steps after which the run ends; none: no limit beside epochs", min=1)
    rows: int = option(4096, help="maximum number of tokens in the loss of a batch of documents", min=1)
    accumulate: int = option(1, help="batches per step and process (gradient accumulation)", min=1)
    lr: float = option(5e-4, help="peak learning rate", above=0)
    warmup: float = option(0.1, help="fraction of the steps with linear warm-up; then a cosine decay", min=0, most=1)
    min_lr: float = option(0.0, help="final learning rate as a fraction of the peak", min=0, most=1)
    betas: tuple[float, ...] = option((0.9, 0.95), help="betas of AdamW", min=0, below=1, size=2)
    eps: float = option(1e-6, help="epsilon of AdamW", min=0)
    weight_decay: float = option(0.1, help="weight decay of AdamW, except for norms and biases", min=0)
    clip: float = option(1.0, help="largest norm of the gradient; larger ones are scaled down", above=0)
    seed: int = option(0, help="random seed of initial weights, batches and offsets")
    save_every: int = option(200, help="steps between checkpoints; 0: only at the end", min=0)
    measure_every: int = option(200, help="steps between measurements; 0: only at the end", min=0)
    keep: int = option(2, help="number of checkpoints to keep", min=1)
    recompute: bool = option(False, help="recompute the draft's layers in the backward pass (gradient checkpointing)")
    track: tuple[str, ...] = option((), help="accelerate's trackers to log to: tensorboard, wandb, ...")
    threads: int | None = option(None, help="number of CPU threads; none: torch's default", min=1)
    device: str | None = option(None, help="cpu, cuda, cuda:N or mps; none: the best one, a GPU for each process")
    fields_set: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Names of the settings that the user set."""
    unused_settings: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that this kind of draft refuses."""

    def __post_init__(self) -> None:
        with values_checked(ConfigError):
            super().__post_init__()
        for name in self.unused_settings:
            if getattr(self, name):
                raise ConfigError(f"{name} does not apply to this kind of draft: leave it out.")
        _ = self.template_kwargs  # raises for malformed values

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        return parse_template_kwargs(self.chat_template)

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "fields_set"}


@dataclass(frozen=True)
class LongSpecConfig(RunConfig):
    """A LongSpec run."""

    noise: int = option(5, help="largest shift j of flash noisy training: the depth of drafts in tokens; 1: off", min=1)
    window: int = option(512, help="sliding window of self-attention in tokens, the query included", min=1)
    final_norm: bool = option(True, help="RMSNorm before the head; the paper's block has none")


@dataclass(frozen=True)
class Eagle3Config(RunConfig):
    """An EAGLE-3 run. The draft has the target's head counts, head size and rotary base."""

    ttt: int = option(5, help="TTT steps (training-time test), each on the draft's outputs of the step before", min=1)
    decay: float = option(0.8, help="weight of a TTT step in the loss, relative to the one before", above=0, most=1)
    retain: float = option(
        1.0, help="fraction of the documents that a TTT step keeps of the one before", above=0, most=1
    )
    feature_layers: tuple[int, ...] = option((), help="target layers to read, of L; none: 1, L//2-1 and L-4, or init's")
    window: int | None = option(None, help="sliding window in tokens, the query included; none: off", min=1)
    norm_output: bool = option(
        False, help="norm the outputs that the next TTT step reads (EAGLE-3.1); init keeps its own"
    )
    distill: float = option(1.0, help="share of the loss that distils the target's distribution", min=0, most=1)
    rope_theta: float | None = option(None, help="base of the draft's RoPE; none: init's, or the target's", above=0)
    rope_factor: float | None = option(None, help="YaRN factor in training; none: init's, or no YaRN", min=1)
    rope_factor_inference: float | None = option(None, help="YaRN factor in decoding; none: that of training", min=1)
    rope_original_length: int | None = option(None, help="context before YaRN, in tokens; none: init's", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_factor_inference is not None and self.rope_factor is None:
            raise ConfigError("rope_factor_inference needs rope_factor, the factor in training: set both.")
        if self.window is not None and self.window <= max(self.ttt, EVAL_DEPTH):
            raise ConfigError(
                f"window {self.window} must be larger than {max(self.ttt, EVAL_DEPTH)}, the number of tokens drafted "
                "in a round."
            )


@dataclass(frozen=True)
class EagleConfig(RunConfig):
    """An EAGLE-1 run (Li et al. 2024, EAGLE). The draft has the target's head counts and vocabulary."""

    classification: float = option(0.1, help="weight of the cross-entropy; the regression has 1 (EAGLE's code)", min=0)
    feature_noise: float = option(0.1, help="half-width of the uniform noise on the target's states; 0: none", min=0)
    distill: float = option(1.0, help="share of the loss that distils the target's distribution", min=0, most=1)
    lr: float = option(3e-5, help="peak learning rate (EAGLE's code: 3e-5)", above=0)
    clip: float = option(0.5, help="largest norm of the gradient; larger ones are scaled down", above=0)
    rope_theta: float | None = option(None, help="base of a new draft's RoPE; none: the target's", above=0)
    unused_settings = ("vocabulary",)


@dataclass(frozen=True)
class MtpConfig(RunConfig):
    """An MTP run. Without ``init``, the layer is the target's own, or a new one if the target has none."""

    ttt: int = option(3, help="TTT steps (training-time test), each on the layer's outputs of the step before", min=1)
    decay: float = option(0.8, help="weight of a TTT step in the loss, relative to the one before", above=0, most=1)
    distill: float = option(1.0, help="share of the loss that distils the target's distribution", min=0, most=1)
    lr: float = option(1e-4, help="peak learning rate", above=0)
    unused_settings = ("vocabulary", "intermediate_size")


@dataclass(frozen=True)
class DFlashConfig(RunConfig):
    """A DFlash run. A new draft has the target's head counts, head size and rotary base; init keeps its own."""

    layers: int = option(5, help="number of decoder layers", min=1)
    block_size: int = option(16, help="tokens of a block: the last known one, and those drafted by one forward", min=2)
    anchors: int = option(128, help="largest number of blocks of a document in a step, drawn anew each time", min=1)
    decay: float = option(0.87, help="weight of a token of a block, relative to the one before", above=0, most=1)
    feature_layers: tuple[int, ...] = option((), help="target layers to read, of L; none: 1, L//2-1 and L-4, or init's")
    distill: float = option(1.0, help="share of the loss that distils the target's distribution", min=0, most=1)


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """A run that distils a small language model. The draft has the target's head counts and head size."""

    layers: int = option(3, help="number of decoder layers; a draft in init keeps its layers and sizes", min=1)
    start_from: tuple[int, ...] | None = option(None, help="target layers to copy as the first weights; none: random")
    learn_prompts: bool = option(True, help="include prompts in the loss, if prompt and answer fit max_length")
    rope_theta: float = option(10000.0, help="base of the draft's RoPE", above=0)
    retrieval_layer: int | None = option(None, help="target layer whose attention ranks chunks; none: the last", min=0)
    max_length: int = option(1024, help="the draft's context in tokens; longer chats lose their beginning", min=1)
    distill: float = option(0.8, help="share of the loss that distils the target's distribution", min=0, most=1)
    unused_settings = ("anchor_offset",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_from is not None and self.init is not None:
            raise ConfigError("start_from makes a new draft, init continues one: set one of the two.")
        if self.start_from is not None and len(self.start_from) != self.layers:
            raise ConfigError(f"start_from names {len(self.start_from)} layers, but the draft has {self.layers}.")


@dataclass(frozen=True)
class HeadsConfig(RunConfig):
    """A run that trains chained heads (TokenSwift, Wu et al. 2025)."""

    heads: int = option(3, help="number of heads, one for each drafted token; init keeps its number", min=1)
    decay: float = option(1.0, help="weight of a head in the loss, relative to the one before", above=0, most=1)
    lr: float = option(2e-3, help="peak learning rate (paper: 5e-3)", above=0)
    weight_decay: float = option(0.0, help="weight decay of AdamW", min=0)
    unused_settings = ("anchor_offset", "intermediate_size")


def parse_template_kwargs(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses ``name=value``, with values in YAML, into arguments of a chat template. Raises ConfigError."""
    malformed = [argument for argument in arguments if not re.fullmatch(r"\w+=.*", argument, re.S)]
    if malformed:
        raise ConfigError(f"chat_template takes name=value, such as enable_thinking=false, not {malformed[0]!r}.")
    try:
        return {name: yaml.safe_load(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    except yaml.YAMLError as error:
        raise ConfigError(f"chat_template has a value that is not YAML: {error}") from None


def settings_table(config: type[Any]) -> list[tuple[str, str, str, str]]:
    """Returns (name, default, values, meaning) of each setting of a config class, inherited settings last."""
    class_settings = inspect.get_annotations(config)  # without inherited ones
    settings = sorted(declared(config).values(), key=lambda setting: setting.name not in class_settings)
    return [(x.name, x.default_in_words or "none", x.range_in_words, x.help) for x in settings]


def read_config(path: Path | str | None, overrides: Sequence[str], config_class: type[Config]) -> Config:
    """Makes a ``config_class`` from a YAML file or a preset's name, and ``key=value`` overrides.
    Raises ConfigError for an unreadable file, an unknown setting or a wrong value."""
    values = {} if path is None else _read_yaml(preset_path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not of the form key=value, such as lr=1e-4.")
        try:
            values[key.strip()] = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError:
            values[key.strip()] = text.strip()  # not YAML, such as a path with a colon
    with prefix_errors_with(path or ""):
        settings = declared(config_class)
        if unknown := sorted(map(str, set(values) - {*settings})):
            advice = suggestion(unknown[0], settings).capitalize()
            sentences = f"No setting {', '.join(unknown)}.", advice, f"Settings: {', '.join(sorted(settings))}."
            raise ConfigError(" ".join(filter(None, sentences)))
        converted = {name: _convert(settings[name], value) for name, value in values.items()}
        make: Any = config_class  # Config is any type, whose arguments a type checker does not know
        config: Config = make(**converted, fields_set=tuple(values))
        return config


def preset_paths() -> dict[str, Path]:
    """Returns the presets of the package: name, such as "longspec/1-short" -> YAML file."""
    return {path.relative_to(PRESETS).with_suffix("").as_posix(): path for path in sorted(PRESETS.rglob("*.yaml"))}


def preset_path(path: Path | str) -> Path:
    """Returns the YAML file at a path, or of the preset with this name. Raises ConfigError if there is none."""
    if Path(path).exists():
        return Path(path)
    name = Path(path).as_posix().removeprefix("configs/").removesuffix(".yaml")  # configs/: the older place of presets
    if name in (all_presets := preset_paths()):
        return all_presets[name]
    advice = suggestion(name, all_presets, "the preset ") or "check the path, or see `longdraft train presets`."
    raise ConfigError(f"There is no configuration {path}: {advice}")


def _read_yaml(path: Path | str) -> dict[str, Any]:
    with file_errors(path, f"{path} cannot be read as YAML", error_type=ConfigError):
        values = yaml.safe_load(require_regular(Path(path)).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: it takes lines of the form `key: value`.")
    return values


def _convert(setting: Option, value: Any) -> Any:
    """Converts a YAML value to the setting's type if possible: YAML reads 5e-4 as text, 1e3 as float, no as false."""
    if setting.kind is tuple and value is not None:
        element_setting = replace(setting, kind=setting.items)
        return tuple(_convert(element_setting, element) for element in (value if isinstance(value, list) else [value]))
    if isinstance(value, bool):
        return "no" if "no" in setting.choices and not value else value
    if setting.kind is str:
        return value if value is None or isinstance(value, dict | list) else str(value)
    value = parse_number(value) if isinstance(value, str) and setting.kind in (int, float) else value
    if setting.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    # Larger integers have no exact float.
    return float(value) if setting.kind is float and isinstance(value, int) and abs(value) < 2**53 else value
