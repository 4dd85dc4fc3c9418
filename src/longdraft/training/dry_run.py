"""A dry run: one step of a training run under fake tensors, which have shapes and no numbers.

It counts the memory of every part and the floating-point operations of a step, from the target's configuration alone:
no weights, no GPU, seconds of one CPU core. The draft's own step is run as it is, with its loss and its backward pass;
the target's share is calculated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longdraft.drafts.kinds import Training
from longdraft.errors import ConfigError
from longdraft.memory.store import KVStore
from longdraft.model import hosting, shared_parts
from longdraft.model.layout import configured_shape
from longdraft.model.loading import load
from longdraft.training.batches import Schedule
from longdraft.training.config import RunConfig
from longdraft.training.corpus import Corpus, Documents, collect
from longdraft.training.documents import Skipped
from longdraft.training.features import CHUNK, GATHERED, TOGETHER, FeatureReader, Features
from longdraft.training.run_log import Report
from longdraft.training.session import Session, never, silent
from longdraft.training.tokens import Tokens, shards_of
from longdraft.training.trainee import Trainee

# Share of a GPU's peak that training is taken to reach.
UTILISATION = 0.4


@dataclass(frozen=True)
class GPU:
    """A GPU as its maker describes it: bfloat16 operations a second without sparsity, and bytes of memory."""

    operations: float
    memory: float


GPUS = {
    "a100": GPU(312e12, 80e9),
    "b200": GPU(2250e12, 180e9),
    "h100": GPU(989e12, 80e9),
    "h200": GPU(989e12, 141e9),
    "l40s": GPU(362e12, 48e9),
    "rtx4090": GPU(165e12, 24e9),
}


@dataclass(frozen=True)
class Estimate:
    """Memory, operations and steps of a run.

    Attributes:
        memory: bytes on each GPU, by part.
        draft_weights: numbers that are trained.
        draft, target: operations for a learned token: forward and backward of the draft, forward of the target.
        step_tokens: learned tokens of a step of all GPUs.
        steps: of the run; None if its data are unknown.
        reads: how many times the target reads the data.
    """

    memory: Mapping[str, int]
    draft_weights: int
    draft: float
    target: float
    step_tokens: int
    steps: int | None
    reads: float

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    def hours(self, tokens: float, gpu: GPU, gpus: int) -> float:
        """Hours for so many learned tokens, each epoch's counted."""
        operations = tokens * (self.draft + self.target * self.reads)
        return operations / (gpus * gpu.operations * UTILISATION) / 3600


