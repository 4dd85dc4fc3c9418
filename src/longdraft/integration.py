"""transformers' ``generate(..., custom_generate=speculator)``: its inputs, its processors, its outputs.

By the time this runs, ``generate`` has merged the generation config, built the logits processors and stopping
criteria, and expanded the inputs for ``num_return_sequences``. What it hands over is honoured row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from longdraft.drafters.base import Drafter
from longdraft.engine import Engine
from longdraft.errors import CapabilityError
from longdraft.kv.prompt_cache import PromptCache
from longdraft.planning.planner import Planner
from longdraft.sequence import FinishReason, Sequence, StopRule
from longdraft.target.runner import TargetRunner
from longdraft.verify.sampling import Picker
from longdraft.verify.schedule import Schedule


def decode(
    runner: TargetRunner,
    drafter: Drafter,
    schedule: Schedule,
    planner: Planner | None,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Decodes ``input_ids`` (B, n), padded on either side, and returns what ``generate`` would.

    Draws come from torch's global generator: after the same ``torch.manual_seed``, a batch of one samples the
    same text as ``generate`` does without us.

    Returns:
        (B, n + new tokens), right-padded; or a ``GenerateDecoderOnlyOutput`` when the config asks for a dict.

    Raises:
        CapabilityError: for beam search, or for scores, logits, attentions or hidden states in the output.
    """
    _check(config, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    budget = config.max_length - input_ids.shape[1]
    eos = _ids(config.eos_token_id)
    sequences = []
    for i, row in enumerate(input_ids):
        real = row if mask is None else row[mask[i].bool()]
        # Processors and criteria count the padding, as they do in generate: lengths mean the same to them.
        padding = [] if mask is None else row[~mask[i].bool()].tolist()
        sequences.append(Sequence(i, real.tolist(), budget, runner.device, padding, greedy=not config.do_sample))
    pickers = [Picker(not config.do_sample, logits_processor) for _ in sequences]
    engine = Engine(
        runner,
        drafter,
        sequences,
        pickers,
        [_criteria_rule(stopping_criteria, eos)],
        PromptCache(),
        schedule,
        planner=planner,
    )
    for _ in engine.steps(engine.open()):
        pass
    longest = max(len(s.output) for s in sequences)
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(eos), 0)
    pad = int(pad[0]) if isinstance(pad, (list, tuple)) else int(pad)
    new = torch.tensor([s.output + [pad] * (longest - len(s.output)) for s in sequences], device=input_ids.device)
    output = torch.cat([input_ids, new], dim=1)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def _check(config: Any, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise CapabilityError("longdraft decodes without beam search: leave num_beams at 1.")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise CapabilityError(f"longdraft does not return {name}; leave it off.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise CapabilityError("longdraft reads token ids: pass input_ids instead of inputs_embeds.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise CapabilityError("longdraft keeps its own cache: leave past_key_values out.")


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(v) for v in value) if isinstance(value, (list, tuple)) else frozenset({int(value)})


def _criteria_rule(criteria: Any, eos: frozenset[int]) -> StopRule:
    """transformers' stopping criteria, asked after each emitted token with the row as it would see it."""

    def rule(s: Sequence) -> FinishReason | None:
        if not bool(criteria(s.ids()[None], None).all()):
            return None
        if s.output[-1] in eos:
            return "eos"
        return "length" if not s.remaining else "stop"

    return rule
