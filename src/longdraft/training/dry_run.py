"""Estimates a training run by formula: GPU memory, tokens, steps and hours, from the target's ``config.json`` alone.

A weight costs 2 operations a token in the forward pass, 4 in the backward pass, and 2 more if its layer is recomputed.
Activation memory is proportional to tokens, hidden size and MLP size. The factors were fitted to training steps under
torch's FakeTensorMode; a test allows an error of a fifth.
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
from longdraft.training.features import PREFILL_CHUNK
from longdraft.training.losses import LOGITS_CHUNK

# Assumed share of a GPU's peak speed.
UTILIZATION = 0.4
# Assumed tokens of a run if the size of its data is unknown.
DEFAULT_TOKENS = 1e9
# Activation bytes of a token: of its output and of a layer, times the hidden size; of an MLP, times the MLP's size.
OUTPUT_BYTES, LAYER_BYTES, MLP_BYTES = 32, 20, 18
# Name -> (dense bfloat16 operations a second, bytes of memory), from the data sheets.
GPUS = {
    "a100": (312e12, 80e9), "b200": (2250e12, 180e9), "h100": (989e12, 80e9), "h200": (989e12, 141e9),
    "l40s": (362e12, 48e9), "rtx4090": (165e12, 24e9),
}  # fmt: skip


def estimate(kind: str, config: Any, gpu: str = "h100", gpus: int = 1, tokens: float | None = None) -> dict[str, Any]:
    """Estimates a run. Assumes that a draft in ``init`` has the sizes of a new one.

    Args:
        kind: the training command, such as "eagle3".
        gpus: number of GPUs, one for each process.
        tokens: tokens in the loss of the data, if the data are not in shards; None: unknown.

    Returns:
        ``memory_bytes`` of a GPU by part, ``total_bytes``, and whether the run ``fits``; ``draft_weights`` to train;
        ``draft_operations`` (forward and backward) and ``target_operations`` for a token in the loss; ``target_reads``,
        the target's passes over the data, per epoch; ``feature_bytes`` of a token on disk, and ``cache_bytes`` of all
        data (None: no cache); ``step_tokens`` of all GPUs; ``steps`` (None: unknown); ``hours`` for ``tokens``.

    Raises:
        ConfigError: the GPU is unknown, the target cannot be trained for, or the kind has no formula.
    """
    run: RunConfig = config
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is unknown: use one of {', '.join(GPUS)}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_target_config(run), dtype=torch.bfloat16)
    parts, kv = shared_parts.shared_parts(model, shared_parts.describe_config(model)), config_kv_shape(model)
    # h: hidden size; width: of all heads; m: size of the MLP; v: size of the draft's vocabulary
    h, width, kv_width = parts.hidden_size, parts.num_heads * kv.head_dim, 2 * kv.kv_heads * kv.head_dim
    m, vocab = run.intermediate_size or parts.intermediate_size, parts.head.shape[0]
    v = min(run.vocabulary or vocab, vocab)
    attention, mlp = h * (2 * width + kv_width), 3 * h * m
    eagle3_attention = attention + h * (width + kv_width)  # the input of Q, K and V is twice the hidden size
    steps, layers, rank = (getattr(config, name, 0) for name in ("ttt", "layers", "rank"))
    states = h * len(getattr(config, "feature_layers", ()) or (1, 2, 3))
    # (weights of layers, of a trained head, other weights, forwards of a token, attentions of each, size of features)
    drafts = {
        "longspec": (attention + 2 * h * width + mlp, 0, 0, 1, 2, kv_width),
        "eagle3": (eagle3_attention + mlp, v * h, states * h, steps, 1, states),
        "onepass": (eagle3_attention + mlp, v * (h + rank), states * h + v * rank, steps, 1, states),
        "eagle": (attention + mlp, 0, 2 * h * h, 1, 1, h),
        "lm": (layers * (attention + mlp), 0, 0, 1, layers, 0),
        "heads": (h * h, 0, 0, getattr(config, "heads", 0), 0, h),
    }
    if kind not in drafts:
        raise ConfigError(f"--dry-run has no formula for {kind}: run it with max_steps=2 instead.")
    layer_weights, head_weights, other_weights, forwards, attentions, feature_size = drafts[kind]
    length = min(run.max_length, hosting.context_length(model))
    batch_tokens = max(1, run.rows // length) * length
    keys = min(length / 2, getattr(config, "window", None) or length)
    # Attention: 4 operations for each query, key and unit of width in the forward pass, 10 in the backward pass.
    layer_operations = layer_weights * (8 if run.recompute else 6) + 14 * attentions * width * keys
    # The head: 2 operations for logits, 2 for the input's gradient, 2 for its own, 2 for the target's logits.
    head_operations = v * h * (4 + 2 * bool(head_weights) + 2 * bool(run.distill))
    operations = forwards * (layer_operations + head_operations) + 4 * other_weights
    weights = layer_weights * (forwards if kind == "heads" else 1) + head_weights + other_weights
    target_weights = sum(weight.numel() for weight in model.parameters())
    embedding = 0 if model.config.get_text_config().tie_word_embeddings else vocab * h
    has_last_state = kind in ("eagle", "heads") or kv.layers - 1 in getattr(config, "feature_layers", ())
    feature_size += h * bool(run.distill) * (not has_last_state)
    saved_tokens = batch_tokens * (1 if run.recompute else forwards) * max(1, attentions // 2)
    memory = {
        "target: weights": 2 * target_weights,
        "target: keys, values and states of a text":
        KVStore.bytes_for(kv, 1, max(2048, length)) + 2 * length * feature_size,
        "target: a forward, with logits": PREFILL_CHUNK * (2 * (8 * h + 3 * parts.intermediate_size) + 8 * vocab),
        "features": 2 * batch_tokens * feature_size,
        "draft: weights (float32)": 4 * weights,
        "draft: gradients": 4 * weights,
        "draft: optimizer (AdamW)": 8 * weights,
        "draft: between forward and backward": batch_tokens * forwards * OUTPUT_BYTES * h
        + saved_tokens * (LAYER_BYTES * h + MLP_BYTES * m * bool(attentions)) + 10 * LOGITS_CHUNK * v
        + 2 * weights + 4 * head_weights,
    }  # fmt: skip
    step_tokens, data_tokens = batch_tokens * run.accumulate * gpus, _data_tokens(run) or tokens
    num_steps = run.max_steps
    if data_tokens is not None:
        num_steps = min(max(1, round(data_tokens * run.epochs / step_tokens)), run.max_steps or 1 << 62)
    trained_tokens = DEFAULT_TOKENS if num_steps is None else num_steps * step_tokens
    target_reads = min(1.0, 1 / run.epochs) if run.cache is not None else 1.0
    feature_bytes = 2 * feature_size + 4 * (kind in ("eagle3", "onepass", "eagle"))  # 4: the target's argmax
    target_operations = 2 * (target_weights - embedding) + 2 * kv.layers * width * length
    (speed, gpu_bytes), total = GPUS[gpu], sum(memory.values())
    return {
        "memory_bytes": memory, "total_bytes": total, "fits": total <= gpu_bytes, "draft_weights": weights,
        "draft_operations": operations, "target_operations": target_operations, "target_reads": target_reads,
        "step_tokens": step_tokens, "feature_bytes": feature_bytes, "steps": num_steps, "tokens": trained_tokens,
        "cache_bytes": None if run.cache is None else round(trained_tokens / run.epochs * feature_bytes),
        "hours": trained_tokens * (operations + target_operations * target_reads) / (gpus * speed * UTILIZATION) / 3600,
        "gpu": gpu, "gpus": gpus, "utilisation": UTILIZATION,
    }  # fmt: skip


def _data_tokens(config: RunConfig) -> int:
    """Returns the number of tokens in the loss of the run's shards; 0 if the data are not in shards."""
    dataset = TokenDataset()
    for path in (path for source in config.data for path in shard_paths(Path(source))):
        dataset.add_shard_file(path)
    return round(config.sample * (1 - config.held_out) * (sum(dataset.lengths) - sum(dataset.starts)))


def _target_config(config: RunConfig) -> Any:
    """Returns the target's transformers config. A GGUF file is loaded to get its config."""
    target = config.target
    if target is None or target.endswith(".gguf"):
        return load(target).model.config
    try:
        return AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} has no config.json that transformers can read: {error}") from None
