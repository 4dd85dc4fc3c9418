"""Trains DFlash drafts: the step with its loss (:class:`DFlashTrainer`), and the run (:func:`train_dflash`).

DFlash (arXiv:2602.06036). An anchor is a token of the text, with block_size - 1 mask tokens after it. The block sees
the target's features of all tokens before the anchor, and itself. Its output k predicts the token k after the anchor:

    loss = sum over anchors and k of decay^(k - 1) * cross-entropy(target head(output k), target's distribution)

A step takes a random part of a document's anchors, as a block costs as much as block_size tokens, and weights them so
that the loss is that of all. The block, its features and its masks are those of drafting (:mod:`.drafters.dflash`); the
mask token's embedding is learned. Shapes: N anchors of a document, S tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longdraft.drafters.dflash import DFlashBlock, DFlashDraft
from longdraft.drafters.shared.draft_block import initialize_weights
from longdraft.drafts.dflash_formats import KIND, DFlashShape
from longdraft.drafts.formats import DEFAULT_ROPE_THETA
from longdraft.model.rope import CosSin, RotaryEmbedding, make_rope_parameters
from longdraft.model.shared_parts import SharedParts
from longdraft.training.attention import QUERY_BLOCK, KVPair
from longdraft.training.config import EVAL_DEPTH, DFlashConfig
from longdraft.training.eagle import NOISE_SEEDS
from longdraft.training.eagle3 import new_feature_layers
from longdraft.training.features import Features
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.losses import scale_logits
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import DraftTrainer, StepOutput


class DFlashTrainer(DraftTrainer):
    """A training step of a DFlash block.

    Attributes:
        num_anchors: largest number of anchors of a document in a training step.
    """

    block: DFlashBlock
    label_shift = 2  # the target predicts the anchor from the state before it

    def __init__(
        self, block: DFlashBlock, parts: SharedParts, rotary: Callable[[torch.Tensor], CosSin],
        draft_to_target: torch.Tensor | None, config: DFlashConfig,
    ) -> None:  # fmt: skip
        super().__init__(block, parts, draft_to_target, config)
        self.rotary, self.num_anchors = rotary, config.anchors

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), levels: int | None = None
    ) -> StepOutput:
        """Returns the loss of packed documents. ``depths`` of the result are k.

        Args:
            shifts: the seed of each document's anchors in training.
            levels: largest k; None: all of a block.
        """
        device, shape, batch = self.device, self.block.shape, self.pack(documents)
        size = shape.block_size
        # By document: the anchors' indices among the document's labels, which are in order.
        chosen = [
            self._choose(n, seed) for n, seed in zip(batch.num_labels, shifts or [0] * len(documents), strict=True)
        ]
        starts = torch.tensor(batch.num_labels).cumsum(0) - torch.tensor(batch.num_labels)
        features = batch.gather([d.hidden for d in documents]).to(device, self.matmul_dtype)
        context = self.block.project_features(features).float()
        cos_sin = self.rotary(batch.gather([d.positions for d in documents]).to(device))
        keys, values = (x.split(batch.input_lengths, 2) for x in self.block.keys_values(None, context, *cos_sin))
        # An anchor is one token behind the input that has its label, and sees all inputs up to that one.
        inputs = [span.label_start + i for span, i in zip(batch.spans, chosen, strict=True)]
        anchors = [(d.token_ids[i + 1], d.positions[i + 1]) for d, i in zip(documents, inputs, strict=True)]
        token_ids, positions = (torch.cat(x).to(device) for x in zip(*anchors, strict=True))
        mask = self.block.mask_embedding if shape.own_mask else self.embed(torch.tensor([shape.mask_token]))
        x = torch.cat([self.embed(token_ids)[:, None], mask.expand(len(token_ids), size - 1, -1)], 1)
        cos, sin = self.rotary((positions[:, None] + torch.arange(size, device=device)).flatten())
        h = x.flatten(0, 1)
        counts = [(i + 1).to(device) for i in inputs]
        for i, layer in enumerate(self.block.draft_layers):
            attend = partial(self._attend, i, keys, values, counts)
            h = self.run_layer(layer.run_layer, layer.input_layernorm(h), h, cos, sin, attend)
        out = self.block.norm(h).unflatten(0, (-1, size))

        index = torch.cat([start + i for start, i in zip(starts, chosen, strict=True)])
        num_left = torch.cat([n - i for n, i in zip(batch.num_labels, chosen, strict=True)])  # labels from the anchor's
        scales = torch.cat([torch.full((len(i),), n / len(i)) for n, i in zip(batch.num_labels, chosen, strict=True)])
        rows = [(num_left >= k).nonzero()[:, 0] for k in range(1, min(levels or size, size - 1) + 1)]
        hidden = torch.cat([out[row.to(device), k] for k, row in enumerate(rows, 1)])
        labels = self.make_labels(batch, torch.cat([index[row] + k for k, row in enumerate(rows)]).to(device))
        depths = torch.cat([torch.full_like(row, k) for k, row in enumerate(rows, 1)]).to(device)
        weights = torch.cat([scales[row] for row in rows]).to(device) * self.decay ** (depths - 1)
        head = self.block.lm_head.weight.to(self.matmul_dtype) if shape.own_head else self.target_head
        return self.compute_loss(hidden, head, labels, depths, weights)

    def _choose(self, count: int, seed: int) -> torch.Tensor:
        """Returns the indices of a document's anchors, of ``count`` possible ones: all, or in training some."""
        if not self.training or count <= self.num_anchors:
            return torch.arange(count)
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: self.num_anchors].sort().values

    def _attend(
        self, layer: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], counts: Sequence[torch.Tensor],
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Computes the attention of all blocks, (Hq, tokens, d), in parts that the backward pass computes again.

        Args:
            keys, values: by document, of the context, (layers, Hkv, L, d).
            counts: by document, (N,) number of keys of the context that each block sees.
        """
        block, out = self.block, []
        size = block.shape.block_size
        lengths, part_size = [len(n) * size for n in counts], max(1, QUERY_BLOCK // size)
        for context_k, context_v, seen, *qkv in zip(
            keys, values, counts, *(x.split(lengths, 1) for x in (q, k, v)), strict=True
        ):
            parts = zip(seen.split(part_size), *(x.split(part_size * size, 1) for x in qkv), strict=True)
            context, options = (context_k[layer], context_v[layer]), (size, block.causal[layer], block.windows[layer])
            for part_seen, *part in parts:
                arguments = part_seen, context, *part, *options
                out.append(checkpoint(_attend_blocks, *arguments, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(out, 1)


def _attend_blocks(
    seen: torch.Tensor, context: KVPair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, causal: bool,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Computes the attention of some blocks of ``size`` tokens to the first ``seen`` keys of a context (of which the
    last ``window``), and to the tokens of the same block: if ``causal``, to none after the query."""
    end, index = int(seen.max()), torch.arange(q.shape[1], device=q.device)
    position, seen = torch.arange(end, device=q.device), seen[:, None]
    in_context = (position < seen) & (position >= seen - (window or end))
    in_block = index[:, None] // size == index // size
    in_block = in_block & (index[:, None] >= index) if causal else in_block
    mask = torch.cat([in_context.repeat_interleave(size, 0), in_block], 1)
    k, v = (torch.cat([c[:, :end].to(q.dtype), x.to(q.dtype)], 1) for c, x in zip(context, (k, v), strict=True))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k, v, mask)[0]


