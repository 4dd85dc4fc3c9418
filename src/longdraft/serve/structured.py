"""Text bound to a grammar: a logits processor that forbids all other tokens, with llguidance.

longdraft calls a processor once for each emitted token, in order, with the text so far; the grammar's state advances by
the new tokens. Before that it asks what the grammar forces, which is drafted for nothing, and what it forbids of other
drafts (:mod:`longdraft.engine.grammar`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from longdraft.errors import CapabilityError, RequestError

# Making a tokenizer's table takes up to a second.
_tables: WeakKeyDictionary[PreTrainedTokenizerBase, LLTokenizer] = WeakKeyDictionary()


# Words of JSON schema: whose value is a schema or a list of them; whose value has them by name; that may allow further
# properties.
_INNER = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
_NAMED = {"properties", "$defs", "definitions"}
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "if"}


def grammar_for(response_format: Mapping[str, Any]) -> str | None:
    """llguidance's grammar for OpenAI's ``response_format``; None for any text.

    Raises:
        RequestError: an unknown type, or no valid schema.
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
    """The grammar of a JSON schema, without line breaks and further properties, in which small models get lost.

    Raises:
        RequestError: llguidance does not accept the schema.
    """
    written = json.dumps({**closed(schema), "x-guidance": {"whitespace_flexible": False}})
    return checked(str(LLMatcher.grammar_from_json_schema(written)))


def closed(schema: Any) -> Any:
    """The schema without further properties in objects that list theirs and say nothing of others.

    Schemas with ``allOf`` stay as they are, since an object then has the properties of several lists.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _closed(value) if key in _INNER else value for key, value in schema.items()}
    for key in _NAMED & schema.keys():
        found[key] = {name: _closed(value) for name, value in schema[key].items()}
    if "properties" in schema and not _OPEN & schema.keys():
        found["additionalProperties"] = False
    return found


def checked(grammar: str) -> str:
    """The grammar itself. Raises RequestError if llguidance does not accept it."""
    if wrong := LLMatcher.validate_grammar(grammar):
        raise RequestError(f"This schema cannot be followed: {wrong.splitlines()[0]}")
    return grammar


def in_grammar(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag such as ``<tool_call>`` in Lark: by its name if it is a token of its own, else as text."""
    table = _table(tokenizer)
    tokens = table.tokenize_str(tag)
    return tag if len(tokens) == 1 and table.is_special_token(tokens[0]) else json.dumps(tag)


class Constraint:
    """A logits processor for one request, which is also a :class:`~longdraft.engine.grammar.Grammar`.

    Args:
        grammar: llguidance's. prompt: how many tokens the prompt has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammar: str, prompt: int) -> None:
        self._table = _table(tokenizer)
        self._matcher = LLMatcher(self._table, grammar)
        self._prompt, self._consumed = prompt, 0
        self._eos = tokenizer.eos_token_id

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._consume(input_ids[0, self._prompt + self._consumed :].tolist())
        if self._matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool, device="cpu")
            allowed[self._eos] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            allowed = torch.nn.functional.pad(bits[: scores.shape[-1]], (0, max(0, scores.shape[-1] - len(bits))))
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _consume(self, new: list[int]) -> None:
        self._consumed += len(new)
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            raise RequestError(f"The grammar was left: {self._matcher.get_error().splitlines()[0]}")

    # --- looking ahead ---

    def read(self, output: Sequence[int]) -> None:
        self._consume(list(output[self._consumed :]))

    def forced(self) -> list[int]:
        if self._matcher.is_stopped():
            return [] if self._matcher.stop_reason() == "EndOfSentence" else [self._eos]
        return list(self._matcher.compute_ff_tokens())

    def likely(self) -> list[int]:
        """The first token of the bytes that must come, which could be divided into tokens in other ways too."""
        return list(self._table.tokenize_bytes(self._matcher.compute_ff_bytes())[:1])

    def follow(self, token: int) -> bool:
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)


def _table(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    if tokenizer not in _tables:
        if tokenizer.eos_token_id is None:
            raise CapabilityError("Structured output needs a tokenizer with an end-of-sequence token.")
        try:
            _tables[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:
            raise CapabilityError(f"llguidance cannot read this model's tokenizer: {error}.") from error
    return _tables[tokenizer]
