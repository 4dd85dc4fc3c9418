"""The decoding loop of transformers' ``generate(..., custom_generate=speculator)``.

``generate`` has then merged the generation config, built logits processors and stopping criteria, and expanded the
inputs for ``num_return_sequences``. Each sequence of the batch has its own copies. The output is that of ``generate``,
or the call is refused before any work. In a sampled batch each sequence has its own random numbers, so it has the
distribution of ``generate``, but other tokens.
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

# Criteria that look at one sequence alone.
_PER_SEQUENCE_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def decode(
    runner: TargetRunner,
    recipe: Recipe,
    planner: Callable[[], Planner | None],
    input_ids: torch.Tensor,
    generate_args: GenerateArguments,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes ``input_ids`` (B, n), padded on either side, with the output of ``generate``.

    Random numbers come from torch's global generator. After ``torch.manual_seed`` a single sequence is that of
    ``generate``, and a batch is the same each time.

    Args:
        planner: called after all checks, for it may measure.
        generate_args: arguments that ``generate`` does not pass on.
        tokenizer: only there so that ``generate`` accepts it, for its stop strings.

    Returns:
        (B, n + new tokens), right-padded; or a ``GenerateDecoderOnlyOutput`` if the config asks for a dict.

    Raises:
        CapabilityError: longdraft cannot do this as ``generate`` does; see :mod:`longdraft.integration.checks`.
        PromptError: no token ids, or ids that the model does not have.
        ContextError: prompt and new tokens exceed the target's context.
    """
    config, drafter = generation_config, recipe.drafter()
    checks.check_call(config, model_kwargs, input_ids, generate_args, runner.execution_model.layout)
    support.check_tokens(runner.model, input_ids)
    mask = model_kwargs.get("attention_mask")
    batch_size, prompt_len = input_ids.shape
    # generate checks its criteria after each token, so it returns at least one.
    limit = getattr(stopping_criteria, "max_length", None)
    new_tokens = max(1, (config.max_length if limit is None else limit) - prompt_len)
    # A user's processor may draw random numbers between samples.
    is_predictable = all(type(p).__module__.startswith("transformers.") for p in logits_processor)
    noise = _make_noise(runner, batch_size, is_predictable) if config.do_sample else [SampleNoise(None)] * batch_size
    sequences = []
    for i, row in enumerate(input_ids):
        prompt = row if mask is None else row[mask[i].bool().to(row.device)]
        own_processors = logits_processors.processors_for_sequence(logits_processor, i, batch_size)
        sampler = Sampler(not config.do_sample, own_processors, noise[i])
        prompts = prompt.tolist(), new_tokens, runner.device, row.tolist()
        sequences.append(Sequence(i, *prompts, sampler.greedy, sampler))
    support.check_length(runner.model, max(len(s.prompt) for s in sequences) + new_tokens, drafter.max_nodes)
    pad_tensor = getattr(config, "_pad_token_tensor", None)  # set by generate
    pad = config.pad_token_id if pad_tensor is None else int(pad_tensor)
    stopping = BatchStopping(sequences, stopping_criteria, pad, generate_args.streamer)
    # Last, for the planner may measure for some seconds.
    engine = Engine(runner, drafter, recipe.verifier(), planner=planner(), slots=batch_size)
    for s in sequences:
        s.stop_rules = (stopping.rule,)
        engine.add(s)
    for _ in engine.run():
        pass
    noise[0].restore_generator()
    output = torch.cat([input_ids, input_ids.new_tensor(stopping.output())], dim=1)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def _make_noise(runner: TargetRunner, batch_size: int, is_predictable: bool) -> list[SampleNoise]:
    """Makes the noise of each sequence: of torch's global generator for one, else of generators seeded by it."""
    generator = torch.default_generator
    if runner.device.type == "cuda":
        index = runner.device.index
        generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    if runner.tp_rank is not None:
        generator.set_state(runner.tp_rank.broadcast(generator.get_state()))
    if batch_size == 1:
        return [SampleNoise(generator, is_predictable)]
    seeds = torch.randint(2**62, (batch_size,), generator=generator, device=generator.device).tolist()
    return [SampleNoise(torch.Generator(generator.device).manual_seed(seed)) for seed in seeds]


class BatchStopping:
    """Ends the sequences of a batch, and cuts and pads their output, as ``generate`` does.

    In ``generate`` a finished sequence is padded only if one of the criteria checks EOS tokens. Else it continues with
    real tokens until all sequences have finished.

    Args:
        sequences: the batch, in order.
        criteria: the stopping criteria of ``generate``.
        pad: the padding token, if there is one.
        streamer: gets the tokens of a single sequence, one by one, on the host.

    Raises:
        CapabilityError: padding is needed, and there is no padding token; or criteria or streamer need all sequences of
            a batch step by step, but these advance independently.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], criteria: Any, pad: int | None = None, streamer: Any = None
    ) -> None:
        self._pads_output = any(hasattr(c, "eos_token_id") for c in criteria)  # the rule of generate
        if len(sequences) > 1:
            if self._pads_output and pad is None:
                raise CapabilityError(
                    "Rows of a batch that end at an end-of-sequence token are padded, and there is no padding token: "
                    "give pad_token_id."
                )
            unsupported = [type(c).__name__ for c in criteria if type(c) not in _PER_SEQUENCE_CRITERIA]
            if unsupported := [*unsupported, *(["streamer"] if streamer is not None else [])]:
                raise CapabilityError(
                    f"longdraft decodes the rows of a batch at their own pace, and {', '.join(unsupported)} would see "
                    "all of them step by step: give one prompt at a time, or leave it out."
                )
        self._criteria, self._pad, self._streamer = criteria, pad or 0, streamer
        self._sequences = sequences
        self._end_lengths: list[int | None] = [None] * len(sequences)  # output lengths, once known

    def rule(self, s: Sequence) -> FinishReason | None:
        """The stop rule of all sequences, called after each emitted token."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor(s.output[-1:], **CPU_INT64))
        is_open = self._end_lengths[s.index] is None
        if is_open and (not s.remaining or bool(self._criteria(s.input_ids()[None], None).all())):
            self._end_lengths[s.index] = len(s.output)
        end = self._end_lengths[s.index] if self._pads_output else self._max_new_length
        if end is None or len(s.output) < end:
            return None
        return "stop" if s.remaining else "length"

    def output(self) -> list[list[int]]:
        """Returns the new tokens of each sequence, padded to the longest. All must have ended."""
        length = self._max_new_length or 0
        end_lengths = self._end_lengths if self._pads_output else [length] * len(self._end_lengths)
        outputs = [s.output[:end] for s, end in zip(self._sequences, end_lengths, strict=True)]
        return [row + [self._pad] * (length - len(row)) for row in outputs]

    @property
    def _max_new_length(self) -> int | None:
        """New tokens of the longest sequence; None if not known yet."""
        known = [end for end in self._end_lengths if end is not None]
        return max(known) if len(known) == len(self._end_lengths) else None
