"""Estimates a training run by formula: GPU memory, tokens, steps and hours, from the target's ``config.json`` alone.

A weight costs 2 operations a token in the forward pass (a multiplication and an addition), 2 for the input's gradient,
2 for the weight's gradient, and 2 more if the backward pass recomputes the layer. Activation memory is proportional
to tokens, hidden size and MLP size. The factors marked as fitted come from training steps under torch's FakeTensorMode;
a test allows an error of a fifth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.errors import ConfigError
from longdraft.memory.store import KVShape
from longdraft.model import shared_parts
from longdraft.model.layout import config_kv_shape
from longdraft.model.load.loading import load
from longdraft.model.model_parts import context_length
from longdraft.training.config import RunConfig
from longdraft.training.dataset import TokenDataset, shard_paths
from longdraft.training.features import MIN_STORE_TOKENS, PREFILL_CHUNK
from longdraft.training.losses import LOGITS_CHUNK

# Assumed share of a GPU's peak speed.
UTILIZATION = 0.4
# Assumed tokens of a run if neither shards, nor --tokens, nor max_steps tell the number.
DEFAULT_TOKENS = 1e9
# Fitted bytes of a token's activations until the backward pass.
OUTPUT_BYTES = 32  # of a forward's output, for each element of the hidden size
LAYER_BYTES, MLP_BYTES = 20, 18  # of a layer, for each element of the hidden size and of the MLP size
# Number of (tokens, hidden) and (tokens, MLP) tensors alive at the peak of a target layer's forward (fitted).
TARGET_HIDDEN_TENSORS, TARGET_MLP_TENSORS = 8, 3
# Bytes of a logit: of the target, float32 and a copy; of the draft, the buffers of losses.py (bfloat16, 2 * float32).
TARGET_LOGIT_BYTES, DRAFT_LOGIT_BYTES = 4 + 4, 2 + 4 + 4
# Kinds whose features contain the target's argmax, an int32 for each token.
KINDS_WITH_ARGMAX, ARGMAX_BYTES = ("eagle3", "eagle"), 4
# Name -> (dense bfloat16 operations a second, bytes of memory), from the data sheets.
GPUS = {
    "a100": (312e12, 80e9), "b200": (2250e12, 180e9), "h100": (989e12, 80e9), "h200": (989e12, 141e9),
    "l40s": (362e12, 48e9), "rtx4090": (165e12, 24e9),
}  # fmt: skip


class Sizes(NamedTuple):
    """Sizes of the target and of a new draft."""

    hidden_size: int  # of both
    q_size: int  # elements of a token's queries in one layer, all heads together; of both
    kv: KVShape  # the target's layers, KV heads and head size
    vocab_size: int  # the draft's vocabulary
    mlp_size: int  # hidden layer of the draft's MLP
    target_vocab_size: int
    target_mlp_size: int
    target_length: int  # longest context of the target in tokens
    target_weights: int  # number of the target's weights
    matmul_weights: int  # target_weights minus the embedding if it is untied: a lookup is no matmul


class DraftCosts(NamedTuple):
    """The counts that determine the costs of a draft."""

    layer_weights: int  # number of weights in the layers that one forward uses
    feature_size: int  # elements of the target's features of a token
    num_forwards: int = 1  # forwards of a token: steps of the training-time test, or chained heads (TokenSwift)
    num_attentions: int = 1  # attention operations of a forward
    input_weights: int = 0  # number of weights that are used once for a token, not in every forward, such as fc
    head_weights: int = 0  # number of weights in the draft's own LM head; 0: the draft uses the target's
    num_copies: int = 1  # of the layers: chained heads differ, all other forwards share one set of layers

    @property
    def num_weights(self) -> int:
        """Number of weights to train."""
        return self.layer_weights * self.num_copies + self.input_weights + self.head_weights


def estimate(kind: str, config: Any, gpu: str = "h100", gpus: int = 1, tokens: float | None = None) -> dict[str, Any]:
    """Estimates a run. A draft from which the run continues (init) is assumed to have the sizes of a new one.

    Args:
        kind: the training command, such as "eagle3".
        gpus: number of GPUs, one for each process.
        tokens: number of the data's tokens that are in the loss; used if the data are not in shards. None: unknown.

    Returns:
        memory_bytes, total_bytes: bytes of a GPU by part, and their sum; ``fits``: True if the sum fits the GPU.
        draft_weights: number of weights to train.
        draft_operations, target_operations: for a token in the loss, forward and backward.
        target_reads: the target's passes over the data in an epoch.
        feature_bytes: bytes of a token in the cache; ``cache_bytes``: of all data (None: no cache).
        step_tokens: tokens in the loss of an optimizer step, over all GPUs.
        steps: number of optimizer steps (None: unknown); ``tokens``: tokens in the loss; ``hours``: for these tokens.

    Raises:
        ConfigError: the GPU is unknown, the target cannot be trained for, or the kind has no formula.
    """
    run: RunConfig = config  # typed; settings that one kind alone has are read from ``config``
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is unknown: use one of {', '.join(GPUS)}.")
    sizes = _sizes(run)
    draft = _draft_costs(kind, config, sizes)
    length = min(run.max_length, sizes.target_length)
    batch_tokens = max(1, run.rows // length) * length  # documents of the largest length
    memory = _memory_bytes(draft, run, sizes, length, batch_tokens)
    draft_operations = _draft_operations(draft, config, sizes, length)
    # Attention in a layer: 4 operations for each element of a query and each of its length / 2 keys (on average).
    target_operations = 2 * sizes.matmul_weights + 2 * sizes.kv.layers * sizes.q_size * length
    step_tokens, data_tokens = batch_tokens * run.accumulate * gpus, _count_data_tokens(run) or tokens
    num_steps = run.max_steps
    if data_tokens is not None:
        steps_of_data = max(1, round(data_tokens * run.epochs / step_tokens))
        num_steps = min(steps_of_data, run.max_steps or steps_of_data)
    trained_tokens = DEFAULT_TOKENS if num_steps is None else num_steps * step_tokens
    # With a cache, the first epoch alone runs the target.
    target_reads = 1.0 if run.cache is None else min(1.0, 1 / run.epochs)
    operations = trained_tokens * (draft_operations + target_operations * target_reads)
    feature_bytes = 2 * draft.feature_size + ARGMAX_BYTES * (kind in KINDS_WITH_ARGMAX)
    (speed, gpu_bytes), total = GPUS[gpu], sum(memory.values())
    return {
        "memory_bytes": memory, "total_bytes": total, "fits": total <= gpu_bytes, "draft_weights": draft.num_weights,
        "draft_operations": draft_operations, "target_operations": target_operations, "target_reads": target_reads,
        "step_tokens": step_tokens, "feature_bytes": feature_bytes, "steps": num_steps, "tokens": trained_tokens,
        "cache_bytes": None if run.cache is None else round(trained_tokens / run.epochs * feature_bytes),
        "hours": operations / (gpus * speed * UTILIZATION) / 3600,
        "gpu": gpu, "gpus": gpus, "utilisation": UTILIZATION,
    }  # fmt: skip


def _sizes(config: RunConfig) -> Sizes:
    """Reads the target's sizes from its config, without its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_target_config(config), dtype=torch.bfloat16)
    parts, kv = shared_parts.shared_parts(model, shared_parts.describe_config(model)), config_kv_shape(model)
    vocab_size, num_weights = parts.head.shape[0], sum(weight.numel() for weight in model.parameters())
    # A tied embedding is the head's matrix too, so tokens are multiplied with it.
    embedding = 0 if model.config.get_text_config().tie_word_embeddings else vocab_size * parts.hidden_size
    return Sizes(
        hidden_size=parts.hidden_size, q_size=parts.num_heads * kv.head_dim, kv=kv,
        vocab_size=min(config.vocabulary or vocab_size, vocab_size),
        mlp_size=config.intermediate_size or parts.intermediate_size,
        target_vocab_size=vocab_size, target_mlp_size=parts.intermediate_size,
        target_length=context_length(model), target_weights=num_weights, matmul_weights=num_weights - embedding,
    )  # fmt: skip


