"""Text that follows a grammar: a logits processor that forbids what the grammar does not allow (llguidance).

longdraft calls a processor once for every emitted token, in order, with the text so far, so the grammar's state moves
on by what is new in it. Drafted tokens that the grammar forbids are refuted like any other wrong guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from longdraft.errors import CapabilityError, RequestError

# A tokenizer's tables take up to a second.
_tables: WeakKeyDictionary[PreTrainedTokenizerBase, LLTokenizer] = WeakKeyDictionary()


def grammar_for(response_format: Mapping[str, Any]) -> str | None:
    """llguidance's grammar of an OpenAI ``response_format``; None: any text.

    Raises:
        RequestError: a kind that there is not, or a schema that is none.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
            return json_grammar(schema["schema"])
        raise RequestError("response_format of type json_schema needs json_schema.schema, an object")
    raise RequestError(f"response_format.type is text, json_object or json_schema, not {kind!r}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema describes, on one line: small models lose themselves in white space.

    Raises:
        RequestError: what llguidance says is wrong with the schema.
    """
    written = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    return checked(str(LLMatcher.grammar_from_json_schema(written)))


def checked(grammar: str) -> str:
    """The grammar. Raises RequestError where llguidance cannot follow it."""
    if wrong := LLMatcher.validate_grammar(grammar):
        raise RequestError(f"This schema cannot be followed: {wrong.splitlines()[0]}")
    return grammar


class Constraint:
    """A logits processor for one request.

    Args:
        grammar: llguidance's. prompt: tokens of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammar: str, prompt: int) -> None:
        self._matcher = LLMatcher(_table(tokenizer), grammar)
        self._seen = prompt
        self._eos = tokenizer.eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[0, self._seen :].tolist()
        self._seen += len(new)
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            raise RequestError(f"The grammar was left: {self._matcher.get_error().splitlines()[0]}")
        if self._matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
            allowed[self._eos] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            allowed = torch.nn.functional.pad(bits[: scores.shape[-1]], (0, max(0, scores.shape[-1] - len(bits))))
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))


def _table(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    if tokenizer not in _tables:
        if tokenizer.eos_token_id is None:
            raise CapabilityError("Structured output needs a tokenizer with an end-of-sequence token.")
        try:
            _tables[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:
            raise CapabilityError(f"llguidance cannot read this model's tokenizer: {error}.") from error
    return _tables[tokenizer]
