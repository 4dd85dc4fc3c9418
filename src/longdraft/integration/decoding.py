"""The decoding loop of transformers' ``generate(..., custom_generate=speculator)``.

``generate`` merges the generation config, builds logits processors and stopping criteria, and expands the inputs for
``num_return_sequences``. Then it calls this loop, which returns the output that ``generate`` would return, or refuses
the call before any work. In a sampled batch each sequence has its own random numbers, so the tokens differ from those
of ``generate``, but have the same distribution.
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
from longdraft.engine.loop import Engine
from longdraft.engine.planner import Planner
from longdraft.engine.sampler import SampleNoise, Sampler
from longdraft.engine.sequence import FinishReason, Sequence
from longdraft.errors import CapabilityError
from longdraft.integration import checks
from longdraft.integration.generate_arguments import GenerateArguments
from longdraft.model import support
from longdraft.model.runner import TargetRunner
from longdraft.native.boundary import CPU_INT64
from longdraft.recipes import Recipe

# Stopping criteria that decide about each sequence by this sequence alone.
_PER_SEQUENCE_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def decode(
    runner: TargetRunner,
    recipe: Recipe,
    make_planner: Callable[[], Planner | None],
    input_ids: torch.Tensor,
    generate_args: GenerateArguments,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes ``input_ids`` (B, n), which may be padded on either side, and returns what ``generate`` would return.

    Random numbers come from torch's global generator. After ``torch.manual_seed`` a single sequence equals that of
    ``generate``, and a batch is repeatable.

    Args:
        runner: the target.
        recipe: makes the drafter and the verifier.
        make_planner: makes the planner; called after all checks, because it may measure times for seconds.
        generate_args: arguments of ``generate`` that it passes to no custom loop.
        logits_processor, stopping_criteria, generation_config: what ``generate`` made of its arguments.
        tokenizer: unused; must be a keyword here, or ``generate`` would refuse the tokenizer for its stop strings.
        model_kwargs: keywords that ``generate`` would pass to the model's forward, such as ``attention_mask``.

    Returns:
        (B, n + new tokens), right-padded; or a ``GenerateDecoderOnlyOutput`` if the config asks for a dict.

    Raises:
        CapabilityError: longdraft would not decode as ``generate`` does; see :mod:`longdraft.integration.checks`.
        PromptError: there are no token ids, or one that the model does not have.
        ContextError: prompt and new tokens exceed the target's context.
    """
    config, drafter = generation_config, recipe.drafter()
    checks.check_call(config, model_kwargs, input_ids, generate_args, runner.execution_model.layout)
    support.check_tokens(runner.model, input_ids)
    mask, (batch_size, prompt_len) = model_kwargs.get("attention_mask"), input_ids.shape
    # generate checks its criteria after each token, so it returns at least one.
    max_length = getattr(stopping_criteria, "max_length", None)
    max_new_tokens = max(1, (config.max_length if max_length is None else max_length) - prompt_len)
    # Noise is predictable unless a user's processor draws random numbers between samples.
    is_predictable = all(type(p).__module__.startswith("transformers.") for p in logits_processor)
    noise = _make_noise(runner, batch_size, is_predictable) if config.do_sample else [SampleNoise(None)] * batch_size
    sequences = []
    for i, row in enumerate(input_ids):
        prompt = (row if mask is None else row[mask[i].bool().to(row.device)]).tolist()  # without padding
        processors = logits_processors.processors_for_sequence(logits_processor, i, batch_size)
        sampler = Sampler(not config.do_sample, processors, noise[i])
        sequences.append(Sequence(i, prompt, max_new_tokens, runner.device, row.tolist(), sampler.greedy, sampler))
    support.check_length(runner.model, max(len(s.prompt) for s in sequences) + max_new_tokens, drafter.max_nodes)
    pad_tensor = getattr(config, "_pad_token_tensor", None)  # set by generate
    pad_token = config.pad_token_id if pad_tensor is None else int(pad_tensor)
    stopping = BatchStopping(sequences, stopping_criteria, pad_token, generate_args.streamer)
    engine = Engine(runner, drafter, recipe.verifier(), planner=make_planner(), slots=batch_size)
    for s in sequences:
        s.stop_rules = (stopping.stop_rule,)
        engine.add(s)
    for _ in engine.run():
        pass
    noise[0].restore_generator()
    output = torch.cat([input_ids, input_ids.new_tensor(stopping.output())], dim=1)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def _make_noise(runner: TargetRunner, batch_size: int, is_predictable: bool) -> list[SampleNoise]:
    """Makes each sequence's noise: from torch's global generator for a single sequence, else from generators that the
    global one seeds. ``is_predictable``: no other code draws from the global generator between samples."""
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

    In ``generate`` a finished sequence is padded only if one of the criteria checks EOS tokens. Otherwise the sequence
    continues until all sequences have finished.

    Args:
        sequences: the batch, in order.
        criteria: the stopping criteria of ``generate``.
        pad_token: the padding token; None: there is none.
        streamer: gets the tokens of a batch of one sequence, one by one, on the host.

    Raises:
        CapabilityError: padding is needed without a padding token; or the streamer or a criterion needs lockstep.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], criteria: Any, pad_token: int | None = None, streamer: Any = None
    ) -> None:
        self._pads_output = any(hasattr(c, "eos_token_id") for c in criteria)  # as generate decides it
        if len(sequences) > 1:
            if self._pads_output and pad_token is None:
                raise CapabilityError(
                    "Sequences of a batch that end early are padded, and there is no padding token: give pad_token_id."
                )
            unsupported = [type(c).__name__ for c in criteria if type(c) not in _PER_SEQUENCE_CRITERIA]
            if unsupported := [*unsupported, *(["streamer"] if streamer is not None else [])]:
                raise CapabilityError(
                    f"longdraft decodes the rows of a batch at their own pace, but {', '.join(unsupported)} must see "
                    "all rows step by step: give one prompt at a time, or leave it out."
                )
        self._criteria, self._pad_token, self._streamer = criteria, pad_token or 0, streamer
        self._sequences = sequences
        self._end_lengths: list[int | None] = [None] * len(sequences)  # final output lengths; None: not known yet

    def stop_rule(self, s: Sequence) -> FinishReason | None:
        """Returns why a sequence ends; None if it goes on. Called for each sequence after each emitted token."""
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
        """Returns the new tokens of each sequence, padded to the longest. All sequences must have ended."""
        length = self._max_new_length or 0
        end_lengths = self._end_lengths if self._pads_output else [length] * len(self._end_lengths)
        outputs = [s.output[:end] for s, end in zip(self._sequences, end_lengths, strict=True)]
        return [row + [self._pad_token] * (length - len(row)) for row in outputs]

    @property
    def _max_new_length(self) -> int | None:
        """Number of new tokens of the longest sequence; None until all sequences have ended."""
        end_lengths = [end for end in self._end_lengths if end is not None]
        return max(end_lengths) if len(end_lengths) == len(self._end_lengths) else None
