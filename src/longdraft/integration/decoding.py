"""transformers' ``generate(..., custom_generate=speculator)``: its inputs, its processors, its ends, its outputs.

By the time this runs, ``generate`` has merged the generation config, built the logits processors and stopping
criteria, and expanded the inputs for ``num_return_sequences``. These are applied row by row, and the tokens are those
that ``generate`` would have returned, or the call is refused before work begins. Where a batch is sampled, each row has
random numbers of its own: its distribution is that of ``generate``, its tokens are others.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from longdraft.engine import logits_processors
from longdraft.engine.drafter import Planner
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import SampleNoise, Sampler
from longdraft.engine.sequence import FinishReason, Sequence
from longdraft.errors import CapabilityError
from longdraft.integration import checks
from longdraft.integration.generate_arguments import GenerateArguments
from longdraft.model import support
from longdraft.model.runner import TargetRunner
from longdraft.native.boundary import CPU_INT64
from longdraft.recipes import Recipe

# Criteria that look at a row alone.
_OF_A_ROW = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def decode(
    runner: TargetRunner,
    recipe: Recipe,
    planner: Callable[[], Planner | None],
    input_ids: torch.Tensor,
    given: GenerateArguments,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes ``input_ids`` (B, n), padded on either side, and returns what ``generate`` would.

    Samples come from torch's global generator: after the same ``torch.manual_seed``, those of a single row are those of
    ``generate``, and those of a batch are the same each time.

    Args:
        planner: called once everything has been checked, for it may measure first.
        given: arguments that ``generate`` does not hand on by itself.
        tokenizer: named so that ``generate`` finds it for its stop strings.

    Returns:
        (B, n + new tokens), right-padded; or a ``GenerateDecoderOnlyOutput`` if the config asks for a dict.

    Raises:
        CapabilityError: longdraft cannot decode this as ``generate`` does; see :mod:`longdraft.integration.checks`.
        PromptError: token ids that the model does not have, or none.
        ContextError: prompt and new tokens exceed the target's context.
    """
    config, drafter = generation_config, recipe.drafter()
    checks.check_call(config, model_kwargs, input_ids, given, runner.execution_model.layout)
    support.check_tokens(runner.model, input_ids)
    mask = model_kwargs.get("attention_mask")
    rows, width = input_ids.shape
    # generate asks its criteria after each token, so it returns at least one.
    limit = getattr(stopping_criteria, "max_length", None)
    new_tokens = max(1, (config.max_length if limit is None else limit) - width)
    # A processor that is not transformers' own may take random numbers meanwhile.
    known = all(type(p).__module__.startswith("transformers.") for p in logits_processor)
    draws = _draws(runner, rows, known) if config.do_sample else [SampleNoise(None)] * rows
    sequences = []
    for i, row in enumerate(input_ids):
        prompt = row if mask is None else row[mask[i].bool().to(row.device)]
        sampler = Sampler(
            not config.do_sample, logits_processors.processors_for_sequence(logits_processor, i, rows), draws[i]
        )
        shown = row.tolist()
        sequences.append(Sequence(i, prompt.tolist(), new_tokens, runner.device, shown, sampler.greedy, sampler))
    support.check_length(runner.model, max(len(s.prompt) for s in sequences) + new_tokens, drafter.max_nodes)
    settled = getattr(config, "_pad_token_tensor", None)  # what generate has settled on
    pad = config.pad_token_id if settled is None else int(settled)
    endings = BatchStopping(sequences, stopping_criteria, pad, given.streamer)
    # A planner may measure for a while: the last thing before work begins.
    engine = Engine(runner, drafter, recipe.verifier(), planner=planner(), slots=rows)
    for s in sequences:
        s.stop_rules = (endings.rule,)
        engine.add(s)
    for _ in engine.run():
        pass
    draws[0].restore_generator()
    output = torch.cat([input_ids, input_ids.new_tensor(endings.output())], dim=1)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def _draws(runner: TargetRunner, rows: int, known: bool) -> list[SampleNoise]:
    """Random numbers of each row: torch's global generator for a single one, else a generator each, seeded by it."""
    generator = torch.default_generator
    if runner.device.type == "cuda":
        index = runner.device.index
        generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    if runner.tp_rank is not None:
        generator.set_state(runner.tp_rank.broadcast(generator.get_state()))
    if rows == 1:
        return [SampleNoise(generator, known)]
    seeds = torch.randint(2**62, (rows,), generator=generator, device=generator.device).tolist()
    return [SampleNoise(torch.Generator(generator.device).manual_seed(seed)) for seed in seeds]


class BatchStopping:
    """Decides when each row ends, and cuts and pads the output, as ``generate`` does.

    In ``generate`` a finished row goes on with padding only if one of the criteria is for end-of-sequence tokens; else
    it goes on with real tokens until every row has finished.

    Args:
        sequences: the batch, in the order of its rows.
        criteria: of ``generate``.
        pad: the padding token, if there is one.
        streamer: gets the tokens of a single row, one by one, on the host.

    Raises:
        CapabilityError: rows have to be padded, and there is no padding token; or something looks at all rows of a
            batch, which are decoded at their own pace.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], criteria: Any, pad: int | None = None, streamer: Any = None
    ) -> None:
        self._padded = any(hasattr(c, "eos_token_id") for c in criteria)  # as generate decides
        if len(sequences) > 1:
            if self._padded and pad is None:
                raise CapabilityError(
                    "Rows of a batch that end at an end-of-sequence token are padded, and there is no padding token: "
                    "give pad_token_id."
                )
            joint = [type(c).__name__ for c in criteria if type(c) not in _OF_A_ROW]
            if joint := [*joint, *(["streamer"] if streamer is not None else [])]:
                raise CapabilityError(
                    f"longdraft decodes the rows of a batch at their own pace, and {', '.join(joint)} would see all of "
                    "them step by step: give one prompt at a time, or leave it out."
                )
        self._criteria, self._pad, self._streamer = criteria, pad or 0, streamer
        self._sequences = sequences
        self._ends: list[int | None] = [None] * len(sequences)  # tokens of each row up to its end, once that is known

    def rule(self, s: Sequence) -> FinishReason | None:
        """A stop rule of the engine, called after each emitted token."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor(s.output[-1:], **CPU_INT64))
        if self._ends[s.index] is None and (not s.remaining or bool(self._criteria(s.input_ids()[None], None).all())):
            self._ends[s.index] = len(s.output)
        end = self._ends[s.index] if self._padded else self._length
        if end is None or len(s.output) < end:
            return None
        return "stop" if s.remaining else "length"

    def output(self) -> list[list[int]]:
        """The new tokens of each row, all rows equally long, when every row has ended."""
        length = self._length or 0
        ends = self._ends if self._padded else [length] * len(self._ends)
        kept = [s.output[:end] for s, end in zip(self._sequences, ends, strict=True)]
        return [row + [self._pad] * (length - len(row)) for row in kept]

    @property
    def _length(self) -> int | None:
        """New tokens of the longest row; None if that is not known yet."""
        known = [end for end in self._ends if end is not None]
        return max(known) if len(known) == len(self._ends) else None
