"""A random draft of every kind, its training step, and its predictions in drafting, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from longdraft.drafters.dflash import DFlashBlock
from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafters.heads import HeadsBlock, HeadsShape
from longdraft.drafters.longspec import LongSpecBlock, LongSpecShape
from longdraft.drafters.mtp import MtpBlock
from longdraft.drafts import small_llama
from longdraft.drafts.dflash_formats import DFlashShape
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.model.rope import RotaryEmbedding, make_rope_parameters
from longdraft.model.runner import TargetRunner
from longdraft.training.config import DFlashConfig, Eagle3Config, HeadsConfig, MtpConfig, RunConfig
from longdraft.training.dflash import DFlashTrainer
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.features import Features
from longdraft.training.heads import HeadsTrainer
from longdraft.training.lm import LmTrainer
from longdraft.training.longspec import LongSpecTrainer
from longdraft.training.mtp import MtpTrainer
from longdraft.training.trainer import DraftTrainer
from tests.training.helpers import masked_attention

KINDS = ("longspec", "eagle3", "mtp", "dflash", "tokenswift", "lm")
# What each kind reads of the target: hidden states of layers, the last layer's KV, nothing.
READS = {
    "longspec": (),
    "eagle3": (0, 1, 2),
    "mtp": (2,),
    "dflash": (0, 2),
    "tokenswift": (2,),
    "lm": None,
}
WINDOW, STEPS, DECAY = 7, 4, 0.7


def filled(block: nn.Module) -> nn.Module:
    """Fills a module so that every part matters: no weight is zero, no norm is one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in block.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return block


def random_block(
    kind: str, runner: TargetRunner, vocabulary: int = 61, before: bool = False, norm_output: bool = False
):
    """A module for the tiny target; EAGLE-3's has head counts of its own. ``before``: a norm before its fc."""
    eps = runner.shared_parts.rms_norm_eps
    eagle3 = Eagle3Shape(48, 64, 4, 2, 8, 48 * 3, vocabulary, eps, before, True, norm_output=norm_output)
    if kind == "longspec":
        kv = runner.kv_shape
        shape = LongSpecShape(48, 64, runner.shared_parts.num_heads, kv.kv_heads, kv.head_dim, eps, WINDOW, False)
        return filled(LongSpecBlock(shape))
    if kind == "eagle3":
        return filled(Eagle3Block(eagle3))
    if kind == "dflash":
        shape = DFlashShape(48, 64, 4, 2, 8, 96, vocabulary, 2, STEPS + 1, 1, rms_norm_eps=eps, own_mask=True)
        return filled(DFlashBlock(shape, runner.vocab_size, [False, True], [None, 6]))
    if kind == "mtp":
        return filled(MtpBlock(runner, has_experts=False).to_empty(device="cpu"))
    if kind == "tokenswift":
        return filled(HeadsBlock(HeadsShape(48, 3, eps)))
    return filled(small_llama.build_decoder(small_llama.small_llama_config(runner, 2, 64, 1e4, 64)))


def make_trainer(
    kind: str,
    runner: TargetRunner,
    kept: torch.Tensor | None = None,
    distill: float = 0.0,
    window: int | None = None,
    rope: dict | None = None,
    **block: object,
) -> DraftTrainer:
    module = random_block(kind, runner, 61 if kept is None else len(kept), **block)
    common = {"distill": distill, "precision": "no"}
    if kind == "eagle3":
        config = Eagle3Config(**common, ttt=STEPS, decay=DECAY)
        return Eagle3Trainer(
            module, runner.shared_parts, RotaryEmbedding(8, rope or make_rope_parameters(1000.0)), kept, config, window
        )
    if kind == "dflash":
        config, rotary = DFlashConfig(**common, decay=DECAY), RotaryEmbedding(8, make_rope_parameters(1000.0))
        return DFlashTrainer(module, runner.shared_parts, rotary, kept, config)
    if kind == "mtp":
        config = MtpConfig(**common, ttt=STEPS, decay=DECAY)
        return MtpTrainer(module, runner.shared_parts, runner.shared_parts.rotary, kept, config, window)
    if kind == "tokenswift":
        return HeadsTrainer(module, runner.shared_parts, kept, HeadsConfig(**common, decay=DECAY))
    return {"longspec": LongSpecTrainer, "lm": LmTrainer}[kind](module, runner.shared_parts, kept, RunConfig(**common))


