"""An estimate of a run by formula: memory of a GPU, tokens, steps and hours, from the target's ``config.json`` alone.

A weight that takes part in a row's products costs 2 operations forward and 4 backward, and 2 more if the layer is
computed again. Memory between forward and backward is what a row keeps: some tens of numbers of the hidden size, and
some of the MLP's; the factors are those of steps under fake tensors, which a test runs. They are right to a fifth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.errors import ConfigError
from longdraft.memory.store import KVStore
from longdraft.model import hosting, shared_parts
from longdraft.model.layout import config_kv_shape
from longdraft.model.loading import load
from longdraft.training.config import RunConfig
from longdraft.training.dataset import TokenDataset, shard_paths
from longdraft.training.features import CHUNK
from longdraft.training.losses import LOGITS_CHUNK as LOGITS

# Share of a GPU's peak that training is taken to reach.
UTILIZATION = 0.4
# Tokens that hours are told for where the data are unknown.
DEFAULT_TOKENS = 1e9
# Bytes that a row keeps: of outputs, for each number of the hidden size; of a layer, for each of it and of the MLP's.
OUTPUT_BYTES, LAYER_BYTES, MLP_BYTES = 32, 20, 18
# Name -> bfloat16 operations a second without sparsity, and bytes of memory, as its maker describes it.
GPUS = {
    "a100": (312e12, 80e9), "b200": (2250e12, 180e9), "h100": (989e12, 80e9), "h200": (989e12, 141e9),
    "l40s": (362e12, 48e9), "rtx4090": (165e12, 24e9),
}  # fmt: skip


def estimate(kind: str, config: Any, gpu: str = "h100", gpus: int = 1, tokens: float | None = None) -> dict[str, Any]:
    """Estimates a run. A draft in ``init`` is taken to have the sizes of a new one.

    Args:
        kind: name of the command that trains it. gpus: processes of the run, one for each GPU.
        tokens: learned tokens of the data, where it is not in shards; None: unknown.

    Returns:
        ``memory_bytes`` on each GPU by part, ``total_bytes``, and whether it ``fits``; ``draft_weights`` that are
        trained; ``draft_operations`` (forward and backward) and ``target_operations`` of a learned token;
        ``target_reads``, how often the target reads the data; ``feature_bytes`` of a token on disk, and
        ``cache_bytes`` of all data (None without ``cache``); ``step_tokens``, of all GPUs; ``steps``, None if the data
        are unknown; ``hours`` for ``tokens``, which are then :data:`DEFAULT_TOKENS`.

    Raises:
        ConfigError: an unknown GPU, a target that is no model to train for, or a kind without a formula.
    """
    run: RunConfig = config
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known. Known are {', '.join(GPUS)}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_configuration(run), dtype=torch.bfloat16)
    parts, kv = shared_parts.shared_parts(model, shared_parts.describe_config(model)), config_kv_shape(model)
    h, width, read_kv = parts.hidden_size, parts.num_heads * kv.head_dim, 2 * kv.kv_heads * kv.head_dim
    vocabulary = parts.head.shape[0]
    m, v = run.intermediate_size or parts.intermediate_size, min(run.vocabulary or vocabulary, vocabulary)
    attention, mlp = h * (2 * width + read_kv), 3 * h * m
    wide = attention + h * (width + read_kv)  # the layer of EAGLE-3 reads twice the hidden size
    steps, layers, rank = (getattr(config, name, 0) for name in ("ttt", "layers", "rank"))
    read = h * len(getattr(config, "feature_layers", ()) or (1, 2, 3))
    # Weights of the layers that a row goes through, of a trained head, and others; how often a row goes through the
    # layers; attentions of a layer; numbers read of the target.
    drafts = {
        "longspec": (attention + 2 * h * width + mlp, 0, 0, 1, 2, read_kv),
        "eagle3": (wide + mlp, v * h, read * h, steps, 1, read),
        "onepass": (wide + mlp, v * (h + rank), read * h + v * rank, steps, 1, read),
        "eagle": (attention + mlp, 0, 2 * h * h, 1, 1, h),
        "lm": (layers * (attention + mlp), 0, 0, 1, layers, 0),
        "heads": (h * h, 0, 0, getattr(config, "heads", 0), 0, h),
    }
    if kind not in drafts:
        raise ConfigError(f"--dry-run has no formula for {kind}: run it with max_steps=2 instead.")
    layer, head, others, through, attentions, taps = drafts[kind]
    length = min(run.max_length, hosting.context_length(model))
    rows = max(1, run.rows // length) * length
    keys = min(length / 2, getattr(config, "window", None) or length)
    products = layer * (8 if run.recompute else 6) + 14 * attentions * width * keys
    said = v * h * (4 + 2 * bool(head) + 2 * bool(run.distill))
    operations = through * (products + said) + 4 * others
    weights = layer * (through if kind == "heads" else 1) + head + others
    own = sum(weight.numel() for weight in model.parameters())
    embedded = 0 if model.config.get_text_config().tie_word_embeddings else vocabulary * h
    own_last = kind in ("eagle", "heads") or kv.layers - 1 in getattr(config, "feature_layers", ())
    taps += h * bool(run.distill) * (not own_last)
    kept = rows * (1 if run.recompute else through) * max(1, attentions // 2)
    memory = {
        "target: weights": 2 * own,
        "target: keys, values and states of a text": KVStore.bytes_for(kv, 1, max(2048, length)) + 2 * length * taps,
        "target: a forward, with logits": CHUNK * (2 * (8 * h + 3 * parts.intermediate_size) + 8 * vocabulary),
        "features": 2 * rows * taps,
        "draft: weights (float32)": 4 * weights,
        "draft: gradients": 4 * weights,
        "draft: optimizer (AdamW)": 8 * weights,
        "draft: between forward and backward": rows * through * OUTPUT_BYTES * h
        + kept * (LAYER_BYTES * h + MLP_BYTES * m * bool(attentions)) + 10 * LOGITS * v + 2 * weights + 4 * head,
    }  # fmt: skip
    step, data, count = rows * run.accumulate * gpus, _tokens(run) or tokens, run.max_steps
    if data is not None:
        count = min(max(1, round(data * run.epochs / step)), run.max_steps or 1 << 62)
    learned = DEFAULT_TOKENS if count is None else count * step
    reads = min(1.0, 1 / run.epochs) if run.cache is not None else 1.0
    feature = 2 * taps + 4 * (kind in ("eagle3", "onepass", "eagle"))  # their likeliest tokens
    target, (speed, room) = 2 * (own - embedded) + 2 * kv.layers * width * length, GPUS[gpu]
    total = sum(memory.values())
    return {
        "memory_bytes": memory, "total_bytes": total, "fits": total <= room, "draft_weights": weights,
        "draft_operations": operations, "target_operations": target, "target_reads": reads, "step_tokens": step,
        "feature_bytes": feature, "cache_bytes": None if run.cache is None else round(learned / run.epochs * feature),
        "steps": count, "tokens": learned,
        "hours": learned * (operations + target * reads) / (gpus * speed * UTILIZATION) / 3600,
        "gpu": gpu, "gpus": gpus, "utilisation": UTILIZATION,
    }  # fmt: skip


def _tokens(config: RunConfig) -> int:
    """Learned tokens of the run's shards; 0 if it has none."""
    found = TokenDataset()
    for path in (path for place in config.data for path in shard_paths(Path(place))):
        found.add_shard_file(path)
    return round(config.sample * (1 - config.held_out) * (sum(found.lengths) - sum(found.starts)))


def _configuration(config: RunConfig) -> Any:
    """The target's configuration of transformers. A GGUF file's is known once it is loaded."""
    target = config.target
    if target is None or target.endswith(".gguf"):
        return load(target).model.config
    try:
        return AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} has no configuration that transformers reads: {error}") from None
