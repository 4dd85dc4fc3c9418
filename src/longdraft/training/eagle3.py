"""Trains EAGLE-3 drafts: the step with its loss (:class:`Eagle3Trainer`), and the run (:func:`train_eagle3`).

EAGLE-3, section 3, training-time test. The block f has two inputs at position t: the embedding of token t + 1 and the
target's features of token t. The output o(i, t) of step i predicts token t + 2. The rotary position is always t.

    o(0, t) = f(token t + 1, features of t)
    o(i, t) = f(token t + 1, o(i - 1, t - 1))        for steps i > 0, as when the draft reads its own output
    loss    = sum over i and t of decay^i * cross-entropy(head(norm(o(i, t))), target's distribution of token t + 2)

A query sees the same keys as in drafting (:mod:`longdraft.training.attention`). With ``norm_output`` (EAGLE-3.1), step
i reads norm(o(i - 1, t - 1)), so magnitudes do not drift over the steps.

To adapt a draft to long text (SpecPV, appendix A), ``init`` names a draft that was trained on short text, in any layout
that longdraft reads, and ``rope_factor`` stretches its positions with YaRN.

Shapes: N labels, W tokens in the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafters.shared.draft_block import DraftBlock
from longdraft.drafts.eagle_formats import KIND, Eagle3Shape
from longdraft.drafts.formats import DEFAULT_ROPE_THETA, default_feature_layers, scale_rope
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rope import CosSin, RotaryEmbedding, make_rope_parameters
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import SharedParts
from longdraft.registry import kind_of
from longdraft.training.attention import KVPair, attend
from longdraft.training.config import EVAL_DEPTH, Eagle3Config, RunConfig
from longdraft.training.features import Features, head_rows
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.losses import scale_logits
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import Attention, DraftTrainer, PackedBatch, StepOutput

# Size of the random weights of a new ``fc``, relative to the identity matrix that passes the last layer through.
FC_NOISE = 0.3


class Eagle3Trainer(DraftTrainer):
    """A training step of an EAGLE-3 block. The block's head is trained too.

    Args:
        draft_to_target: (W,) target ids of the draft's vocabulary; None: all.
        window: sliding window of the draft in tokens, the query included; None: all keys.

    Attributes:
        ttt_steps: number of steps of the training-time test.
        retain: fraction of a batch's documents that each further step keeps. Below 1, later steps are cheaper and weigh
            less. P-EAGLE (arXiv:2602.01469) drops positions in the same way.
    """

    block: Any  # an Eagle3Block, or another block that a subclass trains
    label_shift = 2
    needs_target_argmax = True

    def __init__(
        self, block: DraftBlock, parts: SharedParts, rotary: Callable[[torch.Tensor], CosSin],
        draft_to_target: torch.Tensor | None, config: RunConfig, window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(block, parts, draft_to_target, config)
        self.rotary, self.window = rotary, window
        self.ttt_steps, self.retain = getattr(config, "ttt", 1), getattr(config, "retain", 1.0)

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), ttt_steps: int | None = None
    ) -> StepOutput:
        """Returns the loss of packed documents, summed over labels and, with weights decay^i, over steps i.

        Step i leaves out the first i labels of each document, because step i - 1 has no output before them. Labels
        where the target's argmax is outside the draft's vocabulary have weight 0. ``depths`` of the result are i + 1.

        Args:
            shifts: a number for each document, which EAGLE-3 does not use.
            ttt_steps: number of steps; None: :attr:`ttt_steps`.
        """
        device = self.device
        batch = self.pack(documents, context=None if self.window is None else self.window - 1)
        label_indices = batch.label_indices.to(device)
        embeddings = self.embed(batch.gather([d.token_ids for d in documents], shift=1))
        cos, sin = self.rotary(batch.gather([d.positions for d in documents]).to(device))
        features = self.project_features(batch, shifts)
        # num_queries: by document, in the present step. step_kv: keys and values by step, then by document.
        num_queries, step_kv = batch.num_labels, list[list[KVPair]]()
        attention = [self._step_attention(batch.input_lengths, num_queries, step_kv)]
        outputs = [self.run_layer(self.block, embeddings, features, cos, sin, attention, label_indices)]
        labels_by_step = [torch.arange(len(label_indices), device=device)]  # for each query, the index of its label
        embeddings, features, cos, sin = (t[label_indices] for t in (embeddings, features, cos, sin))
        for step in range(1, ttt_steps or self.ttt_steps):
            num_retained = max(1, round(len(documents) * (self.retain**step if self.training else 1)))
            previous_queries = torch.arange(sum(num_queries)).split(num_queries)[:num_retained]  # by document
            num_queries = [max(0, n - 1) if d < num_retained else 0 for d, n in enumerate(num_queries)]
            if not sum(num_queries):  # no document is long enough for this step
                break
            # All queries of a document but the first continue. Each reads the output of the query before it.
            continued = torch.cat([queries[1:] for queries in previous_queries]).to(device)
            before = torch.cat([queries[:-1] for queries in previous_queries]).to(device)
            step_labels = labels_by_step[-1][continued]
            inputs = self.step_inputs(step, embeddings, features, step_labels, outputs[-1][before])
            attention = [self._step_attention(num_queries, num_queries, step_kv)]
            outputs.append(self.run_layer(self.block, *inputs, cos[step_labels], sin[step_labels], attention))
            labels_by_step.append(step_labels)

        depths = torch.cat([torch.full_like(step_labels, i + 1) for i, step_labels in enumerate(labels_by_step)])
        decays = torch.tensor([self.decay**i for i in range(len(labels_by_step))], device=device)[depths - 1]
        indices = torch.cat(labels_by_step)
        labels = self.make_labels(batch, indices)
        weights = (labels.target_argmax >= 0) * decays
        states = torch.cat(outputs)
        hidden, head = self.states_and_head(states)
        return self.adjust_loss(batch, states, self.compute_loss(hidden, head, labels, depths, weights))

    def project_features(self, batch: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        """Returns the projected features (inputs, hidden size) of a batch."""
        features = batch.gather([d.hidden for d in batch.documents]).to(self.device, self.matmul_dtype)
        # The residual stream is float32; autocast chooses the dtype of matrix products.
        return self.block.project_features(features).float()

    def adjust_loss(self, batch: PackedBatch, states: torch.Tensor, result: StepOutput) -> StepOutput:
        """Returns ``result`` with the final loss: the cross-entropy. ``states``: the block's outputs in all steps."""
        return result

    def step_inputs(
        self, step: int, embeddings: torch.Tensor, features: torch.Tensor, indices: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block's two inputs (embeddings, features) in a step > 0.

        Args:
            embeddings: (N, hidden size), the first input of step 0 at the positions with labels.
            features: (N, hidden size), the second input of step 0 at these positions.
            indices: for each query, its row in ``embeddings`` and ``features``.
            previous: for each query, the output of the previous step at the position before the query.
        """
        return embeddings[indices], self.block.next_features(previous)

    def states_and_head(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states and a head (W, hidden size); the logits are ``hidden @ head.T``.
        ``states``: (N, hidden size), the block's outputs."""
        return self.block.norm(states), self.block.lm_head.weight.to(self.matmul_dtype)

    def _step_attention(self, num_keys: list[int], num_queries: list[int], step_kv: list[list[KVPair]]) -> Attention:
        """Makes the attention function of the next step, which appends the step's keys and values to ``step_kv``.

        Args:
            num_keys: number of keys of each document.
            num_queries: number of queries of each document, which are its last positions.
            step_kv: keys and values by step, then by document.
        """
        earlier_kv = list(step_kv)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Split, not sliced: the gradient of each slice would be as large as the whole tensor.
            pairs = list(zip(k.split(num_keys, 1), v.split(num_keys, 1), strict=True))
            if not earlier_kv:
                pairs = [(k.contiguous(), v.contiguous()) for k, v in pairs]
            # With ``recompute``, the backward pass calls this a second time, when ``step_kv`` is complete.
            if len(step_kv) == len(earlier_kv):
                step_kv.append(pairs)
            by_document = zip(q.split(num_queries, 1), zip(*earlier_kv, pairs, strict=True), strict=True)
            return torch.cat([self._attend(queries, *kv) for queries, kv in by_document], 1)

        return attention

    def _attend(self, q: torch.Tensor, step0_kv: KVPair, *later_kv: KVPair) -> torch.Tensor:
        """Computes the attention of one document's queries to the keys and values of step 0 and of later steps."""
        num_queries = q.shape[1]
        if num_queries == 0:
            return q
        if not later_kv:
            return attend(q, *step0_kv, 0, self.window)
        # An earlier step has more positions than this one. No query sees the last ones.
        keys, values = (torch.stack([pair[i][:, :num_queries] for pair in later_kv], 2) for i in (0, 1))
        return attend(q, *step0_kv, len(later_kv), self.window, (keys, values))


def train_eagle3(config: Eagle3Config, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, appendix A); see :mod:`longdraft.training.session`."""
    init: Eagle3Draft | None = None
    if config.init is not None:  # read before the target is loaded, to report a wrong folder at once
        if (kind := kind_of(config.init).name) != KIND:
            raise CheckpointError(f"{config.init} holds a draft for {kind}, not for {KIND}.")
        init = Eagle3Draft.load(config.init)
    # A document needs a label for each step, in training and in measurements.
    session = TrainingSession(config, levels=max(config.ttt, EVAL_DEPTH), progress=progress, stop=stop)
    runner, window = session.runner, config.window
    rope = make_rope_parameters(float(runner.shared_parts.description.get("rope_theta") or DEFAULT_ROPE_THETA))
    if init is None:
        block, draft_to_target, layers = _new_block(config, session)
    else:
        layers = _init_feature_layers(config, init, runner)
        block, draft_to_target, rope = init.trainable_module(), init.draft_to_target_ids, init.rope
        window = window if "window" in config.fields_set else init.window
    rope, factor, inference_factor = _rope_settings(config, init, rope)
    rotary = RotaryEmbedding(block.shape.head_dim, rope, device=runner.device)
    trainer = Eagle3Trainer(block, runner.shared_parts, rotary, draft_to_target, config, window)
    draft_config = asdict(block.shape) | {
        "feature_layers": list(layers),
        "draft_vocab_size": block.shape.vocabulary,
        "window": window,
        "rope_theta": rope["rope_theta"],
        "rope_factor": inference_factor,
        "rope_factor_trained": factor,
        "rope_original_length": None if factor is None else rope["original_max_position_embeddings"],
        "trained_length": config.max_length,
    }
    if factor is None and rope["rope_type"] != "default":  # RoPE scaling of a draft from elsewhere
        draft_config["rope_parameters"] = rope
    on_start = None if init is not None else partial(scale_to_features, block, len(layers))
    yield from TrainingLoop(session, trainer, layers, KIND, draft_config, levels=config.ttt, on_start=on_start).run()


def scale_to_features(block: Eagle3Block, num_layers: int, document: Features) -> None:
    """Scales a new block to the target's features, and its logits to unit size.

    The states of the target's layers differ by orders of magnitude. So the columns of ``fc`` for a layer are divided by
    the root mean square of a token's state: the median over tokens, because the first token's state can be a thousand
    times as large. ``fc`` passes the last layer through, plus random weights.
    """
    states = document.hidden.cpu().float().chunk(num_layers, dim=-1)
    scales = [state.square().mean(-1).sqrt().median().clamp_min(1e-6) for state in states]  # no division by 0
    with torch.no_grad():
        columns = block.fc.weight.chunk(num_layers, dim=1)
        for part, scale in zip(columns, scales, strict=True):
            part.mul_(FC_NOISE / scale)
        columns[-1].add_(torch.eye(block.shape.hidden_size) / scales[-1])
    scale_logits(block.norm, block.lm_head.weight)


def new_feature_layers(layers: tuple[int, ...], runner: TargetRunner) -> tuple[int, ...]:
    """Returns the target layers that a new draft reads: ``layers``, or the default if these are (). Raises ConfigError
    if the target lacks one."""
    layers = layers or default_feature_layers(runner.num_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < runner.num_layers:
        limit = f"the target's {runner.num_layers} layers"
        raise ConfigError(f"Set feature_layers to increasing numbers, counted from 0, of {limit}, not {[*layers]}.")
    return layers


def _new_block(
    config: Eagle3Config, session: TrainingSession
) -> tuple[Eagle3Block, torch.Tensor | None, tuple[int, ...]]:
    """Returns a new block, the target ids of its vocabulary (None: all), and the target layers that it reads."""
    runner = session.runner
    layers = new_feature_layers(config.feature_layers, runner)
    draft_to_target, size = session.vocabulary(), len(layers) * runner.shared_parts.hidden_size
    head = head_rows(runner.shared_parts.head, draft_to_target).cpu()
    shape = Eagle3Shape(
        **session.draft_sizes(), feature_size=size, vocabulary=len(head), norm_output=config.norm_output
    )
    block = Eagle3Block(shape)
    block.initialize(config.seed, head=head)
    return block, draft_to_target, layers


def _init_feature_layers(config: Eagle3Config, init: Eagle3Draft, runner: TargetRunner) -> tuple[int, ...]:
    """Returns the target layers that ``init`` reads. Raises CheckpointError or ConfigError if it cannot be trained."""
    init.check(runner)
    if init.shape.embedding is not None or init.shape.decoder_layers > 1 or not init.shape.own_head:
        raise ConfigError(
            f"{init.folder} has its own embedding, several layers or no head: such drafts cannot be trained."
        )
    layers = init.feature_layers(runner)
    if config.feature_layers and config.feature_layers != layers:
        raise ConfigError(f"feature_layers {config.feature_layers}: the draft in init reads {layers}; leave it out.")
    return layers


def _rope_settings(
    config: Eagle3Config, init: Eagle3Draft | None, rope: dict[str, Any]
) -> tuple[dict[str, Any], float | None, float | None]:
    """Returns RoPE's parameters in training, and YaRN's factors in training and in decoding (None: no YaRN)."""
    factor, inference_factor = config.rope_factor, config.rope_factor_inference
    init_config = {} if init is None else init.config
    if factor is None:
        inference_factor = init_config.get("rope_factor")
        factor = init_config.get("rope_factor_trained") or inference_factor
    elif config.rope_original_length is not None:
        rope = rope | {"original_max_position_embeddings": config.rope_original_length}
    length = rope.get("original_max_position_embeddings") or init_config.get("rope_original_length")
    length = length or (None if init is None else init.trained_length)
    if factor is not None and not length:
        raise ConfigError(
            "rope_factor needs rope_original_length, the length that YaRN stretches, in tokens: set both."
        )
    rope = scale_rope(rope, length, config.rope_theta, factor, "" if init is None else init.folder)
    return rope, factor, inference_factor or factor
