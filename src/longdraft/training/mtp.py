"""Training of MTP drafts around the target's own last layer.

Only the projection and the norms are trained; the layer has the target's weights, and sees the target's keys of that
layer at all positions that the target has read. So a new draft begins where the projection should: with E the embedding
and f_t the last hidden state behind the final norm, least squares fit

    eh_proj([RMSNorm(E(token t + 1)), RMSNorm(f_t)])  to  the target's own input of that layer at position t + 1

over some thousand tokens. A row's error is divided by the size of that input, since a norm follows. Then comes
EAGLE-3's training-time test: row t predicts token t + 2 from the layer's output o,

    o(0, t) = layer(token t + 1, f_t)              sees the target's keys of positions 0 .. t, and its own
    o(i, t) = layer(token t + 1, o(i - 1, t - 1))  sees the target's of 0 .. t - i, and its path's of steps 0 .. i
    loss    = sum over i and t of decay^i * cross-entropy(head(o(i, t)), target's distribution of token t + 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from longdraft.drafters.mtp import KIND, MtpBlock, TrainedMtp
from longdraft.errors import UnsupportedModelError
from longdraft.model import own_layer
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import SharedParts, final_norm
from longdraft.model.stored import unpacked
from longdraft.native import Stored
from longdraft.training.config import DEPTH, MtpConfig
from longdraft.training.drafted_attention import drafted
from longdraft.training.features import Features
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, begin, never, silent
from longdraft.training.trainee import Pack, StepOutput, Trainee

# Added to the diagonal of the normal equations, as a share of its mean.
RIDGE = 5e-2


class BorrowingBlock(MtpBlock):
    """The module with the target's last layer, frozen and neither trained nor saved.

    Args:
        dtype: of the layer's products.
    """

    def __init__(self, runner: TargetRunner, dtype: torch.dtype) -> None:
        super().__init__(runner, sparse=False)
        size = runner.parts.hidden_size
        own = {f"{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "norm")}
        own["eh_proj.weight"] = torch.zeros(size, 2 * size)
        # Out of the module's sight, and so of the optimiser's and the checkpoints'.
        layer = {name: _floats(t) for name, t in own_layer.last_layer(runner.model).items()}
        borrowed = own_layer.put_in(self.layer, layer, runner.device, dtype, int8=False)
        for part in borrowed.modules():  # buffers, since torch's memory tracker takes no frozen parameters
            for name, weight in [*part.named_parameters(recurse=False)]:
                delattr(part, name)
                part.register_buffer(name, weight.detach())
        del self.layer
        vars(self)["layer"] = borrowed
        own_layer.put_in(self, own, runner.device, torch.float32, int8=False).requires_grad_(True)

    @torch.no_grad()
    def fit(self, documents: Iterable[Features], embed: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> None:
        """Fits the projection by least squares, to documents of ``tokens`` tokens together."""
        size = self.eh_proj.in_features
        device = self.eh_proj.weight.device
        products, wanted = torch.zeros(size, size, device=device), torch.zeros(size, size // 2, device=device)
        for document in documents:
            before, last = document.hidden.to(device).float().chunk(2, -1)
            rows = torch.cat([self.enorm(embed(document.tokens[1:])), self.hnorm(self.project(last[:-1]))], -1)
            weight = before[1:].square().mean(-1, keepdim=True).rsqrt()
            weight[0] = 0  # the first token's states are like no other's
            products.addmm_((rows * weight).T, rows * weight)
            wanted.addmm_((rows * weight).T, before[1:] * weight)
            if (tokens := tokens - len(rows)) <= 0:
                break
        products.diagonal().add_(RIDGE * products.diagonal().mean())
        self.eh_proj.weight.copy_(torch.linalg.solve(products, wanted).T)


class MtpTrainee(Trainee):
    """A training step.

    Args:
        rotary: the target's rotary embedding.
        steps: number of steps of the training-time test.
        decay: weight of a step relative to the step before it.
    """

    block: BorrowingBlock
    ahead = 2

    def __init__(
        self,
        block: BorrowingBlock,
        parts: SharedParts,
        kept: torch.Tensor | None,
        steps: int,
        decay: float,
        distill: float,
        product_dtype: torch.dtype,
    ) -> None:
        super().__init__(block, parts, kept, distill, product_dtype)
        self.steps, self.decay = steps, decay

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        """The loss of packed documents, summed over rows and, with their weights, over steps.

        A row takes part in step i if i learned rows come before it. A row whose likeliest token (the target's) is
        outside the draft's vocabulary has no weight. Arguments are those of EAGLE-3's step.
        """
        device = self.device
        pack = self.pack(documents)
        spans = [(first, end) for _, first, end in pack.spans]
        each = list(zip(documents, spans, strict=True))
        x = self.embed(torch.cat([d.tokens[first + 1 : end + 1] for d, (first, end) in each]))
        last = torch.cat([d.hidden[first:end].chunk(2, -1)[1] for d, (first, end) in each])
        g = self.block.project(last.to(device).float())
        # A row stands at the position of its token.
        positions = torch.cat([d.positions[first + 1 : end + 1] for d, (first, end) in each])
        cos, sin = self.parts.rotary(positions.to(device))
        attention = _Steps(pack, device)

        rows = torch.arange(len(x), device=device)
        outputs: list[torch.Tensor] = []
        taking_part: list[torch.Tensor] = []
        for step in range(steps or self.steps):
            if step:
                feeding, fed = (index.to(device) for index in attention.next_step())
                if not len(fed):  # all documents are too short
                    break
                rows, g = rows[fed], self.block.following(outputs[-1][feeding])
            outputs.append(self.layer(self.block, x[rows], g, cos[rows], sin[rows], attention.attend()))
            taking_part.append(rows)

        depths = torch.cat([torch.full_like(each, i + 1) for i, each in enumerate(taking_part)])
        decays = torch.tensor([self.decay**i for i in range(len(outputs))], device=device)[depths - 1]
        labels = self.labels(pack).at(torch.cat(taking_part))
        weight = (labels.likeliest >= 0) * decays
        return self.output(torch.cat(outputs), self.target_head, labels, depths, weight)


class _Steps:
    """Attention of one batch, step after step: to the target's keys, and to those of all steps."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self.counts = pack.counts
        # Of each document, the target's keys and values up to the last row's position.
        self._given = [
            (d.keys[:, : end + 1].to(device), d.values[:, : end + 1].to(device))
            for d, (_, _, end) in zip(pack.documents, pack.spans, strict=True)
        ]
        # Of each step, each document's keys and values.
        self._steps: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def next_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Drops the first row of each document.

        Returns:
            Indices of this step's rows that feed the next step (all but each document's last), and of those that take
            part in it (all but each document's first).
        """
        rows = torch.arange(sum(self.counts)).split(self.counts)
        self.counts = [max(0, n - 1) for n in self.counts]
        return torch.cat([each[:-1] for each in rows]), torch.cat([each[1:] for each in rows])

    def attend(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """This step's attention. It may be called again in the backward pass, when later steps have been."""
        counts, before = self.counts, list(self._steps)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own = list(zip(k.split(counts, 1), v.split(counts, 1), strict=True))
            if len(self._steps) == len(before):
                self._steps.append(own)
            out = []
            for queries, (keys, values), *steps in zip(q.split(counts, 1), self._given, *before, own, strict=True):
                n = queries.shape[1]
                # An earlier step has more rows; nobody sees its last ones any more.
                drafts = [torch.stack([pair[i][:, :n] for pair in steps], 2) for i in (0, 1)]
                given = keys.to(queries.dtype), values.to(queries.dtype)
                out.append(drafted(queries, *given, (drafts[0], drafts[1])) if n else queries)
            return torch.cat(out, 1)

        return attend


def train_mtp(config: MtpConfig, progress: Progress = silent, stop: Callable[[], bool] = never) -> Iterator[Report]:
    """Trains an MTP draft around the target's own last layer; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else TrainedMtp.load(config.init)
    session = begin(config, max(config.ttt, DEPTH), progress, stop)
    runner = session.runner
    depth = runner.depth
    if depth < 2 or runner.recurrent:
        raise UnsupportedModelError("MTP drafts are trained for models of two or more layers, none of them recurrent.")
    block = BorrowingBlock(runner, session.product_dtype)
    kept = session.vocabulary() if init is None else init.ids
    trainee = MtpTrainee(
        block, runner.parts, kept, config.ttt, config.decay, config.distill, session.product_dtype
    )  # fmt: skip
    if init is not None:
        init.check(runner)
        block.load_state_dict({name: t.float() for name, t in init.weights.items()})

    def fit(documents: Iterator[Features]) -> None:
        progress("the projection is fitted", 0, 0)
        block.norm.weight.data.copy_(final_norm(runner.model))
        block.fit(documents, trainee.embed, config.fit_tokens)

    yield from session.train(
        trainee, (depth - 2, depth - 1), KIND, {"trained_length": config.max_length},
        levels=config.ttt, fit=fit if init is None else None, keys=True,
    )  # fmt: skip


def _floats(weight: torch.Tensor | Stored) -> torch.Tensor:
    return unpacked(weight) if isinstance(weight, Stored) else weight.float()
