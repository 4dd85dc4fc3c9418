"""How an EAGLE-3 draft is trained: the training-time test, from a few documents' features to a loss, and a whole run.

Step 0 is the draft behind the target's own features. Step i > 0 stands in for the draft's i-th token beyond them: a
row's g is the draft's output of the step before, one row back, while its token stays the text's. Every row goes through
every step, and sees just what it will see when drafting (:mod:`longdraft.training.drafted_attention`).

Row t joins the features of position t with token t+1 and says token t+2; its rotary position is t's in every step.

The same run adapts a draft to long text (SpecPV, section 4.1): ``init`` names a draft of short texts, in any layout
that decodes; ``rope_factor`` stretches its positions with YaRN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.drafters.eagle3_draft import Eagle3Draft
from longdraft.drafters.eagle3_formats import KIND, THETA, stretched, usual_layers
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.parts import SharedParts
from longdraft.model.rotary import Rotary, yarn
from longdraft.training.config import DEPTH, Eagle3Config
from longdraft.training.drafted_attention import drafted
from longdraft.training.features import Features
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin, never, silent
from longdraft.training.trainee import StepOutput, Trainee
from longdraft.training.vocabulary import rows_of

# Size of a fresh fc's random part, against what passes through.
REST = 0.3


class Eagle3Trainee(Trainee):
    """The block with what it borrows from the target. The block alone has parameters, its head among them.

    Args:
        rotary: the draft's own.
        steps: of the training-time test. decay: weight of a step, against the one before.
        retain: share of a batch's documents that goes on from a step to the next: later steps then cost less, and weigh
            less (conditional drop of P-EAGLE, arXiv:2602.01469, by document).
        window: keys of its own that a row sees, its own included; None for all.
        kept, distill, product_dtype: as :class:`~longdraft.training.trainee.Trainee` takes them; the dtype is that of
            the features too.
    """

    ahead = 2  # the token after the row's is the one that the draft reads
    slides = True  # the window of a later step's row ends with that row, as a node's does in drafting

    def __init__(
        self,
        block: Eagle3Block,
        parts: SharedParts,
        rotary: Rotary,
        kept: torch.Tensor | None = None,
        steps: int = 5,
        decay: float = 0.8,
        window: int | None = None,
        distill: float = 1.0,
        product_dtype: torch.dtype = torch.float32,
        retain: float = 1.0,
    ) -> None:
        super().__init__(parts, kept, distill, product_dtype)
        self.block, self.retain = block, retain
        self.steps, self.decay, self.window, self._rotary = steps, decay, window, rotary

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, summed over rows and, with their weights, over steps.

        Documents lie end to end, and none sees another. A row takes part in step i when it has i learned rows before
        it. Rows whose likeliest token (the target's) the draft cannot say teach nothing.

        Args:
            shifts: not used: every row goes through every step.
            steps: another number of steps than training's, for measuring.

        Returns:
            ``depths`` are 1 for step 0, and so on.
        """
        ids, features, positions, queries = [], [], [], []
        firsts: list[int] = []
        lengths: list[int] = []
        counts: list[int] = []
        for document in documents:
            first, end = self.bounds(document)
            low = 0 if self.window is None else max(0, first - self.window + 1)
            ids.append(document.tokens[low + 1 : end + 1])
            features.append(document.hidden[low:end])
            positions.append(document.positions[low:end])
            queries.append(torch.arange(first - low, end - low) + sum(lengths))
            firsts.append(first)
            lengths.append(end - low)
            counts.append(end - first)
        device = self._to_draft.device
        said = self.said(documents, firsts)
        with torch.no_grad():
            x = self._parts.embedding(torch.cat(ids).to(device)).float()
            cos, sin = self._rotary(torch.cat(positions).to(device))

        # Float32: sums of the residual stream are; the products are autocast's.
        g = self.block.project(torch.cat(features).to(device, self._product_dtype)).float()
        attention = _Steps(lengths, counts, self.window, self.slides)
        out = self.block(x, g, cos, sin, attention, torch.cat(queries).to(device))
        outputs, rows = [out], [torch.arange(sum(counts), device=device)]
        x, g, cos, sin = (t[torch.cat(queries).to(device)] for t in (x, g, cos, sin))
        for step in range(1, steps or self.steps):
            kept = len(documents) * (self.retain**step if self.training else 1)
            fed, following = (index.to(device) for index in attention.next_step(max(1, round(kept))))
            if not len(following):  # short documents alone
                break
            x, g = self.feed(x, g, out, fed, following)
            cos, sin = cos[following], sin[following]
            out = self.block(*self.enter(step, x, g), cos, sin, attention)
            outputs.append(out)
            rows.append(rows[-1][following])
        decays = [torch.full((len(r),), self.decay**i, device=device) for i, r in enumerate(rows)]
        depths = torch.cat([torch.full((len(r),), i + 1, device=device) for i, r in enumerate(rows)])
        row = torch.cat(rows)
        said = said.at(row)
        weight = (said.likely[:, :1] >= 0) * torch.cat(decays)[:, None]
        before = torch.cat([d.tokens[first + 1 : -1] for d, first in zip(documents, firsts, strict=True)])
        hidden, head = self.heads(self.block.norm(torch.cat(outputs)), self._to_draft[before.to(device)][row])
        return self.output(hidden, head, said, depths, weight)

    def feed(
        self, x: torch.Tensor, g: torch.Tensor, out: torch.Tensor, fed: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next step's embeddings and g, from this step's, its outputs, and which rows are fed to which."""
        return x[following], out[fed]

    def enter(self, step: int, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the block is given in a step, from what :meth:`feed` gave."""
        return x, g

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States (N, size) and the head (V', size) that they are multiplied with.

        Args:
            before: (N,) draft ids of the tokens before those that are said; -1 where the draft has none.
        """
        return hidden, self.block.lm_head.weight.to(self._product_dtype)


class _Steps:
    """Attention of one batch, step after step: remembers every step's keys.

    Args:
        lengths: rows of each document. counts: how many of them, the last ones, are learned.
        window: keys that a row of step 0 sees. slides: so does one of a later step, its own among them; else it sees
            what its anchor sees, and the later steps' keys beside that.
    """

    def __init__(self, lengths: list[int], counts: list[int], window: int | None, slides: bool) -> None:
        self.lengths, self.counts, self.window, self.slides = lengths, counts, window, slides
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._later: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in lengths]

    def next_step(self, documents: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every document loses its first row, and all but so many of them, the first, their other rows.

        Returns:
            Among the rows until now, those whose output is fed (all but each document's last), and those that are left
            (all but its first).
        """
        at = torch.arange(sum(self.counts)).split(self.counts)
        fed, left = (torch.cat([i[part] for i in at[:documents]]) for part in (slice(-1), slice(1, None)))
        self.counts = [max(0, n - 1) if d < documents else 0 for d, n in enumerate(self.counts)]
        return fed, left

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        if not self._first:
            each = zip(k.split(self.lengths, 1), v.split(self.lengths, 1), strict=True)
            self._first = [(k.contiguous(), v.contiguous()) for k, v in each]
        else:
            for kept, *pair in zip(self._later, k.split(self.counts, 1), v.split(self.counts, 1), strict=True):
                kept.append((pair[0], pair[1]))
        out = []
        for d, mine in enumerate(q.split(self.counts, 1)):
            if mine.shape[1] == 0:
                out.append(mine)
                continue
            # Step s has s - 1 rows more than this one, the last of which nobody sees any more.
            n = mine.shape[1]
            later = [torch.stack([pair[i][:, :n] for pair in self._later[d]], 2) for i in (0, 1) if self._later[d]]
            window = self.window
            if window is not None and not self.slides:
                window += len(self._later[d])
            out.append(drafted(mine, *self._first[d], (later[0], later[1]) if later else None, window))
        return torch.cat(out, 1)


@dataclass(frozen=True)
class Plan:
    """What a run trains, and what its folder will say.

    Attributes:
        kept: target ids of the draft's vocabulary, None for all.
        layers: decoder layers whose output is read.
        rope: RoPE's parameters in training, as transformers names them.
        rope_factor: YaRN's in training, rope_factor_inference: to decode with; None where nothing is stretched, or a
            published draft stretches its positions in a way of its own.
    """

    block: Eagle3Block
    kept: torch.Tensor | None
    layers: tuple[int, ...]
    window: int | None
    rope: dict[str, Any]
    rope_factor: float | None = None
    rope_factor_inference: float | None = None

    def described(self, config: Eagle3Config) -> dict[str, Any]:
        """As the draft's config.json has it."""
        rope, factor = self.rope, self.rope_factor
        own = factor is not None or rope["rope_type"] == "default"
        return self.block.shape.as_dict() | {
            "feature_layers": list(self.layers),
            "draft_vocab_size": self.block.shape.vocabulary,
            "window": self.window,
            "rope_theta": rope["rope_theta"],
            "rope_factor": self.rope_factor_inference,
            "rope_factor_trained": factor,
            "rope_original_length": None if factor is None else rope["original_max_position_embeddings"],
            "trained_length": config.max_length,
            **({} if own else {"rope_parameters": rope}),
        }


def train_eagle3(
    config: Eagle3Config, progress: Progress = silent, stop: Callable[[], bool] = never
) -> Iterator[Report]:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, section 4.1), as :mod:`longdraft.training.session` says."""
    return run(config, KIND, Eagle3Trainee, lambda block: block, progress, stop)


def run(
    config: Eagle3Config,
    kind: str,
    trained: type[Eagle3Trainee],
    shaped: Callable[[Eagle3Block], Eagle3Block],
    progress: Progress,
    stop: Callable[[], bool],
) -> Iterator[Report]:
    """Trains a draft of EAGLE-3's make.

    Args:
        kind: of draft. trained: its step. shaped: its block, from EAGLE-3's.
    """
    # Read before the target is: a folder that will not do is said at once.
    init = None if config.init is None else _read(config.init, kind)
    # A row for every step, the steps of measuring included.
    session = begin(config, max(config.ttt, DEPTH), progress, stop)
    runner = session.runner
    plan = _plan(config, session) if init is None else _further(config, init, session)
    plan = replace(plan, block=shaped(plan.block))
    reader = session.reader(plan.layers)
    if (source := session.source(reader)) is None:
        return
    if init is None:
        fit(plan.block, source[0], len(plan.layers))
    trainee = trained(
        plan.block,
        runner.parts,
        Rotary(plan.block.shape.head_dim, plan.rope, device=runner.device),
        plan.kept,
        config.ttt,
        config.decay,
        plan.window,
        config.distill,
        session.product_dtype,
        config.retain,
    )
    yield from session.train(trainee, reader, source, kind, plan.described(config), levels=config.ttt)


def fit(block: Eagle3Block, document: Features, layers: int) -> None:
    """Fits a fresh block to its target: logits of the right size, features as loud as each other.

    Layers differ by orders of magnitude, so ``fc`` is divided by the size of what it reads; by the median over a text,
    for the first token's states can be a thousand times the others'. The latest layer, nearest to the head, passes
    through beside the random rest. The last norm makes logits of unit size: with the target's rows for a head and unit
    weights, a fresh draft is as sure as the target and always wrong, and takes a hundred steps to unlearn that.
    """
    features = document.hidden.cpu().float().chunk(layers, dim=-1)
    sizes = [part.square().mean(-1).sqrt().median().clamp_min(1e-6) for part in features]
    with torch.no_grad():
        columns = block.fc.weight.chunk(layers, dim=1)
        for part, size in zip(columns, sizes, strict=True):
            part.mul_(REST / size)
        columns[-1].add_(torch.eye(block.shape.hidden_size) / sizes[-1])
        block.norm.weight.fill_(1 / float(block.lm_head.weight.norm(dim=-1).median().clamp_min(1e-6)))


def default_layers(layers: int) -> tuple[int, ...]:
    """Those that EAGLE-3 reads.

    Raises:
        ConfigError: the target has too few layers to tell them apart.
    """
    found = usual_layers(layers)
    if not 0 <= found[0] < found[1] < found[2]:
        raise ConfigError(f"A target of {layers} layers has no layers {found}: set feature_layers.")
    return found


def _plan(config: Eagle3Config, session: Session) -> Plan:
    """A new draft."""
    runner = session.runner
    parts, kv = runner.parts, runner.kv_shape
    layers = config.feature_layers or default_layers(kv.layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < kv.layers:
        raise ConfigError(
            f"feature_layers {list(layers)} are not increasing indices of the target's {kv.layers} layers."
        )
    kept = session.vocabulary()
    shape = Eagle3Shape(
        parts.hidden_size,
        config.intermediate_size or parts.intermediate_size,
        parts.heads,
        kv.kv_heads,
        kv.head_dim,
        len(layers) * parts.hidden_size,
        runner.vocab_size if kept is None else len(kept),
        parts.rms_norm_eps,
    )
    block = Eagle3Block(shape)
    block.initialise(config.seed, head=rows_of(parts.head, kept).cpu())
    theta = config.rope_theta or parts.description.get("rope_theta") or THETA
    factor, length = config.rope_factor, config.rope_original_length
    if factor is not None and length is None:
        raise ConfigError("rope_factor without init needs rope_original_length: the length that it stretches.")
    rope = yarn(float(theta), factor, length)
    return Plan(block, kept, layers, config.window, rope, factor, config.rope_factor_inference or factor)


def _read(folder: str, kind: str) -> Eagle3Draft:
    """The draft to start from: of the run's kind, or EAGLE-3's."""
    found = kind_of(folder)
    if found.name not in (KIND, kind):
        raise CheckpointError(f"{folder} holds a draft for {found.name}, not for {kind}.")
    init = found.load(folder)
    assert isinstance(init, Eagle3Draft)
    return init


def _further(config: Eagle3Config, init: Eagle3Draft, session: Session) -> Plan:
    """A draft as it is: it keeps its sizes, vocabulary and layers, and its positions where no setting changes them."""
    init.check(session.runner)
    layers = init.feature_layers(session.runner)
    if config.feature_layers and config.feature_layers != layers:
        raise ConfigError(f"feature_layers {config.feature_layers}: the draft in init reads {layers}; leave it out.")
    window = config.window if "window" in config.fields_set else init.window
    own, rope = init.config, init.rope
    factor, inference = config.rope_factor, config.rope_factor_inference or config.rope_factor
    if factor is None:
        factor, inference = own.get("rope_factor_trained") or own.get("rope_factor"), own.get("rope_factor")
    length = own.get("rope_original_length") or init.trained_length
    if factor is not None:
        if config.rope_original_length is not None:
            rope = rope | {"original_max_position_embeddings": config.rope_original_length}
        if not (rope.get("original_max_position_embeddings") or length):
            raise ConfigError(f"{init.folder} does not say how long its texts were: set rope_original_length.")
    rope = stretched(rope, length, config.rope_theta, factor, init.folder)
    return Plan(init.trainable(), init.ids, layers, window, rope, factor, inference)