def _draft_costs(kind: str, config: Any, sizes: Sizes) -> DraftCosts:
    """Returns the counts of a new draft. Raises ConfigError if there is no formula for its kind."""
    h, q, vocab = sizes.hidden_size, sizes.q_size, sizes.vocab_size
    kv = 2 * sizes.kv.kv_heads * sizes.kv.head_dim  # elements of a token's keys and values in one layer
    layer = h * (2 * q + kv) + 3 * h * sizes.mlp_size  # q and o, k and v; gate, up and down
    eagle3_layer = layer + h * (q + kv)  # the input of q, k and v is twice as large
    names = "ttt", "layers", "heads", "block_size"
    ttt, layers, heads, block_size = (getattr(config, name, 0) for name in names)
    feature_layers = getattr(config, "feature_layers", ())
    state_size = h * len(feature_layers or (1, 2, 3))  # EAGLE-3 reads three layers by default
    kinds = {
        # Cross-attention has q and o alone. The features are the keys and values of one layer.
        "longspec": DraftCosts(layer + 2 * h * q, kv, num_attentions=2),
        # fc projects the states of all feature layers; below, an embedding and a state.
        "eagle3": DraftCosts(eagle3_layer, state_size, ttt, input_weights=state_size * h, head_weights=vocab * h),
        "eagle": DraftCosts(layer, h, input_weights=2 * h * h),
        # A block costs block_size tokens. The context passes fc, and the layers' projections to keys and values.
        "dflash": DraftCosts(
            layers * layer, state_size, block_size, num_attentions=layers, input_weights=state_size * h
        ),
        "mtp": DraftCosts(layer, h, ttt, input_weights=2 * h * h),
        "lm": DraftCosts(layers * layer, 0, num_attentions=layers),
        "tokenswift": DraftCosts(h * h, h, heads, num_attentions=0, num_copies=heads),
    }
    if kind not in kinds:
        raise ConfigError(f"--dry-run has no formula for {kind}: run it with max_steps=2 instead.")
    # Distillation needs the last layer's states, which some drafts read anyway.
    has_last_state = kind in ("eagle", "tokenswift", "mtp") or sizes.kv.layers - 1 in feature_layers
    extra = 0 if has_last_state or not config.distill else h
    return kinds[kind]._replace(feature_size=kinds[kind].feature_size + extra)


