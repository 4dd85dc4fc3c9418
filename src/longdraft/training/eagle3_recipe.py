"""A whole EAGLE-3 training run, from its configuration to the draft folder.

The same run adapts a draft to long text (SpecPV, section 4.1): ``init`` names a draft that was trained on short text,
``rope_factor`` stretches its positions with YaRN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import OFFSETS, DraftFolder
from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.errors import CheckpointError, ConfigError
from longdraft.host.rotary import Rotary, yarn
from longdraft.host.runner import TargetRunner
from longdraft.training.config import DEPTH, Eagle3Config
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.features import Features
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin

# Base of the rotary embedding where the target names none.
THETA = 10000.0
# Size of a fresh fc's random part, against what passes through.
REST = 0.3


@dataclass(frozen=True)
class Plan:
    """What a run trains, and what its folder will say.

    Attributes:
        kept: target ids of the draft's vocabulary, None for all.
        layers: decoder layers whose output is read.
        rope_length: tokens that YaRN stretches; None where nothing is stretched.
    """

    block: Eagle3Block
    kept: torch.Tensor | None
    layers: tuple[int, ...]
    window: int | None
    rope_theta: float
    rope_length: int | None


def train_eagle3(
    config: Eagle3Config,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Trains an EAGLE-3 draft (EAGLE-3, section 3; SpecPV, section 4.1); resumes where ``config.out`` holds a run.

    See :meth:`longdraft.training.session.Session.train`.

    Args:
        stop: asked after each step, and while the target reads; True writes a checkpoint and ends.

    Raises:
        LongdraftError: bad data, no room on disk, a draft or a checkpoint of something else, a target that takes no
            drafts.
    """
    # A row for every step, the steps of measuring included.
    session = begin(config, max(config.ttt, DEPTH), progress, stop)
    runner = session.runner
    plan = _plan(config, session)
    reader = session.reader(plan.layers)
    source = session.source(reader)
    if source is None:
        return
    if config.init is None:
        fit(plan.block, source[0], len(plan.layers))
    trainee = Eagle3Trainee(
        plan.block,
        runner.parts,
        Rotary(plan.block.shape.head_dim, _rope(config, plan), device=runner.device),
        plan.kept,
        config.ttt,
        config.decay,
        plan.window,
        config.distill,
        session.product_dtype,
    )

    def made(weights: Mapping[str, torch.Tensor]) -> DraftFolder:
        return as_folder(weights, plan, runner.parts.description, config)

    yield from session.train(trainee, reader, source, made, levels=config.ttt)


def as_folder(
    weights: Mapping[str, torch.Tensor], plan: Plan, target: dict[str, Any], config: Eagle3Config
) -> DraftFolder:
    """The draft as its folder holds it."""
    described = plan.block.shape.as_dict() | {
        "feature_layers": list(plan.layers),
        "draft_vocab_size": plan.block.shape.vocabulary,
        "window": plan.window,
        "rope_theta": plan.rope_theta,
        "rope_factor": config.rope_factor_inference or config.rope_factor,
        "rope_factor_trained": config.rope_factor,
        "rope_original_length": plan.rope_length,
        "trained_length": config.max_length,
    }
    return draft_folder.trained("eagle3", described, weights, plan.kept, target)


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


def _rope(config: Eagle3Config, plan: Plan) -> dict[str, Any]:
    return yarn(plan.rope_theta, config.rope_factor, plan.rope_length)


def default_layers(layers: int) -> tuple[int, ...]:
    """Those that EAGLE-3 reads: an early, a middle and a late one.

    Raises:
        ConfigError: the target has too few layers to tell them apart.
    """
    found = (1, layers // 2 - 1, layers - 4)
    if not 0 <= found[0] < found[1] < found[2]:
        raise ConfigError(f"A target of {layers} layers has no layers {found}: set feature_layers.")
    return found


def _plan(config: Eagle3Config, session: Session) -> Plan:
    """A new draft, or the one in ``config.init``: it keeps its sizes, vocabulary, layers and rotary base."""
    runner = session.runner
    if config.init is not None:
        return _further(config, runner)
    parts, kv = runner.parts, runner.kv_shape
    layers = config.feature_layers or default_layers(kv.layers)
    _check_layers(layers, runner)
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
    block.initialise(config.seed, head=(parts.head if kept is None else parts.head[kept.to(parts.head.device)]).cpu())
    theta = config.rope_theta or parts.description.get("rope_theta") or THETA
    length = config.rope_original_length
    if config.rope_factor is not None and length is None:
        raise ConfigError("rope_factor without init needs rope_original_length: the length that it stretches.")
    return Plan(block, kept, layers, config.window, float(theta), length if config.rope_factor else None)


def _further(config: Eagle3Config, runner: TargetRunner) -> Plan:
    contents = draft_folder.load(config.init or "")
    if contents.kind != "eagle3":
        raise CheckpointError(f"{config.init} holds a draft of {contents.kind or 'another kind'}, not of eagle3.")
    draft_folder.check_target(contents.target, runner.parts.description, config.init or "")
    given = contents.config
    tensors = dict(contents.tensors)
    table = tensors.pop(OFFSETS, None)
    try:
        block = Eagle3Block(Eagle3Shape(**{n: given[n] for n in Eagle3Shape.__dataclass_fields__}))
        block.load_state_dict({name: t.float() for name, t in tensors.items()})
        layers = tuple(int(i) for i in given["feature_layers"])
        theta = float(given["rope_theta"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{config.init} is no EAGLE-3 draft as its config.json describes it: {error}") from error
    _check_layers(layers, runner)
    if config.feature_layers and config.feature_layers != layers:
        raise ConfigError(f"feature_layers {config.feature_layers}: the draft in init reads {layers}; leave it out.")
    kept = None if table is None else table + torch.arange(len(table))
    window = config.window if "window" in config.fields_set else given.get("window")
    length = None
    if config.rope_factor is not None:
        length = config.rope_original_length or given.get("rope_original_length") or given.get("trained_length")
        if length is None:
            raise ConfigError(f"{config.init} does not say how long its texts were: set rope_original_length.")
    return Plan(block, kept, layers, window, theta, length)


def _check_layers(layers: tuple[int, ...], runner: TargetRunner) -> None:
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < runner.kv_shape.layers:
        raise ConfigError(
            f"feature_layers {list(layers)} are not increasing indices of the target's {runner.kv_shape.layers} layers."
        )