def train_dflash(config: DFlashConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains a DFlash draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else DFlashDraft.load(config.init)
    block_size = config.block_size if init is None else init.shape.block_size
    session = TrainingSession(config, levels=max(block_size - 1, EVAL_DEPTH), progress=progress, stop=stop)
    runner = session.runner
    rope = make_rope_parameters(float(runner.shared_parts.description.get("rope_theta") or DEFAULT_ROPE_THETA))
    if init is None:
        layers, draft_to_target = new_feature_layers(config.feature_layers, runner), session.vocabulary()
        shape = DFlashShape(
            **session.draft_sizes(), feature_size=len(layers) * runner.shared_parts.hidden_size,
            vocabulary=runner.vocab_size if draft_to_target is None else len(draft_to_target),
            decoder_layers=config.layers, block_size=block_size, own_mask=True,
            mask_token=1,  # a folder names one, but the draft has an embedding of its own
        )  # fmt: skip
        block = DFlashBlock(shape, runner.vocab_size, [False] * config.layers, [None] * config.layers)
        initialize_weights(block, config.seed)
    else:
        init.check(runner)
        layers, draft_to_target, rope = init.feature_layers(runner), init.draft_to_target_ids, init.rope
        block = init.trainable_module()
    trainer = DFlashTrainer(
        block,
        runner.shared_parts,
        RotaryEmbedding(block.shape.head_dim, rope, device=runner.device),
        draft_to_target,
        config,
    )
    if init is None:
        scale_logits(block.norm, trainer.target_head)
    draft_config = asdict(block.shape) | {
        "feature_layers": list(layers),
        "causal": block.causal,
        "windows": block.windows,
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    levels = block_size - 1
    yield from TrainingLoop(
        session, trainer, layers, KIND, draft_config, levels=levels, eval_levels=min(EVAL_DEPTH, levels),
        max_shift=NOISE_SEEDS,
    ).run()  # fmt: skip