def _draft_operations(draft: DraftCosts, config: Any, sizes: Sizes, length: int) -> float:
    """Returns the draft's operations for a token in the loss, forward and backward."""
    num_keys = min(length / 2, getattr(config, "window", None) or length)  # keys of a query, on average
    # For each element of a query and each key, 4 operations forward and 10 backward: five products, one recomputed.
    attention = 14 * draft.num_attentions * sizes.q_size * num_keys
    # A weight: 2 operations forward, 4 backward, 2 more if the backward pass recomputes the layer.
    layer = draft.layer_weights * (8 if config.recompute else 6) + attention
    # The head: 2 for logits, 2 for the input's gradient, 2 for a trained head's gradient, 2 for the target's logits.
    head = sizes.vocab_size * sizes.hidden_size * (4 + 2 * bool(draft.head_weights) + 2 * bool(config.distill))
    # The features need no gradient, so input weights cost 2 operations forward and 2 backward.
    return draft.num_forwards * (layer + head) + 4 * draft.input_weights


def _memory_bytes(draft: DraftCosts, run: RunConfig, sizes: Sizes, length: int, batch_tokens: int) -> dict[str, int]:
    """Returns the bytes of a GPU by part. The target's weights, states and features take 2 bytes an element."""
    h, mlp_size = sizes.hidden_size, sizes.mlp_size if draft.num_attentions else 0  # chained heads have no MLP
    target_layer = 2 * (TARGET_HIDDEN_TENSORS * h + TARGET_MLP_TENSORS * sizes.target_mlp_size)
    # Layers with activations until the backward pass: half of the attentions, as LongSpec's layer has two (fitted).
    num_saved_layers = (1 if run.recompute else draft.num_forwards) * max(1, draft.num_attentions // 2)
    activations = batch_tokens * draft.num_forwards * OUTPUT_BYTES * h
    activations += batch_tokens * num_saved_layers * (LAYER_BYTES * h + MLP_BYTES * mlp_size)
    activations += DRAFT_LOGIT_BYTES * LOGITS_CHUNK * sizes.vocab_size
    activations += 2 * draft.num_weights  # bfloat16 copies of the weights (autocast)
    activations += 4 * draft.head_weights  # the head's float32 gradient, which losses.py keeps
    return {
        "target: weights": 2 * sizes.target_weights,
        "target: keys, values and states of a text":
        sizes.kv.bytes_per_token * max(MIN_STORE_TOKENS, length) + 2 * length * draft.feature_size,
        "target: a forward, with logits": PREFILL_CHUNK * (target_layer + TARGET_LOGIT_BYTES * sizes.target_vocab_size),
        "features": 2 * batch_tokens * draft.feature_size,
        "draft: weights (float32)": 4 * draft.num_weights,
        "draft: gradients": 4 * draft.num_weights,
        "draft: optimizer (AdamW)": 8 * draft.num_weights,  # two moments
        "draft: between forward and backward": activations,
    }  # fmt: skip


def _count_data_tokens(config: RunConfig) -> int:
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
