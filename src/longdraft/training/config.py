"""The settings of training runs: a class for each kind of draft. What they mean is said with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from longdraft.errors import ConfigError
from longdraft.training.settings import (
    BETAS,
    COUNT,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SHARE,
    STRETCH,
    check,
    setting,
    words,
)  # fmt: skip

# Levels that simulated acceptance drafts, whatever a draft was trained for.
DEPTH = 5


@dataclass(frozen=True)
class RunConfig:
    """What every training run can be told, with its default. Paths are relative to the working directory.

    Raises:
        ConfigError: a value outside its range.
    """

    data: tuple[str, ...] = setting((), "JSONL files (.gz, .xz): rows with text, messages or tokens; see `train data`")
    out: str = setting("draft", "folder of the run: checkpoints, log, and the draft in best and last")
    target: str | None = setting(None, "the target's folder, GGUF file or hub id; none: the embedded model")
    init: str | None = setting(None, "draft folder to go on from (a later stage); none starts afresh")
    sample: float = setting(1.0, "share of the documents to use, chosen by how they begin", SHARE)
    held_out: float = setting(0.02, "share of the documents kept for measuring, chosen by their content", SHARE)
    max_length: int = setting(1024, "tokens: longer texts are cut into pieces, chats at their end", COUNT)
    min_length: int = setting(32, "tokens: shorter documents are left out", COUNT)
    passages: bool = setting(False, "learn the passages too that answers are about, where their features were kept")
    anchor_offset: int = setting(0, "largest random offset of anchor-offset indices; 0: plain indices", NOT_NEGATIVE)
    intermediate_size: int | None = setting(
        None, "of the draft's MLP; none: the target's. A draft in init brings its own", COUNT
    )
    vocabulary: int | None = setting(
        None, "tokens that the draft can propose; none: all. A draft in init brings its own", COUNT
    )
    vocabulary_from: tuple[str, ...] = setting((), "JSONL files whose tokens it is counted on; none: data's")
    distill: float = setting(
        0.0, "share of the loss that follows the target's distribution; 0: cross-entropy alone (the paper)", SHARE
    )
    top: int = setting(8, "how many of the target's likeliest tokens are kept for that", COUNT)
    cache: str | None = setting(None, "folder for the target's features; none: the target runs in every epoch")
    target_dtype: str = setting("auto", "of the target", words("auto", "float32", "bfloat16", "float16"))
    target_rope_factor: float | None = setting(
        None, "YaRN's factor of the target, for texts longer than its context; none: as it is", STRETCH
    )
    precision: str = setting(
        "bf16", "of the draft's matrix products (no: float32); its weights are always float32", words("bf16", "no")
    )
    epochs: float = setting(1.0, "passes over the data; a fraction stops part of the way", POSITIVE)
    rows: int = setting(4096, "learned tokens in a batch (documents are packed)", COUNT)
    accumulate: int = setting(1, "batches a step and process", COUNT)
    lr: float = setting(5e-4, "peak of the learning rate", POSITIVE)
    warmup: float = setting(0.1, "share of the steps spent rising to it; a cosine leads down", SHARE)
    min_lr: float = setting(0.0, "share of the peak that is left at the end", SHARE)
    betas: tuple[float, ...] = setting((0.9, 0.95), "of AdamW", BETAS)
    eps: float = setting(1e-6, "of AdamW", NOT_NEGATIVE)
    weight_decay: float = setting(0.1, "of AdamW; norms and biases do not decay", NOT_NEGATIVE)
    clip: float = setting(1.0, "largest norm of the gradient", POSITIVE)
    seed: int = setting(0, "of initial weights, batches and offsets")
    save_every: int = setting(200, "steps between checkpoints; 0: at the end alone", NOT_NEGATIVE)
    measure_every: int = setting(200, "steps between measurements; 0: at the end alone", NOT_NEGATIVE)
    keep: int = setting(2, "checkpoints kept", COUNT)
    tensorboard: bool = setting(False, "also log to out/tensorboard")
    threads: int | None = setting(None, "of the CPU; none: torch's choice", COUNT)
    device: str | None = setting(None, "cpu, cuda, cuda:N, mps; none: the best there is, each process its own")
    fields_set: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values.pop("fields_set")
        return values


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """A LongSpec run."""

    noise: int = setting(
        5, "largest shift j of flash noisy training; 1 turns it off, five levels of drafting need 5", COUNT
    )
    window: int = setting(512, "keys that self-attention sees, the query's own included", COUNT)
    final_norm: bool = setting(True, "whether an RMSNorm stands before the head; the paper's block has none")


@dataclass(frozen=True)
class Eagle3Config(RunConfig):
    """An EAGLE-3 run. The target's theta, heads and their size are the draft's."""

    ttt: int = setting(5, "steps of the training-time test: how deep the draft drafts on its own outputs", COUNT)
    decay: float = setting(0.8, "weight of a step, against the one before", PART)
    retain: float = setting(
        1.0, "share of a batch's documents that goes on from a step to the next; less is cheaper", PART
    )
    feature_layers: tuple[int, ...] = setting(
        (), "decoder layers whose output is read (0: the first); none: 1, L//2-1 and L-4, or those of init"
    )
    window: int | None = setting(None, "keys of its own that the draft sees, a row's own included; none: all", COUNT)
    distill: float = setting(1.0, "share of the loss that follows the target's distribution", SHARE)
    rope_theta: float | None = setting(
        None, "base of the draft's rotary embedding; none: that of init, or the target's", POSITIVE
    )
    rope_factor: float | None = setting(
        None, "YaRN's factor in training; none: no stretching but what the draft in init brings", STRETCH
    )
    rope_factor_inference: float | None = setting(None, "the one to decode with; none: the same", STRETCH)
    rope_original_length: int | None = setting(
        None, "tokens, the length that is stretched; none: what init names or was trained for", COUNT
    )

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
    """A run that trains a one-pass draft. ``init`` may be an EAGLE-3 draft, or a one-pass draft."""

    ttt: int = setting(6, "tokens that one forward proposes; a one-pass draft in init brings its own", COUNT)
    rank: int = setting(128, "of the bigram; a one-pass draft in init brings its own", COUNT)


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """A run that distils a small language model. The target's heads and their size are the draft's."""

    layers: int = setting(3, "of the decoder; a draft in init brings its own, its sizes and its rotary base", COUNT)
    start_from: tuple[int, ...] | None = setting(
        None, "layers of the target, as many, whose weights a new draft starts from (0: the first); none: random"
    )
    learn_prompts: bool = setting(True, "learn an answer's prompt too, where both together fit max_length")
    rope_theta: float = setting(10000.0, "base of the draft's rotary embedding", POSITIVE)
    retrieval_layer: int | None = setting(
        None, "layer of the target (0: the first) that the folder will name for retrieval; none: the last", NOT_NEGATIVE
    )
    max_length: int = setting(
        1024, "tokens, the longest text that it will see while drafting; of a prompt and answer, the last", COUNT
    )
    distill: float = setting(0.8, "share of the loss that follows the target's distribution", SHARE)

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
    """A run that trains chained heads (TokenSwift, Wu et al. 2025)."""

    heads: int = setting(3, "how many; each says one token further. Those in init bring their own number", COUNT)
    decay: float = setting(1.0, "weight of a head, against the one before; 1 sums them all alike (the paper)", PART)
    lr: float = setting(
        2e-3, "peak of the learning rate, for heads that begin as large as the target's states (paper: 5e-3)", POSITIVE
    )
    weight_decay: float = setting(0.0, "of AdamW", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_offset:
            raise ConfigError("anchor_offset is for drafts with positions of their own; heads have none: leave it out.")
        if self.intermediate_size is not None:
            raise ConfigError("intermediate_size is of an MLP; heads have none: leave it out.")
