"""transformers' ``generate(..., custom_generate=speculator)``: its inputs, its processors, its outputs.

By the time this runs, ``generate`` has merged the generation config, built the logits processors and stopping
criteria, and expanded the inputs for ``num_return_sequences``. These are applied row by row, and the tokens are those
that ``generate`` would have returned, or the call is refused before work begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from longdraft.engine import processors
from longdraft.engine.drafter import Drafter
from longdraft.engine.draws import StepDraws
from longdraft.engine.loop import Engine
from longdraft.engine.planner import Planner
from longdraft.engine.sampler import Sampler
from longdraft.engine.schedule import Schedule
from longdraft.engine.sequence import Sequence
from longdraft.integration import requests
from longdraft.integration.endings import Endings
from longdraft.integration.handover import Given
from longdraft.model import support
from longdraft.model.runner import TargetRunner


def decode(
    runner: TargetRunner,
    drafter: Drafter,
    schedule: Schedule,
    planner: Callable[[], Planner | None],
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    given: Given,
    model_kwargs: dict[str, Any],
) -> Any:
    """Decodes ``input_ids`` (B, n), padded on either side, and returns what ``generate`` would.

    Samples come from torch's global generator: after the same ``torch.manual_seed`` they are those of ``generate``.

    Args:
        planner: called once everything has been checked, for it may measure first.
        given: arguments that ``generate`` does not hand on by itself.

    Returns:
        (B, n + new tokens), right-padded; or a ``GenerateDecoderOnlyOutput`` if the config asks for a dict.

    Raises:
        CapabilityError: longdraft cannot decode this as ``generate`` does; see :mod:`longdraft.integration.requests`.
        PromptError: token ids that the model does not have, or none.
        ContextError: prompt and new tokens exceed the target's context.
    """
    requests.check(config, model_kwargs, input_ids, given)
    support.check_tokens(runner.model, input_ids)
    mask = model_kwargs.get("attention_mask")
    requests.check_holes(mask, runner.twin.layout)
    rows, width = input_ids.shape
    # generate asks its criteria after each token, so it returns at least one.
    limit = getattr(stopping_criteria, "max_length", None)
    new_tokens = max(1, (config.max_length if limit is None else limit) - width)
    # generate takes the random numbers of all rows together; a processor that is not transformers' own may take some.
    alone = all(type(p).__module__.startswith("transformers.") for p in logits_processor)
    draws = StepDraws(rows, runner.device, alone) if config.do_sample else None
    if draws is not None and runner.share is not None:
        draws.generator.set_state(runner.share.first(draws.generator.get_state()))
    sequences = []
    for i, row in enumerate(input_ids):
        prompt = row if mask is None else row[mask[i].bool().to(row.device)]
        own = processors.of_row(logits_processor, i, rows)
        sampler = Sampler(True, own) if draws is None else Sampler(False, own, draws.row(i))
        sequences.append(Sequence(i, prompt.tolist(), new_tokens, runner.device, row.tolist(), draws is None, sampler))
    support.check_length(runner.model, max(len(s.prompt) for s in sequences) + new_tokens, drafter.max_nodes)
    endings = Endings(sequences, input_ids.to(runner.device), stopping_criteria, _pad(config), given.streamer)
    # A planner may measure for a while: the last thing before work begins.
    engine = Engine(runner, drafter, schedule, planner=planner(), slots=rows)
    for s in sequences:
        s.rules = (endings.rule,)
        engine.add(s)
    for step in engine.run():
        if draws is not None and step.finish_reason is not None:
            draws.close(step.sequence)
    output = torch.cat([input_ids, endings.output().to(input_ids.device)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def _pad(config: Any) -> int | None:
    """The padding token that ``generate`` has settled on; None if there is none."""
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        pad = config.pad_token_id
    return None if pad is None else int(pad)
