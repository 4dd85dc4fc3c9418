"""Trains MTP layers: the step with its loss (:class:`MtpTrainer`), and the run (:func:`train_mtp`).

A run continues the layer in the target's own checkpoint, for example after the target was fine-tuned, or the layer in
``init``. For a target without one, it trains a new layer, which begins as a copy of the target's last decoder layer.

The step is EAGLE-3's (:mod:`longdraft.training.eagle3`), with the target's last state as the only feature, after the
final norm, and with the target's head, which stays as it is. DeepSeek-V3 (arXiv:2412.19437, section 2.2) trains a layer
for each depth. Here one layer drafts all depths, so it reads its own outputs in further steps (``ttt``).
"""

from __future__ import annotations

import torch

from longdraft.drafters.mtp import KIND, MtpBlock, MtpDraft
from longdraft.drafts import draft_models, mtp_formats
from longdraft.drafts.assistant import AssistantDraft
from longdraft.errors import CapabilityError, UnsupportedModelError
from longdraft.model.model_parts import decoder_layers
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import full_tensor
from longdraft.training.config import EVAL_DEPTH, MtpConfig
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.losses import scale_logits
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress


class MtpTrainer(Eagle3Trainer):
    """A training step of an MTP layer, whose outputs are normed already."""

    block: MtpBlock
    needs_target_argmax = False

    def states_and_head(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states, self.target_head


def train_mtp(config: MtpConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains an MTP layer; see :mod:`longdraft.training.session`. Raises CapabilityError if ``init`` is an assistant of
    Gemma 4."""
    init = None if config.init is None else MtpDraft.load(config.init)
    if isinstance(init, AssistantDraft):
        raise CapabilityError(f"{config.init} is an assistant of Gemma 4, which is not trained here.")
    session = TrainingSession(config, levels=max(config.ttt, EVAL_DEPTH), progress=progress, stop=stop)
    runner = session.runner
    origin = draft_models.origin_of(runner.model)
    if init is None and origin is not None and mtp_formats.has_mtp_layer(origin):
        progress(f"continuing the MTP layer of {origin}")
        init = MtpDraft(origin, mtp_formats.read(origin))
    if init is not None:
        init.check(runner)
    block = _new_block(runner, config.seed) if init is None else init.trainable_module(runner)
    trainer = MtpTrainer(block, runner.shared_parts, runner.shared_parts.rotary, None, config)
    if init is None:
        scale_logits(block.norm, trainer.target_head)
    # A layer of a checkpoint was trained for the target's context, whatever it is trained on now.
    draft_config = {"trained_length": config.max_length if init is None else init.trained_length}
    yield from TrainingLoop(session, trainer, (runner.num_layers - 1,), KIND, draft_config, levels=config.ttt).run()


def _new_block(runner: TargetRunner, seed: int) -> MtpBlock:
    """Makes a layer from the target's last decoder layer with full attention. The projection passes the target's state
    through. Raises UnsupportedModelError if no layer of the target fits."""
    model, parts = runner.model, runner.shared_parts
    for layer in reversed(decoder_layers(model)):
        state = {name: full_tensor(t).float().cpu() for name, t in layer.state_dict().items()}
        block = MtpBlock(runner, any(".experts." in f".{name}" for name in state))
        if {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in block.layer.state_dict().items()}:
            break
    else:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer from which an MTP layer can begin: train eagle3 or longspec."
        )
    size, norm_class = parts.hidden_size, type(block.norm)
    new_norm = norm_class(size, eps=parts.rms_norm_eps).state_dict()
    noise = torch.empty(size, size).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    weights = {f"layer.{name}": t for name, t in state.items()}
    weights |= {f"{norm}.{name}": t.clone() for norm in ("enorm", "hnorm", "norm") for name, t in new_norm.items()}
    weights["eh_proj.weight"] = torch.cat([noise, torch.eye(size)], 1)
    block.load_state_dict(weights, assign=True)
    return block
