"""Copies the logits processors of a batch for each sequence, because the sequences advance independently.

transformers calls a processor with the whole batch, once a step. longdraft calls a processor with the ids (1, n) and
the scores (1, vocabulary) of one sequence, once for each emitted token, in order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TopPLogitsWarper
from transformers.generation import logits_process as transformers_processors

from longdraft.attention import custom_ops
from longdraft.errors import CapabilityError
from longdraft.model.gpu.top_p import keep_top_p

# Name of a processor class that holds state of all sequences of a batch -> the argument of ``generate`` that makes it.
_BATCH_PROCESSORS = {
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
}
# Classes of grammar libraries that deepcopy cannot copy (xgrammar, llguidance, and outlines, which uses both): grammars
# and vocabularies, which are immutable, and matchers, with the method that copies one with its state.
_IMMUTABLE_CLASSES = ("CompiledGrammar", "TokenizerInfo", "LLTokenizer")
_MATCHER_COPIES = {"GrammarMatcher": "fork", "LLMatcher": "deep_copy"}
_MAX_DEPTH = 3  # attributes of attributes, and items of lists in them, are searched for such objects
_WAY = (
    "give each prompt a processor of its own, by Request(processors=[...]) in Speculator.generate, or give one prompt "
    "at a time"
)
# Few tokens have at least this probability, so sorting these tokens is cheap. top-p rarely keeps a less likely token.
_MIN_PROBABILITY = 1e-5


class FastTopP(TopPLogitsWarper):
    """transformers' top-p, faster. On a CPU only the tokens above ``_MIN_PROBABILITY`` are sorted, if their sum reaches
    ``top_p``. On a GPU nothing is sorted; of equally probable tokens all or none are kept."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.device.type == "cuda" and self.min_tokens_to_keep == 1 and custom_ops.triton_enabled():
            return keep_top_p(scores, float(self.top_p), self.filter_value)
        if scores.shape[0] > 1 or scores.device.type != "cpu" or self.min_tokens_to_keep > 1:
            return super().__call__(input_ids, scores)
        probabilities = scores[0].softmax(-1)
        tokens = (probabilities >= _MIN_PROBABILITY).nonzero()[:, 0]
        sorted_probabilities, order = probabilities[tokens].sort(descending=True)
        sum_before = sorted_probabilities.cumsum(0) - sorted_probabilities
        if not len(tokens) or sum_before[-1] < self.top_p:  # tokens below _MIN_PROBABILITY may be kept too
            return super().__call__(input_ids, scores)
        kept_ids = tokens[order[sum_before < self.top_p]]
        return torch.full_like(scores, self.filter_value).index_copy_(1, kept_ids, scores[:, kept_ids])


def copy_processors(processors: Iterable[Any]) -> LogitsProcessorList:
    """Copies processors with their state. Models, tokenizers and grammars that a processor refers to are shared.

    Raises:
        CapabilityError: a processor cannot be copied; the message names it.
    """
    return LogitsProcessorList([_copy(p) for p in processors])


def processors_for_sequence(processors: Iterable[Any], sequence_index: int, num_sequences: int) -> LogitsProcessorList:
    """Returns the processors for sequence ``sequence_index`` of a batch of ``num_sequences``, copied unless that is 1.

    Raises:
        CapabilityError: a processor works on a whole batch only.
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
            "use guidance_scale= instead."
        )
    if num_sequences == 1:
        return processor
    # transformers' repetition penalty has a tensor with the padding length of each sequence.
    padding_lens = x if isinstance(x := getattr(processor, "prompt_ignore_length", None), torch.Tensor) else None
    is_of_other_batch = padding_lens is not None and padding_lens.shape[0] != num_sequences
    needs_whole_batch = is_of_other_batch or name in _BATCH_PROCESSORS or getattr(processor, "state", None) is not None
    grammars = getattr(processor, "compiled_grammars", ())  # of xgrammar: one for the batch, or one for each sequence
    # xgrammar makes its matchers in the first call, and outlines' processors, which have an adapter, note that call.
    is_first_call = getattr(processor, "is_first_token", True) or not hasattr(processor, "tensor_adapter")
    is_used = bool(grammars and getattr(processor, "matchers", ())) or not is_first_call
    if (is_transformers and needs_whole_batch) or is_used or len(grammars) not in (0, 1, num_sequences):
        raise CapabilityError(
            f"longdraft calls logits processors with one row, and this {name} is made for another batch, or for all "
            f"{num_sequences} rows of this one: {_WAY}, or leave {_BATCH_PROCESSORS.get(name, 'it')} out."
        )
    copied = _copy(processor)
    if len(grammars) > 1:
        copied.compiled_grammars = grammars[sequence_index : sequence_index + 1]
    if padding_lens is not None:
        copied.prompt_ignore_length = padding_lens[sequence_index : sequence_index + 1]
    return copied


def _copy(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor, {id(part): copied for part, copied in _special_copies(processor)})  # the memo
    except Exception as error:  # a user's class may raise anything
        raise CapabilityError(
            f"{type(processor).__name__} cannot be copied ({error}), and every row of a batch needs a logits processor "
            f"of its own, because rows are decoded at their own pace: {_WAY}, or give it a __deepcopy__."
        ) from error


def _special_copies(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields (part, copy) for parts of a processor that deepcopy must not or cannot copy. Most are their own copies."""
    name, shared_types = type(value).__name__, (torch.nn.Module, PreTrainedTokenizerBase, ModuleType)
    if depth and (isinstance(value, shared_types) or name in _IMMUTABLE_CLASSES):
        yield value, value
    elif name in _MATCHER_COPIES and hasattr(value, _MATCHER_COPIES[name]):
        yield value, getattr(value, _MATCHER_COPIES[name])()
    elif depth < _MAX_DEPTH:
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        yield from ((grammar, grammar) for grammar in attributes.get("compiled_grammars", ()))
        parts = value if isinstance(value, (list, tuple)) else attributes.values()
        for part in parts:
            yield from _special_copies(part, depth + 1)
