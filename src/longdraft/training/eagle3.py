"""Training of EAGLE-3 drafts: the step with its loss (:class:`Eagle3Trainee`), and the run (:func:`train_eagle3`).

EAGLE-3, section 3, training-time test. Row t joins the target's features of position t with the embedding of token
t + 1 and predicts token t + 2; its rotary position is t in every step. With f the block and o(i, t) its output:

    o(0, t) = f(token t + 1, features of t)
    o(i, t) = f(token t + 1, o(i - 1, t - 1))        for steps i > 0, as when the draft reads its own output
    loss    = sum over i and t of decay^i * cross-entropy(head(norm(o(i, t))), target's distribution of token t + 2)

Every row sees the keys it will see when drafting (:mod:`longdraft.training.attention`).

The same run adapts a draft to long text (SpecPV, appendix A): ``init`` names a draft of short texts in any layout that
longdraft decodes, and ``rope_factor`` stretches its positions with YaRN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafts.eagle_formats import KIND, Eagle3Shape, usual_layers
from longdraft.drafts.formats import THETA, stretched
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.shared_parts import SharedParts
from longdraft.training.attention import Pair, attend
from longdraft.training.config import DEPTH, Eagle3Config, RunConfig
from longdraft.training.features import Features
from longdraft.training.loop import Report
from longdraft.training.session import Progress, Session, Stop, begin, never, silent
from longdraft.training.trainee import Attention, Pack, StepOutput, Trainee
from longdraft.training.vocabulary import rows_of

# Size of the random part of a fresh fc, relative to the layer that passes through.
NOISE = 0.3


class Eagle3Trainee(Trainee):
    """A training step of an EAGLE-3 block, which has a head of its own.

    Args:
        rotary: the draft's own rotary embedding.
        window: keys of its own that a row sees, the row included; None for all.

    Attributes:
        steps: of the training-time test.
        retain: share of a batch's documents that goes on from each step to the next. Less makes later steps cheaper and
            gives them less weight (conditional drop of P-EAGLE, arXiv:2602.01469, by document).
    """

    block: Eagle3Block
    ahead = 2
    slides = True
    """The window of a later step's row ends with that row, as a node's does in drafting."""
    steps, retain = 1, 1.0

    def __init__(
        self,
        block: Eagle3Block,
        parts: SharedParts,
        rotary: Rotary,
        kept: torch.Tensor | None,
        config: RunConfig,
        window: int | None = None,
    ) -> None:
        super().__init__(block, parts, kept, config)
        self.rotary, self.window = rotary, window
        if isinstance(config, Eagle3Config):
            self.steps, self.retain = config.ttt, config.retain

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        """The loss of packed documents, summed over rows and, with their weights, over steps.

        A row takes part in step i if i learned rows come before it. A row whose likeliest token (the target's) is
        outside the draft's vocabulary has no weight.

        Args:
            shifts: not used; every row goes through every step.
            steps: number of steps if not the one for training (for measuring).

        Returns:
            ``depths`` are 1 for step 0, and so on.
        """
        device = self.device
        pack = self.pack(documents, before=None if self.window is None else self.window - 1)
        learned = pack.learned.to(device)
        x = self.embed(pack.rows([d.tokens for d in documents], ahead=1))
        cos, sin = self.rotary(pack.rows([d.positions for d in documents]).to(device))
        g = self.states(pack, shifts)
        attention = _Steps(pack.lengths, pack.counts, self.window, self.slides)

        first = self.layer(self.block, x, g, cos, sin, [attention.attend()], learned)
        outputs, rows = [first], [torch.arange(len(learned), device=device)]
        x, g, cos, sin = (t[learned] for t in (x, g, cos, sin))
        for step in range(1, steps or self.steps):
            retained = len(documents) * (self.retain**step if self.training else 1)
            feeding, fed = (index.to(device) for index in attention.next_step(max(1, round(retained))))
            if not len(fed):  # all documents are too short
                break
            row = rows[-1][fed]
            inputs = self.inputs(step, x, g, row, outputs[-1][feeding])
            outputs.append(self.layer(self.block, *inputs, cos[row], sin[row], [attention.attend()]))
            rows.append(row)

        depths = torch.cat([torch.full_like(each, i + 1) for i, each in enumerate(rows)])
        decays = torch.tensor([self.decay**i for i in range(len(rows))], device=device)[depths - 1]
        row = torch.cat(rows)
        labels = self.labels(pack).at(row)
        weight = (labels.likeliest >= 0) * decays
        tokens = torch.cat([d.tokens[first + 1 : -1] for d, (_, first, _) in zip(documents, pack.spans, strict=True)])
        out = torch.cat(outputs)
        hidden, head = self.heads(self.block.norm(out), self.to_draft[tokens.to(device)][row])
        return self.loss(pack, out, self.output(hidden, head, labels, depths, weight))

    def states(self, pack: Pack, shifts: Sequence[int]) -> torch.Tensor:
        """The projected features (rows, hidden) of the computed rows."""
        features = pack.rows([d.hidden for d in pack.documents]).to(self.device, self.product_dtype)
        # Sums of the residual stream are float32; autocast decides about the products.
        return self.block.project(features).float()

    def loss(self, pack: Pack, out: torch.Tensor, said: StepOutput) -> StepOutput:
        """The result of a step, from all steps' outputs o and the cross-entropy of what they say."""
        return said

    def inputs(
        self, step: int, x: torch.Tensor, g: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's two inputs in a later step.

        Args:
            x, g: embeddings and projected features of the learned rows, the inputs of step 0.
            rows: the rows of this step among them.
            previous: for each of these, the last step's output of the row before it.
        """
        return x[rows], self.block.following(previous)

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States (N, size), and the head (V', size) that they are multiplied with.

        Args:
            before: (N,) draft ids of the tokens before the predicted ones; -1 where the vocabulary lacks the token.
        """
        return hidden, self.block.lm_head.weight.to(self.product_dtype)


class _Steps:
    """Attention of one batch, step after step. It keeps the keys of all steps.

    Args:
        lengths, counts: rows of each document, and how many of them, the last ones, are learned.
        window: keys that a row of step 0 sees.
        slides: rows of later steps see ``window`` keys too, their own included. Otherwise they see what their anchor
            sees, and the later steps' keys beside it.
    """

    def __init__(self, lengths: list[int], counts: list[int], window: int | None, slides: bool) -> None:
        self.lengths, self.counts, self.window, self.slides = lengths, counts, window, slides
        # Of each step, each document's keys and values.
        self._steps: list[list[Pair]] = []

    def next_step(self, documents: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Drops the first row of each document, and all rows of all but the first ``documents`` documents.

        Returns:
            Indices of this step's rows that feed the next step (all but each document's last), and of those that take
            part in it (all but each document's first).
        """
        rows = torch.arange(sum(self.counts)).split(self.counts)[:documents]
        self.counts = [max(0, n - 1) if d < documents else 0 for d, n in enumerate(self.counts)]
        return torch.cat([each[:-1] for each in rows]), torch.cat([each[1:] for each in rows])

    def attend(self) -> Attention:
        """This step's attention. It may be called again in the backward pass, when later steps have been."""
        counts, before = self.counts, list(self._steps)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
            own = counts if before else self.lengths
            pairs = list(zip(k.split(own, 1), v.split(own, 1), strict=True))
            if not before:
                pairs = [(k.contiguous(), v.contiguous()) for k, v in pairs]
            if len(self._steps) == len(before):
                self._steps.append(pairs)
            each = zip(q.split(counts, 1), zip(*before, pairs, strict=True), strict=True)
            return torch.cat([self._drafted(queries, *steps) for queries, steps in each], 1)

        return attention

    def _drafted(self, q: torch.Tensor, first: Pair, *steps: Pair) -> torch.Tensor:
        """One document's attention, to its keys and values of step 0 and of later steps."""
        n, window = q.shape[1], self.window
        if n == 0:
            return q
        if window is not None and not self.slides:
            window += len(steps)
        if not steps:
            return attend(q, *first, 0, window)
        # An earlier step has more rows; nobody sees its last ones any more.
        keys, values = (torch.stack([pair[i][:, :n] for pair in steps], 2) for i in (0, 1))
        return attend(q, *first, len(steps), window, (keys, values))


class Plan(NamedTuple):
    """The draft that a run trains.

    Attributes:
        kept: target ids of the draft's vocabulary; None for all.
        layers: decoder layers whose output the draft reads.
        rope: RoPE's parameters in training, named as in transformers.
        rope_factor, rope_factor_inference: YaRN's factor in training and in decoding. None if nothing is stretched, or
            if a published draft stretches its positions in another way.
    """

    block: Eagle3Block
    kept: torch.Tensor | None
    layers: tuple[int, ...]
    window: int | None
    rope: dict[str, Any]
    rope_factor: float | None = None
    rope_factor_inference: float | None = None

    def described(self, config: Eagle3Config) -> dict[str, Any]:
        """The draft's config.json."""
        rope, factor = self.rope, self.rope_factor
        ours = factor is not None or rope["rope_type"] == "default"
        return self.block.shape.as_dict() | {
            "feature_layers": list(self.layers),
            "draft_vocab_size": self.block.shape.vocabulary,
            "window": self.window,
            "rope_theta": rope["rope_theta"],
            "rope_factor": self.rope_factor_inference,
            "rope_factor_trained": factor,
            "rope_original_length": None if factor is None else rope["original_max_position_embeddings"],
            "trained_length": config.max_length,
            **({} if ours else {"rope_parameters": rope}),
        }


def train_eagle3(config: Eagle3Config, progress: Progress = silent, stop: Stop = never) -> Iterator[Report]:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, appendix A); see :mod:`longdraft.training.session`."""
    return run(config, KIND, Eagle3Trainee, lambda block: block, progress, stop)


def run(
    config: Eagle3Config,
    kind: str,
    trainee_class: type[Eagle3Trainee],
    adapt: Callable[[Eagle3Block], Eagle3Block],
    progress: Progress,
    stop: Stop,
) -> Iterator[Report]:
    """Trains a draft whose layer is EAGLE-3's.

    Args:
        kind: kind of draft. trainee_class: its training step.
        adapt: makes the block to train from EAGLE-3's block.
    """
    # Before the target is loaded, so that a wrong folder is reported at once.
    init = None if config.init is None else _read(config.init, kind)
    # A document needs a row for every step, those of measuring included.
    session = begin(config, max(config.ttt, DEPTH), progress, stop)
    runner = session.runner
    plan = _new(config, session) if init is None else _further(config, init, session)
    plan = plan._replace(block=adapt(plan.block))
    rotary = Rotary(plan.block.shape.head_dim, plan.rope, device=runner.device)
    trainee = trainee_class(plan.block, runner.parts, rotary, plan.kept, config, plan.window)
    scale = None if init is not None else partial(fit, plan.block, len(plan.layers))
    yield from session.train(trainee, plan.layers, kind, plan.described(config), levels=config.ttt, fit=scale)


def fit(block: Eagle3Block, layers: int, document: Features) -> None:
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
            part.mul_(NOISE / size)
        columns[-1].add_(torch.eye(block.shape.hidden_size) / sizes[-1])
        block.norm.weight.fill_(1 / float(block.lm_head.weight.norm(dim=-1).median().clamp_min(1e-6)))


def _new(config: Eagle3Config, session: Session) -> Plan:
    runner = session.runner
    parts, count = runner.parts, runner.depth
    layers = config.feature_layers or usual_layers(count)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise ConfigError(
            f"Set feature_layers to increasing indices of the target's {count} layers, not {list(layers)}."
        )
    kept = session.vocabulary()
    feature_size, vocabulary = len(layers) * parts.hidden_size, runner.vocab_size if kept is None else len(kept)
    block = Eagle3Block(Eagle3Shape(**session.sizes(), feature_size=feature_size, vocabulary=vocabulary))
    block.initialise(config.seed, head=rows_of(parts.head, kept).cpu())
    theta = config.rope_theta or parts.description.get("rope_theta") or THETA
    factor, length = config.rope_factor, config.rope_original_length
    if factor is not None and length is None:
        raise ConfigError("rope_factor without init needs rope_original_length: the length that it stretches.")
    rope = yarn(float(theta), factor, length)
    return Plan(block, kept, layers, config.window, rope, factor, config.rope_factor_inference or factor)


def _read(folder: str, kind: str) -> Eagle3Draft:
    """The draft to start from, which is of the run's kind or EAGLE-3's."""
    its_kind = kind_of(folder)
    if its_kind.name not in (KIND, kind):
        raise CheckpointError(f"{folder} holds a draft for {its_kind.name}, not for {kind}.")
    init = its_kind.load(folder)
    assert isinstance(init, Eagle3Draft)
    return init


def _further(config: Eagle3Config, init: Eagle3Draft, session: Session) -> Plan:
    """The draft in ``init`` with its sizes, vocabulary and layers, and its positions unless a setting changes them."""
    init.check(session.runner)
    if init.shape.embedding is not None or init.shape.decoder_layers > 1:
        raise ConfigError(f"{init.folder} has an embedding of its own or several layers, which training does not know.")
    layers = init.feature_layers(session.runner)
    if config.feature_layers and config.feature_layers != layers:
        raise ConfigError(f"feature_layers {config.feature_layers}: the draft in init reads {layers}; leave it out.")
    window = config.window if "window" in config.fields_set else init.window
    described, rope = init.config, init.rope
    factor, inference = config.rope_factor, config.rope_factor_inference or config.rope_factor
    if factor is None:
        inference = described.get("rope_factor")
        factor = described.get("rope_factor_trained") or inference
    length = described.get("rope_original_length") or init.trained_length
    if factor is not None:
        if config.rope_original_length is not None:
            rope = rope | {"original_max_position_embeddings": config.rope_original_length}
        if not (rope.get("original_max_position_embeddings") or length):
            raise ConfigError(f"{init.folder} does not say how long its texts were: set rope_original_length.")
    rope = stretched(rope, length, config.rope_theta, factor, init.folder)
    return Plan(init.trainable(), init.ids, layers, window, rope, factor, inference)
