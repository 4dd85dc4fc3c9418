"""Logits processors for a batch whose rows decode at their own pace: each row gets its own.

transformers calls a processor once a step, with all rows. Here a row has processors that see it alone, (1, n)
ids and (1, vocabulary) scores, once for every emitted token and in order. Each row of a batch gets a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TopPLogitsWarper
from transformers.generation import logits_process as known

from longdraft.errors import CapabilityError

# Those that hold something of each row of the batch, and the arguments of ``generate`` that make them.
_OF_A_BATCH = {
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
}
# Tokens that are less probable are rarely among those that top-p keeps; there are 100,000 others at most.
_LEAST = 1e-5


class FastTopP(TopPLogitsWarper):
    """transformers' top-p, which sorts the whole vocabulary, on the likely tokens alone where they are enough."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.shape[0] > 1 or scores.device.type != "cpu" or self.min_tokens_to_keep > 1:
            return super().__call__(input_ids, scores)
        probabilities = scores[0].softmax(-1)
        tokens = (probabilities >= _LEAST).nonzero()[:, 0]
        likely, order = probabilities[tokens].sort(descending=True)
        before = likely.cumsum(0) - likely
        if not len(likely) or before[-1] < self.top_p:  # all of them stay, and others might
            return super().__call__(input_ids, scores)
        kept = tokens[order[before < self.top_p]]
        return torch.full_like(scores, self.filter_value).index_copy_(1, kept, scores[:, kept])


def copy_processors(processors: Iterable[Any]) -> LogitsProcessorList:
    """Copies processors with their present state; models and tokenizers that one holds are shared with the copy.

    Raises:
        CapabilityError: naming a processor that cannot be copied.
    """
    return LogitsProcessorList([_copy(p) for p in processors])


def processors_for_sequence(processors: Iterable[Any], sequence_index: int, num_sequences: int) -> LogitsProcessorList:
    """Returns the processors of one row of a batch; in a batch of one, the processors themselves.

    Raises:
        CapabilityError: naming a processor that cannot be called with single rows.
    """
    return LogitsProcessorList([_of_row(p, sequence_index, num_sequences) for p in processors])


def _of_row(processor: Any, row: int, rows: int) -> Any:
    if type(processor) is TopPLogitsWarper:
        processor = FastTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)
    name = type(processor).__name__
    of_transformers = type(processor).__module__ == known.__name__
    if of_transformers and name == "ClassifierFreeGuidanceLogitsProcessor":
        raise CapabilityError(
            f"longdraft calls logits processors with one row, and {name} wants the logits of two forwards: "
            "guidance_scale= makes one that works with one."
        )
    if rows == 1:
        return processor
    # The repetition penalty knows how much padding each row has.
    lengths = x if isinstance(x := getattr(processor, "prompt_ignore_length", None), torch.Tensor) else None
    of_a_batch = name in _OF_A_BATCH or getattr(processor, "state", None) is not None
    grammars = getattr(processor, "compiled_grammars", ())  # xgrammar's: one for all rows, or one for each
    wrong = of_transformers and (of_a_batch or (lengths is not None and lengths.shape[0] != rows))
    if wrong or len(grammars) not in (0, 1, rows):
        raise CapabilityError(
            f"longdraft calls logits processors with one row, and this {name} is made for another batch, or for all "
            f"{rows} rows of this one: give one prompt at a time, or leave {_OF_A_BATCH.get(name, 'it')} out."
        )
    copied = _copy(processor)
    if len(grammars) > 1:
        copied.compiled_grammars = grammars[row : row + 1]
    if lengths is not None:
        copied.prompt_ignore_length = lengths[row : row + 1]
    return copied


def _copy(processor: Any) -> Any:
    parts = vars(processor) if hasattr(processor, "__dict__") else {}
    shared = [p for p in parts.values() if isinstance(p, (torch.nn.Module, PreTrainedTokenizerBase))]
    shared += parts.get("compiled_grammars", ())  # which are never changed
    try:
        return copy.deepcopy(processor, {id(part): part for part in shared})
    except Exception as error:  # whatever a class of a user's raises when it is copied
        raise CapabilityError(
            f"{type(processor).__name__} cannot be copied ({error}), and every row of a batch needs a logits processor "
            "of its own, because rows are decoded at their own pace. Give it a __deepcopy__, or decode one prompt at a "
            "time."
        ) from error