def predictions(
    kind: str, trainer: DraftTrainer, document: Features, shift: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(depth, index of the predicted token, logits) of each label, in the order of a training step."""
    length = len(document.token_ids)
    if kind == "longspec":
        logits = _longspec(trainer, document, shift)
        yield from ((shift, row + 1, logits[row]) for row in range(max(document.start - 1, shift), length - 1))
    elif kind == "lm":
        logits = _lm(trainer, document)
        yield from ((1, row + 1, logits[row]) for row in range(document.start - 1, length - 1))
    elif kind == "tokenswift":
        for i, states in enumerate(trainer.block(document.hidden)):
            logits = states @ trainer.target_head.T
            yield from ((i + 1, row + 2 + i, logits[row]) for row in range(document.start - 1, length - 2 - i))
    else:
        rows = {"eagle3": _eagle3, "mtp": _eagle3, "dflash": _dflash}[kind]
        roots = range(document.start - 1, length - 2)
        chains = [rows(trainer, document, root, min(STEPS - 1, length - 3 - root)) for root in roots]
        for i in range(STEPS):
            yield from ((i + 1, root + i + 2, z[i]) for root, z in zip(roots, chains, strict=True) if i < len(z))


def _longspec(trainer: LongSpecTrainer, document: Features, shift: int) -> torch.Tensor:
    """(L, V') logits at every position of a text, drafting at level ``shift``, with full masks."""
    at = torch.arange(len(document.token_ids))
    behind = at[:, None] - at
    cos, sin = trainer.parts.rotary(document.positions)
    hidden = trainer.block(
        trainer.embed(document.token_ids), None, cos, sin,
        [lambda q, k, v: masked_attention(q, k, v, (behind >= 0) & (behind < WINDOW))],
        cross=lambda q: masked_attention(q, document.keys, document.values, behind >= shift),
    )  # fmt: skip
    return trainer.block.norm(hidden) @ trainer.target_head.T


def _lm(trainer: LmTrainer, document: Features) -> torch.Tensor:
    """(L, V') as transformers runs the model."""
    sizes = trainer.block.config.to_dict()
    model = small_llama.build_causal_lm(sizes, trainer.block.state_dict(), trainer.parts.embedding, trainer.target_head)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(document.token_ids[None]).logits[0]


def _eagle3(trainer: Eagle3Trainer, document: Features, root: int, depth: int) -> list[torch.Tensor]:
    """Logits of a root row and the ``depth`` rows drafted after it, as decoding makes them.

    The rows up to the root have the target's features; those after it have the draft's own last output. Tokens are the
    text's. Everything is computed anew for the root, row after row, with a cache of keys that only grows.
    """
    block, window = trainer.block, trainer.window
    keys, values, outputs = [], [], []
    for row in range(root + depth + 1):
        after = outputs and (block.norm(outputs[-1]) if getattr(block, "norm_output", False) else outputs[-1])
        g = block.project_features(document.hidden[row][None]) if row <= root else after

        def attend(q, k, v):
            keys.append(k)
            values.append(v)
            seen = slice(None) if window is None else slice(-window, None)
            every = torch.cat(keys[seen], 1), torch.cat(values[seen], 1)
            return masked_attention(q, *every, torch.ones(1, every[0].shape[1], dtype=torch.bool))

        out = block(trainer.embed(document.token_ids[row + 1][None]), g, *_rotary_at(trainer, document, row), [attend])
        if row >= root:
            outputs.append(out)
    if isinstance(trainer, MtpTrainer):  # whose outputs are normed
        return [(out @ trainer.target_head.T)[0] for out in outputs]
    return [block.logits(out)[0] for out in outputs]


def _dflash(trainer: DFlashTrainer, document: Features, root: int, depth: int) -> list[torch.Tensor]:
    """Logits of the tokens of a block behind the anchor, which is the token after row ``root``."""
    block, rows = trainer.block, slice(root + 1)
    context = block.project_features(document.hidden[rows])
    kv = block.keys_values(None, context, *trainer.rotary(document.positions[rows]))
    masks = block.mask_embedding.expand(STEPS, -1)
    x = torch.cat([trainer.embed(document.token_ids[root + 1][None]), masks])
    out = block(x[None], *trainer.rotary(document.positions[root + 1] + torch.arange(STEPS + 1)), [kv])[0]
    return list(out[1 : depth + 2] @ trainer.target_head.T)


def _rotary_at(trainer: Eagle3Trainer, document: Features, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    return trainer.rotary(document.positions[row][None])
