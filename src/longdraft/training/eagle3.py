"""Trains EAGLE-3 and one-pass drafts: the step with its loss (:class:`Eagle3Trainer`), and the runs.

EAGLE-3, section 3, training-time test. The input at position t is the target's features of t and the embedding of token
t + 1; the output predicts token t + 2. The rotary position is t in every step. With f the block and o(i, t) its output:

    o(0, t) = f(token t + 1, features of t)
    o(i, t) = f(token t + 1, o(i - 1, t - 1))        for steps i > 0, as when the draft reads its own output
    loss    = sum over i and t of decay^i * cross-entropy(head(norm(o(i, t))), target's distribution of token t + 2)

A query sees the same keys as in drafting (:mod:`longdraft.training.attention`).

To adapt a draft to long text (SpecPV, appendix A), ``init`` names a draft that was trained on short text, in any layout
that longdraft reads, and ``rope_factor`` stretches its positions with YaRN.

A one-pass draft differs in later steps. Position t of step k has the anchor t - k, k tokens before. Its inputs are the
anchor's embedding and features, and two learned vectors of step k. It sees the keys of step 0 up to the anchor, and the
keys of steps 1 .. k that have the same anchor. The input of its bigram is the true previous token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from longdraft.drafters import onepass
from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafters.onepass import OnePassBlock, OnePassDraft, OnePassShape
from longdraft.drafts.eagle_formats import KIND, Eagle3Shape
from longdraft.drafts.formats import DEFAULT_ROPE_THETA, default_feature_layers, scale_rope
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rotary import RotaryEmbedding, make_rope_parameters
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import SharedParts
from longdraft.training.attention import KVPair, attend
from longdraft.training.config import EVAL_DEPTH, Eagle3Config, OnePassConfig, RunConfig
from longdraft.training.features import Features, head_rows
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import Attention, DraftTrainer, PackedBatch, StepOutput

# Size of the random weights of a new ``fc``, relative to its identity matrix for the last layer.
FC_NOISE = 0.3


class Eagle3Trainer(DraftTrainer):
    """A training step of an EAGLE-3 block, whose head is trained too.

    Args:
        window: sliding window of the draft in tokens, the query included; None: all keys.

    Attributes:
        ttt_steps: number of steps of the training-time test.
        retain: fraction of a batch's documents that each further step keeps. Below 1, later steps are cheaper and weigh
            less (P-EAGLE's conditional drop, arXiv:2602.01469, but of documents).
    """

    block: Eagle3Block
    label_shift = 2
    needs_target_argmax = True
    window_slides = True
    """In steps > 0, the window ends at the query's own position, as in drafting (True), or at its anchor (False)."""
    ttt_steps, retain = 1, 1.0

    def __init__(
        self,
        block: Eagle3Block,
        parts: SharedParts,
        rotary: RotaryEmbedding,
        draft_to_target: torch.Tensor | None,
        config: RunConfig,
        window: int | None = None,
    ) -> None:
        super().__init__(block, parts, draft_to_target, config)
        self.rotary, self.window = rotary, window
        if isinstance(config, Eagle3Config):
            self.ttt_steps, self.retain = config.ttt, config.retain

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), ttt_steps: int | None = None
    ) -> StepOutput:
        """Returns the loss of packed documents, summed over tokens and, with weights decay^i, over steps i.

        Step i leaves out the first i tokens in the loss of each document, because step i - 1 has no output before them.
        Tokens where the target's argmax is outside the draft's vocabulary have weight 0.

        Args:
            shifts: a number for each document; not used here.
            ttt_steps: number of steps; None: :attr:`ttt_steps`.

        Returns:
            The result; ``depths`` are step + 1.
        """
        device = self.device
        pack = self.pack(documents, context=None if self.window is None else self.window - 1)
        in_loss = pack.loss_indices.to(device)
        x = self.embed(pack.gather([d.token_ids for d in documents], shift=1))
        cos, sin = self.rotary(pack.gather([d.positions for d in documents]).to(device))
        g = self.project_features(pack, shifts)  # named as in the paper
        # Queries of each document in the present step; keys and values by step, then by document.
        counts, step_kv = pack.loss_lengths, list[list[KVPair]]()
        attention = [self._step_attention(pack.input_lengths, counts, step_kv)]
        outputs = [self.run_layer(self.block, x, g, cos, sin, attention, in_loss)]
        indices = [torch.arange(len(in_loss), device=device)]  # by step: its queries, counted in tokens in the loss
        x, g, cos, sin = (t[in_loss] for t in (x, g, cos, sin))
        for step in range(1, ttt_steps or self.ttt_steps):
            retained = max(1, round(len(documents) * (self.retain**step if self.training else 1)))
            ranges = torch.arange(sum(counts)).split(counts)[:retained]  # the previous step's queries, by document
            counts = [max(0, n - 1) if d < retained else 0 for d, n in enumerate(counts)]
            if not sum(counts):  # no document is long enough for this step
                break
            # All queries of a document but the first continue, and read the output of the query before.
            queries, sources = (torch.cat([r[part] for r in ranges]).to(device) for part in (slice(1, None), slice(-1)))
            index = indices[-1][queries]
            inputs = self.step_inputs(step, x, g, index, outputs[-1][sources])
            attention = [self._step_attention(counts, counts, step_kv)]
            outputs.append(self.run_layer(self.block, *inputs, cos[index], sin[index], attention))
            indices.append(index)

        depths = torch.cat([torch.full_like(index, i + 1) for i, index in enumerate(indices)])
        decays = torch.tensor([self.decay**i for i in range(len(indices))], device=device)[depths - 1]
        index = torch.cat(indices)
        labels = self.labels(pack, index)
        weight = (labels.target_argmax >= 0) * decays
        spans = zip(documents, pack.spans, strict=True)
        previous_ids = torch.cat([d.token_ids[first + 1 : -1] for d, (_, first, _) in spans]).to(device)
        out = torch.cat(outputs)
        hidden, head = self.states_and_head(self.block.norm(out), self.target_to_draft[previous_ids][index])
        return self.step_loss(pack, out, self.output(hidden, head, labels, depths, weight))

    def project_features(self, pack: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        """Returns the projected features (N, hidden size) of the pack's N inputs."""
        features = pack.gather([d.hidden for d in pack.documents]).to(self.device, self.matmul_dtype)
        # The residual stream is float32; autocast chooses the dtype of matrix products.
        return self.block.project_features(features).float()

    def step_loss(self, pack: PackedBatch, out: torch.Tensor, output: StepOutput) -> StepOutput:
        """Hook for another loss. ``out``: the block's outputs of all steps; ``output``: has the cross-entropy."""
        return output

    def step_inputs(
        self, step: int, x: torch.Tensor, g: torch.Tensor, indices: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block's two inputs (embeddings, features) in a step > 0.

        Args:
            x, g: inputs of step 0: embeddings and projected features of the tokens in the loss.
            indices: for each query, its row in x and g.
            previous: for each query, the output of the previous step at the position before the query.
        """
        return x[indices], self.block.next_features(previous)

    def states_and_head(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns states (N, size) and a head (V', size). Their product is the logits.

        Args:
            previous_ids: (N,) draft ids of the tokens before the predicted tokens; -1: not in the draft's vocabulary.
        """
        return hidden, self.block.lm_head.weight.to(self.matmul_dtype)

    def _step_attention(self, lengths: list[int], counts: list[int], step_kv: list[list[KVPair]]) -> Attention:
        """Makes the attention function of the next step, which appends the step's keys and values to ``step_kv`` (once:
        with ``recompute``, the backward pass calls it again, when ``step_kv`` holds later steps too).

        Args:
            lengths: number of keys of each document.
            counts: number of queries of each document, its last positions.
        """
        earlier_kv = list(step_kv)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Split, not sliced: the gradient of each slice would be as large as the whole tensor.
            pairs = list(zip(k.split(lengths, 1), v.split(lengths, 1), strict=True))
            if not earlier_kv:
                pairs = [(k.contiguous(), v.contiguous()) for k, v in pairs]
            if len(step_kv) == len(earlier_kv):
                step_kv.append(pairs)
            by_document = zip(q.split(counts, 1), zip(*earlier_kv, pairs, strict=True), strict=True)
            return torch.cat([self._attend(queries, *kv) for queries, kv in by_document], 1)

        return attention

    def _attend(self, q: torch.Tensor, first: KVPair, *later: KVPair) -> torch.Tensor:
        """Attention of one document's queries to the keys and values of step 0 (``first``) and of later steps."""
        n, window = q.shape[1], self.window
        if n == 0:
            return q
        if window is not None and not self.window_slides:
            window += len(later)
        if not later:
            return attend(q, *first, 0, window)
        # An earlier step has more positions than this one. Its last ones are seen by no query.
        keys, values = (torch.stack([pair[i][:, :n] for pair in later], 2) for i in (0, 1))
        return attend(q, *first, len(later), window, (keys, values))


class OnePassTrainer(Eagle3Trainer):
    """A training step of a one-pass block."""

    block: OnePassBlock
    window_slides = False

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), ttt_steps: int | None = None
    ) -> StepOutput:
        return super().forward(documents, shifts, min(ttt_steps or self.ttt_steps, self.block.shape.slots))

    def step_inputs(
        self, step: int, x: torch.Tensor, g: torch.Tensor, indices: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        anchors = indices - step
        return self.block.mask_token_inputs(x[anchors], g[anchors], slice(step - 1, step))

    def states_and_head(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One product for head and bigram, with both concatenated along the inner dimension.
        head = torch.cat([self.block.lm_head.weight, self.block.bigram_out.weight], 1)
        bigram = self.block.predecessor_weights(previous_ids)
        return torch.cat([hidden, bigram.to(hidden.dtype)], 1), head.to(self.matmul_dtype)


def train_eagle3(config: Eagle3Config, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, appendix A); see :mod:`longdraft.training.session`."""
    return _train(config, KIND, Eagle3Trainer, lambda block: block, progress, stop)


def train_onepass(config: OnePassConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains a one-pass draft; see :mod:`longdraft.training.session`."""
    if config.init is not None and kind_of(config.init).name == onepass.KIND:
        shape = OnePassDraft.load(config.init).shape
        config = replace(config, ttt=shape.slots, rank=shape.rank)

    def with_slots(block: Eagle3Block) -> Eagle3Block:
        if isinstance(block, OnePassBlock):
            return block
        one_pass = OnePassBlock(OnePassShape(**asdict(block.shape), slots=config.ttt, rank=config.rank))
        one_pass.initialize_masks_and_bigram(config.seed)
        one_pass.load_state_dict(one_pass.state_dict() | block.state_dict())
        return one_pass

    return _train(config, onepass.KIND, OnePassTrainer, with_slots, progress, stop)


def _train(
    config: Eagle3Config,
    kind: str,
    trainer_class: type[Eagle3Trainer],
    adapt: Callable[[Eagle3Block], Eagle3Block],
    progress: Progress,
    stop: Stop,
) -> Reports:
    """Trains a draft with EAGLE-3's layer. ``adapt`` converts an EAGLE-3 block to the block to train."""
    init: Eagle3Draft | None = None
    if config.init is not None:  # read before the target is loaded, to report a wrong folder at once
        init_kind = kind_of(config.init)
        if init_kind.name not in (KIND, kind):
            raise CheckpointError(f"{config.init} holds a draft for {init_kind.name}, not for {kind}.")
        loaded = init_kind.load(config.init)
        assert isinstance(loaded, Eagle3Draft)
        init = loaded
    # A document needs a token for each step, in training and in measurements.
    session = TrainingSession(config, max(config.ttt, EVAL_DEPTH), progress, stop)
    runner, window = session.runner, config.window
    rope = make_rope_parameters(float(runner.shared_parts.description.get("rope_theta") or DEFAULT_ROPE_THETA))
    if init is None:
        eagle3_block, draft_to_target, layers = _new(config, session)
    else:
        layers = _init_feature_layers(config, init, runner)
        eagle3_block, draft_to_target, rope = init.trainable_module(), init.draft_to_target_ids, init.rope
        window = window if "window" in config.fields_set else init.window
    rope, factor, inference_factor = _rope_settings(config, init, rope)
    block = adapt(eagle3_block)
    rotary = RotaryEmbedding(block.shape.head_dim, rope, device=runner.device)
    trainer = trainer_class(block, runner.shared_parts, rotary, draft_to_target, config, window)
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
    scale = None if init is not None else partial(scale_to_features, block, len(layers))
    yield from TrainingLoop(session, trainer, layers, kind, draft_config, levels=config.ttt, on_start=scale).run()


def scale_to_features(block: Eagle3Block, layers: int, document: Features) -> None:
    """Scales a new block to its target's features, and its logits to unit size.

    The layers' states differ by orders of magnitude, so the columns of ``fc`` are divided by the size of their layer's
    states: the median, because the first token's states can be a thousand times as large. ``fc`` passes the last layer
    through, plus random weights. With the target's head and a norm of ones, a new draft would be confident and wrong,
    and take a hundred steps to unlearn it. So the final norm scales the logits to unit size.
    """
    features = document.hidden.cpu().float().chunk(layers, dim=-1)
    sizes = [part.square().mean(-1).sqrt().median().clamp_min(1e-6) for part in features]
    with torch.no_grad():
        columns = block.fc.weight.chunk(layers, dim=1)
        for part, size in zip(columns, sizes, strict=True):
            part.mul_(FC_NOISE / size)
        columns[-1].add_(torch.eye(block.shape.hidden_size) / sizes[-1])
        block.norm.weight.fill_(1 / float(block.lm_head.weight.norm(dim=-1).median().clamp_min(1e-6)))


def _new(config: Eagle3Config, session: TrainingSession) -> tuple[Eagle3Block, torch.Tensor | None, tuple[int, ...]]:
    """Returns a new block, the target ids of its vocabulary (None: all), and the target layers that it reads."""
    runner = session.runner
    layers = config.feature_layers or default_feature_layers(runner.num_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < runner.num_layers:
        limit = f"the target's {runner.num_layers} layers"
        raise ConfigError(f"Set feature_layers to increasing numbers, counted from 0, of {limit}, not {[*layers]}.")
    draft_to_target, size = session.vocabulary(), len(layers) * runner.shared_parts.hidden_size
    head = head_rows(runner.shared_parts.head, draft_to_target).cpu()
    block = Eagle3Block(Eagle3Shape(**session.draft_sizes(), feature_size=size, vocabulary=len(head)))
    block.initialize(config.seed, head=head)
    return block, draft_to_target, layers


def _init_feature_layers(config: Eagle3Config, init: Eagle3Draft, runner: TargetRunner) -> tuple[int, ...]:
    """Returns the target layers that the draft in ``init`` reads. Raises if it cannot be trained for the target."""
    init.check(runner)
    if init.shape.embedding is not None or init.shape.decoder_layers > 1:
        raise ConfigError(f"{init.folder} has its own embedding or several layers: such drafts cannot be trained.")
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