@dataclass(frozen=True)
class DryRun(Session):
    """A session whose training is one step under fake tensors.

    Attributes:
        gpus: processes of the run.
        tokens: learned tokens of the data, where ``data`` is empty; None: unknown.
        found: receives the estimate.
    """

    gpus: int = 1
    tokens: float | None = None
    found: list[Estimate] = field(default_factory=list)

    def vocabulary(self) -> torch.Tensor | None:
        size = self.config.vocabulary
        return None if size is None or size >= self.runner.vocab_size else torch.arange(size)

    def train(
        self,
        trainee: Trainee,
        layers: tuple[int, ...] | None,
        *_: Any,
        keys: bool = False,
        **__: Any,
    ) -> Iterator[Report]:
        """Counts one step's memory and operations; yields no report."""
        run = self.config
        trainee.recompute = run.recompute
        length = min(run.max_length, self.runner.context_length)
        documents = [self._features(length, layers, keys) for _ in range(max(1, run.rows // length))]
        rows = sum(trainee.learned(length, 1, 1) for _ in documents)
        tracker, counter = MemTracker(), FlopCounterMode(display=False, custom_mapping=_ATTENTION)
        tracker.track_external(trainee)
        with tracker, counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=run.precision == "bf16"):
                loss = trainee.train()(documents, [1] * len(documents)).loss
            loss.backward()
        weights = sum(weight.numel() for weight in trainee.parameters())
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        sizes = {getattr(part, "value", part): size for part, size in peak.items()}
        between = sizes["Total"] - sizes["Parameter"] - sizes["Gradient"]
        held = sum(_bytes(t) for d in documents for t in d.tensors)
        ahead = int(not run.shard_target) if run.read_ahead is None else run.read_ahead
        memory = self._of_target(length, layers) | {
            "features, and those read ahead": held * (1 + ahead),
            "draft: weights (float32)": 4 * weights,
            "draft: gradients": 4 * weights,
            "draft: optimizer (AdamW)": 8 * weights,
            "draft: between forward and backward": between,
        }
        step = rows * run.accumulate * self.gpus
        reads = min(1.0, 1 / run.epochs) if run.cache is not None else 1.0
        per_row = counter.get_total_flops() / rows
        steps, target = self._steps(trainee, step), self._operations(length)
        self.found.append(Estimate(memory, weights, per_row, target, step, steps, reads))
        yield from ()

    def _features(self, length: int, layers: tuple[int, ...] | None, keys: bool) -> Features:
        """Fake features of a text that is learned from its second token on."""
        dtype, kv, size = self.product_dtype, self.runner.kv_shape, self.runner.parts.hidden_size
        reader = FeatureReader(self.runner, dtype, layers, keys, self.config.distill > 0)
        sizes, heads = {"hidden": (len(reader.layers) * size,), "last": (size,)}, (kv.kv_heads, kv.head_dim)
        rows = {name: torch.empty(length, *sizes.get(name, heads), dtype=dtype) for name in reader.names}
        tokens = torch.zeros(length, dtype=torch.long)
        return Features(tokens, 1, 0, rows, tokens[1:])

    def _of_target(self, length: int, layers: tuple[int, ...] | None) -> dict[str, int]:
        """Bytes of the target while it reads a text."""
        model, parts, kv = self.runner.model, self.runner.parts, self.runner.kv_shape
        taps = (len(layers or ()) + bool(self.config.distill)) * parts.hidden_size * kv.dtype.itemsize
        if self.config.shard_target:
            chunk = GATHERED
        else:
            chunk = TOGETHER if length <= CHUNK else CHUNK
        between = chunk * (8 * parts.hidden_size + 3 * parts.intermediate_size) * kv.dtype.itemsize
        weights = sum(map(_bytes, model.parameters()))
        found = {"target: weights": weights}
        if self.config.shard_target:
            each = [sum(map(_bytes, layer.parameters())) for layer in hosting.decoder_layers(model)]
            found["target: weights"] = weights - sum(each) + sum(each) // self.gpus
            # FSDP2 keeps a layer, and the buffers that it and the next one are gathered in.
            found["target: gathered layers"] = 3 * max(each)
        return found | {
            "target: keys, values and states of a text": KVStore.bytes_for(kv, 1, max(2048, length)) + length * taps,
            "target: a forward, with logits": between + 2 * 4 * chunk * self.runner.vocab_size,
        }

    def _operations(self, length: int) -> float:
        """Operations of the target for a token of a text: every weight but the embedding's, and causal attention."""
        model, parts, kv = self.runner.model, self.runner.parts, self.runner.kv_shape
        embedded = sum(weight.numel() for weight in parts.embedding.parameters())
        tied = model.config.get_text_config().tie_word_embeddings
        weights = sum(weight.numel() for weight in model.parameters()) - (0 if tied else embedded)
        return 2 * weights + 4 * kv.layers * parts.heads * kv.head_dim * length / 2

    def _steps(self, trainee: Trainee, step: int) -> int | None:
        run, documents = self.config, self.data.learned
        if len(documents):
            rows = [trainee.learned(n, at, 0) for n, at in zip(documents.lengths, documents.starts, strict=True)]
            return Schedule(rows, run.rows, 1, run.seed, run.epochs, self.gpus, run.accumulate, run.max_steps).steps
        if self.tokens is None:
            return run.max_steps
        steps = max(1, round(self.tokens * run.epochs / step))
        return min(steps, run.max_steps or steps)


def estimate(training: Training, config: RunConfig, gpus: int = 1, tokens: float | None = None) -> Estimate:
    """Estimates a run by one step under fake tensors.

    A draft in ``init`` is taken to have the sizes of a new one.

    Args:
        gpus: processes of the run, one for each GPU.
        tokens: learned tokens of the data, where it is not in shards; None: unknown.

    Raises:
        ConfigError: the target is no model that can be trained for, or the draft begins from numbers of the target.
    """
    found: list[Estimate] = []
    target, data = _configuration(config), _corpus(config)

    def opener(given: RunConfig) -> Session:
        # The session starts no processes, and encodes nothing.
        return DryRun(given, None, _runner(target), None, data, silent, never, gpus, tokens, found)

    config = replace(config, init=None, opener=opener)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the CPU's way of computing norms
        try:
            for _ in training.load_run()(config):
                pass
        except DataDependentOutputException:
            raise ConfigError(
                "--dry-run knows no numbers of the target, and this draft begins from them. Run it with max_steps: 2."
            ) from None
    return found[0]


def _corpus(config: RunConfig) -> Corpus:
    """The documents of the run's shards; none if it has none."""
    shards = [Tokens.mapped(path) for place in config.data for path in shards_of(Path(place))]
    if not shards:
        return Corpus(Documents(()), Documents(()))
    return collect(
        shards,
        Skipped(),
        max_length=config.max_length,
        min_length=config.min_length,
        shortest_learned=1,
        held_out=config.held_out,
        sample=config.sample,
    )


def _configuration(config: RunConfig) -> Any:
    """The target's configuration of transformers. A GGUF file's is known once it is loaded."""
    target = config.target
    if target is None or target.endswith(".gguf"):
        return load(target).model.config
    try:
        return AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} has no configuration that transformers reads: {error}") from None


def _runner(config: Any) -> Any:
    """Stands in for a runner of the target: sizes and fake weights, nothing that computes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kv = configured_shape(model)
    parts = shared_parts.shared_parts(model, shared_parts.sizes(model))
    return SimpleNamespace(
        model=model, parts=parts, kv_shape=kv, vocab_size=parts.head.shape[0], depth=kv.layers,
        device=torch.device("cpu"), context_length=hosting.context_length(model), eos_token_ids=frozenset(),
        recurrent=False,
    )  # fmt: skip


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pairs(q: Sequence[int], k: Sequence[int], window: int | None) -> int:
    """Query and key pairs of causal attention, times heads and head size; the last query sees the last key."""
    axis = 0 if len(q) == 3 else 2
    rows, keys = q[axis], k[axis]
    pairs = rows * (keys - rows) + rows * (rows + 1) // 2
    if window is not None:
        pairs = min(pairs, rows * (window + 1))
    return pairs * q[1] * q[-1]


def _forward(q: Any, k: Any, v: Any, *_: Any, window_size_left: int | None = None, **__: Any) -> int:
    return 4 * _pairs(q, k, window_size_left)  # two products


def _backward(up: Any, q: Any, k: Any, v: Any, *_: Any, window_size_left: int | None = None, **__: Any) -> int:
    return 10 * _pairs(q, k, window_size_left)  # five


# torch counts every pair, and nothing of the kernel for CPUs that fake tensors may take.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    torch.ops.aten._flash_attention_forward: _forward,
    torch.ops.aten._flash_attention_backward: _backward,
}
