"""Logits processors for a batch whose rows decode at their own pace: each row gets its own.

transformers calls a processor once a step, with all rows. Here rows accept different numbers of tokens in a round, so a
row's processors are called with that row alone, (1, n) ids and (1, vocabulary) scores, once for every emitted token and
in order. A processor that was built for the batch (it holds a tensor with a row each) is cut down to its row, one with
a state of its own is copied, and one without any is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process as known

from longdraft.errors import CapabilityError
from longdraft.native.boundary import FLOATS, WHOLE

# Processors of transformers that depend on ids and scores alone, and so does what some of them cache.
_STATELESS: frozenset[type] = frozenset(
    getattr(known, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "WatermarkLogitsProcessor",  # seeds its generator anew before each draw
    )
    if hasattr(known, name)
)
# Processors of transformers that cannot work on one row of a decoder's logits.
_REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": "it wants the logits of two forwards (guidance_scale= makes the one that "
    "works with one)",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it wants the logits of two forwards",
    "DiaEOSChannelFilterLogitsProcessor": "it wants the channels of an audio model",
    "DiaEOSDelayPatternLogitsProcessor": "it wants the channels of an audio model",
    "WhisperNoSpeechDetection": "it runs a speech model",
}


def copies(processors: Iterable[Any]) -> LogitsProcessorList:
    """Copies processors with their present state; models and tokenizers that one holds are shared with the copy.

    Raises:
        CapabilityError: naming a processor that cannot be copied.
    """
    return LogitsProcessorList([_copy(p) for p in processors])


def of_row(processors: Iterable[Any], row: int, rows: int) -> LogitsProcessorList:
    """Returns the processors of one row of a batch; in a batch of one, the processors themselves.

    Raises:
        CapabilityError: naming a processor that cannot be called with single rows.
    """
    return LogitsProcessorList([_of_row(p, row, rows) for p in processors])


def _of_row(processor: Any, row: int, rows: int) -> Any:
    name = type(processor).__name__
    if (why := _REFUSED.get(name)) is not None and type(processor).__module__ == known.__name__:
        raise CapabilityError(f"longdraft calls logits processors with one row, which {name} does not take: {why}.")
    if rows == 1:
        return processor
    copied = _copy(processor)
    for kind, cut in _CUTS.items():
        if isinstance(copied, getattr(known, kind, ())):
            cut(copied, row, rows)
    return copied


def _copy(processor: Any) -> Any:
    if type(processor) in _STATELESS:
        return processor
    try:
        return copy.deepcopy(processor, {id(part): part for part in _shared(processor)})
    except Exception as error:  # whatever a class of a user's raises when it is copied
        raise CapabilityError(
            f"{type(processor).__name__} cannot be copied ({error}), and every row of a batch needs a logits processor "
            "of its own, because rows are decoded at their own pace. Give it a __deepcopy__, or decode one prompt at a "
            "time."
        ) from error


def _shared(processor: Any) -> list[Any]:
    """Parts of a processor that all rows share: models, tokenizers, a fixed table, the user's function of a prefix."""
    parts = vars(processor) if hasattr(processor, "__dict__") else {}
    shared = [p for p in parts.values() if isinstance(p, (torch.nn.Module, PreTrainedTokenizerBase))]
    if isinstance(processor, known.SynthIDTextWatermarkLogitsProcessor):
        shared.append(processor.sampling_table)
    if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
        shared.append(processor._prefix_allowed_tokens_fn)
    return shared


# --- processors built for the batch, cut down to one row ---


def _rows_of(tensor: torch.Tensor, row: int, rows: int, what: str) -> torch.Tensor:
    """The row's own part (1, ...) of a tensor with one for each prompt, where a prompt may have several rows."""
    if tensor.shape[0] == 0 or rows % tensor.shape[0]:
        raise CapabilityError(f"{what} is for {tensor.shape[0]} rows, but the batch has {rows}. Give it one a row.")
    index = row * tensor.shape[0] // rows
    return tensor[index : index + 1]


def _repetition(processor: Any, row: int, rows: int) -> None:
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        if ignored.shape[0] != rows:
            raise CapabilityError(
                f"The prompt_ignore_length of a {type(processor).__name__} is for {ignored.shape[0]} rows, but the "
                f"batch has {rows}. Give it one number a row."
            )
        processor.prompt_ignore_length = ignored[row : row + 1]


@cache
def _repeats_prompts() -> bool:
    """True if this transformers applies the penalty to all rows of a prompt; older versions only do to the first."""
    penalty = known.EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.zeros(1, 1, **WHOLE))
    scores = penalty(torch.zeros(2, 1, **WHOLE), torch.ones(2, 1, **FLOATS))
    return bool(scores[0] == scores[1])


def _encoder_repetition(processor: Any, row: int, rows: int) -> None:
    prompts = processor.encoder_input_ids
    processor.encoder_input_ids = _rows_of(prompts, row, rows, "encoder_repetition_penalty")
    if prompts.shape[0] != rows and not _repeats_prompts():
        raise CapabilityError(
            "This version of transformers applies encoder_repetition_penalty to some rows alone where a prompt has "
            "several: install a newer one, or leave num_return_sequences at 1."
        )


def _encoder_ngrams(processor: Any, row: int, rows: int) -> None:
    if rows % processor.batch_size:
        raise CapabilityError(
            f"encoder_no_repeat_ngram_size is for {processor.batch_size} rows, but the batch has {rows}."
        )
    processor.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // rows]]
    processor.batch_size = 1


def _prefix(processor: Any, row: int, rows: int) -> None:
    # Since transformers 5.24, rows of one prompt have one number.
    processor._prefix_allowed_tokens_fn = partial(
        _allowed, processor._prefix_allowed_tokens_fn, row // processor._num_beams
    )
    processor._num_beams = 1


def _allowed(function: Callable[[int, torch.Tensor], list[int]], row: int, _: int, text: torch.Tensor) -> list[int]:
    """Calls the user's function with the row's index in the batch; the processor sees one row, with index 0."""
    return function(row, text)


def _guidance(processor: Any, row: int, rows: int) -> None:
    context = processor.unconditional_context
    if not context["first_pass"]:
        raise CapabilityError(
            f"A {type(processor).__name__} that has been used before has a cache of another text: make a new one."
        )
    for key in ("input_ids", "attention_mask"):
        if context[key] is not None:
            if context[key].shape[0] != rows:
                raise CapabilityError(
                    f"The negative prompts of guidance_scale are {context[key].shape[0]}, but the batch has {rows} "
                    "rows. Give negative_prompt_ids and negative_prompt_attention_mask one row each."
                )
            context[key] = context[key][row : row + 1]


def _synthid(processor: Any, row: int, rows: int) -> None:
    if processor.state is not None:
        raise CapabilityError(
            f"A {type(processor).__name__} that has been used before has the state of another batch: make a new one."
        )


_CUTS: dict[str, Callable[[Any, int, int], None]] = {
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition,
    "EncoderNoRepeatNGramLogitsProcessor": _encoder_ngrams,
    "PrefixConstrainedLogitsProcessor": _prefix,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _guidance,
    "SynthIDTextWatermarkLogitsProcessor": _synthid,
}
