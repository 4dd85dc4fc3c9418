"""Training of EAGLE-3 and one-pass drafts: the step with its loss (:class:`Eagle3Trainer`), and the runs.

EAGLE-3, section 3, training-time test. Row t joins the target's features of position t with the embedding of token
t + 1 and predicts token t + 2; its rotary position is t in every step. With f the block and o(i, t) its output:

    o(0, t) = f(token t + 1, features of t)
    o(i, t) = f(token t + 1, o(i - 1, t - 1))        for steps i > 0, as when the draft reads its own output
    loss    = sum over i and t of decay^i * cross-entropy(head(norm(o(i, t))), target's distribution of token t + 2)

Every row sees the keys it will see when drafting (:mod:`longdraft.training.attention`).

The same run adapts a draft to long text (SpecPV, appendix A): ``init`` names a draft of short texts in any layout that
longdraft decodes, and ``rope_factor`` stretches its positions with YaRN.

A one-pass draft differs in its later steps: row t of step k stands k tokens after its anchor, row t - k. Its inputs are
the anchor's embedding and features and two learned vectors of step k. It sees the rows that the anchor sees and the
rows of steps 1 .. k on its own path. The bigram reads the text's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from longdraft.training.loop import StepReport, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import Attention, DraftTrainer, PackedBatch, StepOutput

# Size of the random part of a fresh fc, relative to the layer that passes through.
FC_NOISE = 0.3


class Eagle3Trainer(DraftTrainer):
    """A training step of an EAGLE-3 block, which has a head of its own.

    Args:
        rotary: the draft's own rotary embedding.
        window: keys of its own that a row sees, the row included; None for all.

    Attributes:
        ttt_steps: of the training-time test.
        retain: share of a batch's documents that goes on from each step to the next. Less makes later steps cheaper and
            gives them less weight (conditional drop of P-EAGLE, arXiv:2602.01469, by document).
    """

    block: Eagle3Block
    label_shift = 2
    needs_target_argmax = True
    window_slides = True
    """The window of a later step's row ends with that row, as a node's does in drafting. Else it sees what its anchor
    sees, and the later steps' keys beside it."""
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
        """The loss of packed documents, summed over rows and, with their weights, over steps.

        A row takes part in step i if i learned rows come before it. A row whose likeliest token (the target's) is
        outside the draft's vocabulary has no weight.

        Args:
            shifts: not used; every row goes through every step.
            ttt_steps: number of steps if not the one for training (for measuring).

        Returns:
            ``depths`` are 1 for step 0, and so on.
        """
        device = self.device
        pack = self.pack(documents, num_context=None if self.window is None else self.window - 1)
        learned = pack.loss_indices.to(device)
        x = self.embed(pack.gather([d.token_ids for d in documents], shift=1))
        cos, sin = self.rotary(pack.gather([d.positions for d in documents]).to(device))
        g = self.project_features(pack, shifts)
        # Of each document, the rows that take part; of each step, each document's keys and values.
        counts, seen = pack.loss_lengths, list[list[KVPair]]()

        first = self.run_layer(self.block, x, g, cos, sin, [self._attention(pack.input_lengths, counts, seen)], learned)
        outputs, rows = [first], [torch.arange(len(learned), device=device)]
        x, g, cos, sin = (t[learned] for t in (x, g, cos, sin))
        for step in range(1, ttt_steps or self.ttt_steps):
            retained = max(1, round(len(documents) * (self.retain**step if self.training else 1)))
            each = torch.arange(sum(counts)).split(counts)[:retained]
            counts = [max(0, n - 1) if d < retained else 0 for d, n in enumerate(counts)]
            if not sum(counts):  # all documents are too short
                break
            # All but each document's first row take part, and read the outputs of all but its last.
            fed, feeding = (torch.cat([r[part] for r in each]).to(device) for part in (slice(1, None), slice(-1)))
            row = rows[-1][fed]
            inputs = self.step_inputs(step, x, g, row, outputs[-1][feeding])
            attention = [self._attention(counts, counts, seen)]
            outputs.append(self.run_layer(self.block, *inputs, cos[row], sin[row], attention))
            rows.append(row)

        depths = torch.cat([torch.full_like(each, i + 1) for i, each in enumerate(rows)])
        decays = torch.tensor([self.decay**i for i in range(len(rows))], device=device)[depths - 1]
        row = torch.cat(rows)
        labels = self.labels(pack, row)
        weight = (labels.target_argmax >= 0) * decays
        tokens = torch.cat(
            [d.token_ids[first + 1 : -1] for d, (_, first, _) in zip(documents, pack.spans, strict=True)]
        )
        out = torch.cat(outputs)
        hidden, head = self.states_and_head(self.block.norm(out), self.target_to_draft[tokens.to(device)][row])
        return self.step_loss(pack, out, self.output(hidden, head, labels, depths, weight))

    def project_features(self, pack: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        """The projected features (rows, hidden) of the computed rows."""
        features = pack.gather([d.hidden for d in pack.documents]).to(self.device, self.matmul_dtype)
        # Sums of the residual stream are float32; autocast decides about the products.
        return self.block.project_features(features).float()

    def step_loss(self, pack: PackedBatch, out: torch.Tensor, output: StepOutput) -> StepOutput:
        """The result of a step, from all steps' outputs o and the cross-entropy of what they say."""
        return output

    def step_inputs(
        self, step: int, x: torch.Tensor, g: torch.Tensor, indices: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's two inputs in a later step.

        Args:
            x, g: embeddings and projected features of the learned rows, the inputs of step 0.
            rows: the rows of this step among them.
            previous: for each of these, the last step's output of the row before it.
        """
        return x[indices], self.block.next_features(previous)

    def states_and_head(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States (N, size), and the head (V', size) that they are multiplied with.

        Args:
            before: (N,) draft ids of the tokens before the predicted ones; -1 where the vocabulary lacks the token.
        """
        return hidden, self.block.lm_head.weight.to(self.matmul_dtype)

    def _attention(self, lengths: list[int], counts: list[int], steps: list[list[KVPair]]) -> Attention:
        """The attention of the step behind ``ttt_steps``, to which it adds its keys and values.

        It may be called again in the backward pass, when later steps have been.

        Args:
            lengths, counts: rows of each document, and how many of them, the last ones, are learned.
        """
        before = list(steps)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
            pairs = list(zip(k.split(lengths, 1), v.split(lengths, 1), strict=True))
            if not before:
                pairs = [(k.contiguous(), v.contiguous()) for k, v in pairs]
            if len(steps) == len(before):
                steps.append(pairs)
            each = zip(q.split(counts, 1), zip(*before, pairs, strict=True), strict=True)
            return torch.cat([self._drafted(queries, *of_steps) for queries, of_steps in each], 1)

        return attention

    def _drafted(self, q: torch.Tensor, first: KVPair, *steps: KVPair) -> torch.Tensor:
        """One document's attention, to its keys and values of step 0 and of later steps."""
        n, window = q.shape[1], self.window
        if n == 0:
            return q
        if window is not None and not self.window_slides:
            window += len(steps)
        if not steps:
            return attend(q, *first, 0, window)
        # An earlier step has more rows; nobody sees its last ones any more.
        keys, values = (torch.stack([pair[i][:, :n] for pair in steps], 2) for i in (0, 1))
        return attend(q, *first, len(steps), window, (keys, values))


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
        # One product for head and bigram: the bigram's rows beside the states, its matrix beside the head.
        head = torch.cat([self.block.lm_head.weight, self.block.bigram_out.weight], 1)
        return torch.cat([hidden, self.block.predecessor_weights(previous_ids).to(hidden.dtype)], 1), head.to(
            self.matmul_dtype
        )


def train_eagle3(
    config: Eagle3Config, progress: Progress = no_progress, stop: Stop = never_stop
) -> Iterator[StepReport]:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, appendix A); see :mod:`longdraft.training.session`."""
    return _train(config, KIND, Eagle3Trainer, lambda block: block, progress, stop)


def train_onepass(
    config: OnePassConfig, progress: Progress = no_progress, stop: Stop = never_stop
) -> Iterator[StepReport]:
    """Trains a one-pass draft; see :mod:`longdraft.training.session`."""
    if config.init is not None and kind_of(config.init).name == onepass.KIND:
        shape = OnePassDraft.load(config.init).shape
        config = replace(config, ttt=shape.slots, rank=shape.rank)

    def with_slots(block: Eagle3Block) -> Eagle3Block:
        if isinstance(block, OnePassBlock):
            return block
        made = OnePassBlock(OnePassShape(**asdict(block.shape), slots=config.ttt, rank=config.rank))
        made.initialize_slots(config.seed)
        made.load_state_dict(made.state_dict() | block.state_dict())
        return made

    return _train(config, onepass.KIND, OnePassTrainer, with_slots, progress, stop)


def _train(
    config: Eagle3Config,
    kind: str,
    trainer_class: type[Eagle3Trainer],
    adapt: Callable[[Eagle3Block], Eagle3Block],
    progress: Progress,
    stop: Stop,
) -> Iterator[StepReport]:
    """Trains a draft whose layer is EAGLE-3's; ``adapt`` makes the block to train from EAGLE-3's."""
    init: Eagle3Draft | None = None
    if config.init is not None:  # before the target is loaded, so that a wrong folder is reported at once
        its_kind = kind_of(config.init)
        if its_kind.name not in (KIND, kind):
            raise CheckpointError(f"{config.init} holds a draft for {its_kind.name}, not for {kind}.")
        loaded = its_kind.load(config.init)
        assert isinstance(loaded, Eagle3Draft)
        init = loaded
    # A document needs a row for every step, those of measuring included.
    session = TrainingSession(config, max(config.ttt, EVAL_DEPTH), progress, stop)
    runner, window = session.runner, config.window
    rope = make_rope_parameters(float(runner.shared_parts.description.get("rope_theta") or DEFAULT_ROPE_THETA))
    if init is None:
        plain, kept, layers = _new(config, session)
    else:
        layers = _checked(config, init, runner)
        plain, kept, rope = init.trainable_module(), init.draft_to_target_ids, init.rope
        window = window if "window" in config.fields_set else init.window
    rope, factor, inference = _positions(config, init, rope)
    block = adapt(plain)
    rotary = RotaryEmbedding(block.shape.head_dim, rope, device=runner.device)
    trainer = trainer_class(block, runner.shared_parts, rotary, kept, config, window)
    described = asdict(block.shape) | {
        "feature_layers": list(layers),
        "draft_vocab_size": block.shape.vocabulary,
        "window": window,
        "rope_theta": rope["rope_theta"],
        "rope_factor": inference,
        "rope_factor_trained": factor,
        "rope_original_length": None if factor is None else rope["original_max_position_embeddings"],
        "trained_length": config.max_length,
    }
    if factor is None and rope["rope_type"] != "default":  # a published draft's own way to stretch
        described["rope_parameters"] = rope
    scale = None if init is not None else partial(scale_to_features, block, len(layers))
    yield from TrainingLoop(session, trainer, layers, kind, described, levels=config.ttt, on_start=scale).run()


def scale_to_features(block: Eagle3Block, layers: int, document: Features) -> None:
    """Scales a fresh block to its target's features, and its logits to unit size.

    States of different layers differ by orders of magnitude, so ``fc`` is divided by the size of each layer's states:
    the median over a text, because the first token's states can be a thousand times as large as the others. The last
    layer read, nearest to the head, passes through; the rest of ``fc`` is random. With the target's rows for a head and
    a norm of ones, a fresh draft is as sure as the target and always wrong, and takes a hundred steps to unlearn that;
    so the last norm scales logits to unit size.
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
    """A new block, its vocabulary, and the layers that it reads."""
    runner = session.runner
    layers = config.feature_layers or default_feature_layers(runner.num_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < runner.num_layers:
        raise ConfigError(
            f"Set feature_layers to increasing ones of the target's {runner.num_layers} layers, not {[*layers]}"
        )
    kept, size = session.vocabulary(), len(layers) * runner.shared_parts.hidden_size
    head = head_rows(runner.shared_parts.head, kept).cpu()
    block = Eagle3Block(Eagle3Shape(**session.draft_sizes(), feature_size=size, vocabulary=len(head)))
    block.initialize(config.seed, head=head)
    return block, kept, layers


def _checked(config: Eagle3Config, init: Eagle3Draft, runner: TargetRunner) -> tuple[int, ...]:
    """The layers that a draft to go on from reads; raises if it cannot be trained for the target."""
    init.check(runner)
    if init.shape.embedding is not None or init.shape.decoder_layers > 1:
        raise ConfigError(f"{init.folder} has an embedding of its own or several layers, which training does not know.")
    layers = init.feature_layers(runner)
    if config.feature_layers and config.feature_layers != layers:
        raise ConfigError(f"feature_layers {config.feature_layers}: the draft in init reads {layers}; leave it out.")
    return layers


def _positions(
    config: Eagle3Config, init: Eagle3Draft | None, rope: dict[str, Any]
) -> tuple[dict[str, Any], float | None, float | None]:
    """RoPE's parameters in training, and YaRN's factors in training and in decoding, if it stretches them."""
    factor, inference, own = config.rope_factor, config.rope_factor_inference, {} if init is None else init.config
    if factor is None:
        inference = own.get("rope_factor")
        factor = own.get("rope_factor_trained") or inference
    elif config.rope_original_length is not None:
        rope = rope | {"original_max_position_embeddings": config.rope_original_length}
    length = rope.get("original_max_position_embeddings") or own.get("rope_original_length")
    length = length or (None if init is None else init.trained_length)
    if factor is not None and not length:
        raise ConfigError("rope_factor needs rope_original_length, the length to stretch: set rope_original_length.")
    rope = scale_rope(rope, length, config.rope_theta, factor, "" if init is None else init.folder)
    return rope, factor, inference or factor
