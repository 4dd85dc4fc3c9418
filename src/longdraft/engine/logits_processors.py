"""Logits processors for sequences of a batch that advance independently: each sequence has its own copies.

transformers calls a processor once a step with the whole batch. Here a processor sees one sequence: (1, n) ids and
(1, vocabulary) scores, once for each emitted token, in order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TopPLogitsWarper
from transformers.generation import logits_process as transformers_processors

from longdraft.errors import CapabilityError

# Processors with state for each sequence of a batch -> the argument of ``generate`` that makes them.
_BATCH_PROCESSORS = {
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
}
# top-p rarely keeps tokens below this probability. At most 100,000 tokens are above.
_MIN_PROBABILITY = 1e-5


class FastTopP(TopPLogitsWarper):
    """transformers' top-p, but sorts only tokens above a probability, if these are enough, not the whole vocabulary."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.shape[0] > 1 or scores.device.type != "cpu" or self.min_tokens_to_keep > 1:
            return super().__call__(input_ids, scores)
        probabilities = scores[0].softmax(-1)
        tokens = (probabilities >= _MIN_PROBABILITY).nonzero()[:, 0]
        sorted_probabilities, order = probabilities[tokens].sort(descending=True)
        before = sorted_probabilities.cumsum(0) - sorted_probabilities
        if not len(sorted_probabilities) or before[-1] < self.top_p:  # all of them are kept, and perhaps others
            return super().__call__(input_ids, scores)
        kept_ids = tokens[order[before < self.top_p]]
        return torch.full_like(scores, self.filter_value).index_copy_(1, kept_ids, scores[:, kept_ids])


def copy_processors(processors: Iterable[Any]) -> LogitsProcessorList:
    """Copies processors with their state. Models and tokenizers in them are shared, not copied.

    Raises:
        CapabilityError: naming a processor that cannot be copied.
    """
    return LogitsProcessorList([_copy(p) for p in processors])


def processors_for_sequence(processors: Iterable[Any], sequence_index: int, num_sequences: int) -> LogitsProcessorList:
    """Returns the processors of one sequence of a batch; for a batch of one, the processors themselves.

    Raises:
        CapabilityError: a processor cannot be called with single sequences.
    """
    return LogitsProcessorList([_for_sequence(p, sequence_index, num_sequences) for p in processors])


def _for_sequence(processor: Any, sequence_index: int, num_sequences: int) -> Any:
    if type(processor) is TopPLogitsWarper:
        processor = FastTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)
    name = type(processor).__name__
    is_transformers = type(processor).__module__ == transformers_processors.__name__
    if is_transformers and name == "ClassifierFreeGuidanceLogitsProcessor":
        raise CapabilityError(
            f"longdraft calls logits processors with one row, and {name} needs the logits of two forwards: "
            "use guidance_scale= instead, whose processor needs one."
        )
    if num_sequences == 1:
        return processor
    # The repetition penalty has the padding of each sequence.
    lengths = x if isinstance(x := getattr(processor, "prompt_ignore_length", None), torch.Tensor) else None
    is_per_batch = name in _BATCH_PROCESSORS or getattr(processor, "state", None) is not None
    grammars = getattr(processor, "compiled_grammars", ())  # xgrammar's: one for all sequences, or one for each
    is_unusable = is_transformers and (is_per_batch or (lengths is not None and lengths.shape[0] != num_sequences))
    if is_unusable or len(grammars) not in (0, 1, num_sequences):
        raise CapabilityError(
            f"longdraft calls logits processors with one row, and this {name} is made for another batch, or for all "
            f"{num_sequences} rows of this one: give one prompt at a time, or leave "
            f"{_BATCH_PROCESSORS.get(name, 'it')} out."
        )
    copied = _copy(processor)
    if len(grammars) > 1:
        copied.compiled_grammars = grammars[sequence_index : sequence_index + 1]
    if lengths is not None:
        copied.prompt_ignore_length = lengths[sequence_index : sequence_index + 1]
    return copied


def _copy(processor: Any) -> Any:
    parts = vars(processor) if hasattr(processor, "__dict__") else {}
    shared = [p for p in parts.values() if isinstance(p, (torch.nn.Module, PreTrainedTokenizerBase))]
    shared += parts.get("compiled_grammars", ())  # immutable
    try:
        return copy.deepcopy(processor, {id(part): part for part in shared})
    except Exception as error:  # a user's class may raise anything
        raise CapabilityError(
            f"{type(processor).__name__} cannot be copied ({error}), and every row of a batch needs a logits processor "
            "of its own, because rows are decoded at their own pace. Give it a __deepcopy__, or decode one prompt at a "
            "time."
        ) from error
