"""Text bound to a grammar: a logits processor that forbids all other tokens, with llguidance.

longdraft calls a processor once for each emitted token, in order, with the text so far; the grammar's state advances by
the new tokens. Before that it asks what the grammar forces, which is drafted for nothing, and what it forbids of other
drafts (:mod:`longdraft.engine.grammar`).
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from longdraft.errors import CapabilityError, RequestError
from longdraft.serve.reasoning import THINK_END

logger = logging.getLogger(__name__)

# Making a tokenizer's table takes up to a second.
_tables: WeakKeyDictionary[PreTrainedTokenizerBase, LLTokenizer] = WeakKeyDictionary()


# Words of JSON schema: whose value is a schema or a list of them; whose value has them by name; that may allow further
# properties.
_INNER = {"items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "additionalItems", "not", "if",
          "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}  # fmt: skip
_NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "if"}
# A tool's schema is followed as far as llguidance can; that of an answer wholly, or it is refused.
LENIENT = {"lenient": True, "coerce_one_of": True}


def response_schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of OpenAI's ``response_format``; None for any text.

    Raises:
        RequestError: an unknown type, or no schema.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None
    found = response_format.get(str(kind), response_format)  # llama.cpp's clients leave OpenAI's wrapper out
    schema = found.get("schema") if isinstance(found, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"type": "object"}
    if kind not in ("json_object", "json_schema"):
        raise RequestError(f"response_format.type is text, json_object or json_schema, not {kind!r}")
    if not isinstance(schema, Mapping):
        raise RequestError(f"response_format of type {kind} needs {kind}.schema, an object")
    return schema


def json_grammar(schema: Mapping[str, Any], rules: str = "start: answer") -> str:
    """The grammar of a JSON schema, without line breaks and further properties, in which small models get lost.

    Args:
        rules: Lark's, where the schema stands as ``answer`` among others.

    Raises:
        RequestError: llguidance does not accept the schema.
    """
    written = json.dumps({**close_objects(schema), "x-guidance": {"whitespace_flexible": False}})
    return validate_grammar(str(LLMatcher.grammar_from_lark(f"{rules}\nanswer: %json {written}\n")))


def close_objects(schema: Any) -> Any:
    """The schema without further properties in objects that list theirs and say nothing of others.

    Schemas with ``allOf`` stay as they are, since an object then has the properties of several lists.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = _with_inner(schema, _closed)
    if "properties" in schema and not _OPEN & schema.keys():
        found["additionalProperties"] = False
    return found


def _with_inner(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with the schemas directly inside it changed."""
    found = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: change(each) for name, each in value.items()}
        elif key in _INNER:
            found[key] = [change(each) for each in value] if isinstance(value, list) else change(value)
    return found


def rebase_refs(schema: Any, pointer: str) -> Any:
    """A schema whose references are right when it stands at a place of another, such as ``#/$defs/a``."""
    if not isinstance(schema, Mapping):
        return schema
    # An address of its own would be what references begin at.
    kept = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    found = _with_inner(kept, lambda inner: rebase_refs(inner, pointer))
    reference = found.get("$ref")
    if isinstance(reference, str) and reference[:2] in ("#", "#/"):
        found["$ref"] = pointer + reference[1:]
    return found


def relax_tool_schema(schema: Mapping[str, Any], def_name: str, tool_name: str) -> dict[str, Any]:
    """A tool's schema, to stand at ``#/$defs/place``, with anything in the place of the properties that no grammar can
    follow, or of all of it; the log says so, once."""

    def fault(tried: Mapping[str, Any]) -> tuple[bool, list[str]]:
        whole = {"$ref": f"#/$defs/{def_name}", "$defs": {def_name: tried}, "x-guidance": LENIENT}
        return LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(json.dumps(whole)))

    schema = close_objects(rebase_refs(schema, f"#/$defs/{def_name}"))
    found, left = fault(schema), []
    if found[0] and isinstance(named := schema.get("properties"), Mapping):
        left = [name for name in named if fault({**schema, "properties": {name: named[name]}, "required": []})[0]]
        schema = {**schema, "properties": {**named, **dict.fromkeys(left, True)}}
        found = fault(schema)
    if found[0]:
        schema, left, found = {"type": "object"}, ["all of it"], (False, [])
    if left or found[1]:
        warn_not_followed(tool_name, ", ".join([*left, *found[1]]))
    return dict(schema)


@lru_cache(maxsize=1000)
def warn_not_followed(tool_name: str, parts: str) -> None:
    logger.warning("The schema of tool %r is not followed in: %s", tool_name, parts)


def validate_grammar(grammar: str) -> str:
    """The grammar itself. Raises RequestError if llguidance does not accept it."""
    if wrong := LLMatcher.validate_grammar(grammar):
        raise RequestError(f"This schema cannot be followed: {wrong.splitlines()[0]}")
    return grammar


def lark_tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag such as ``<tool_call>`` in Lark: by its name if it is a token of its own, else as text."""
    table = ll_tokenizer(tokenizer)
    tokens = table.tokenize_str(tag)
    return tag if len(tokens) == 1 and table.is_special_token(tokens[0]) else json.dumps(tag)


class Constraint:
    """A logits processor for one request, which is also a :class:`~longdraft.engine.grammar.Grammar`.

    Args:
        grammar: llguidance's. prompt: how many tokens the prompt has.
        thinking: the prompt ends within ``<think>``: the text is bound from the end of that on.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, prompt_len: int, in_reasoning: bool = False
    ) -> None:
        self._tokenizer, self._ll_tokenizer = tokenizer, ll_tokenizer(tokenizer)
        self._unconstrained, self._unconstrained_tail = in_reasoning, list[int]()  # the last tokens of what is free
        self._matcher = LLMatcher(self._ll_tokenizer, grammar)
        self._prompt_len, self._consumed = prompt_len, 0
        self._eos = tokenizer.eos_token_id
        self._check_prefix(self._matcher, self._matcher.compute_ff_tokens())

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._consume(input_ids[0, self._prompt_len + self._consumed :].tolist())
        if self._unconstrained:
            return scores
        if self._matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool, device="cpu")
            allowed[self._eos] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            allowed = torch.nn.functional.pad(bits[: scores.shape[-1]], (0, max(0, scores.shape[-1] - len(bits))))
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _consume(self, new: list[int]) -> None:
        for token in new:
            self._consumed += 1
            if self._unconstrained:
                self._advance_unconstrained(token)
            else:
                self._advance(token)

    def _advance_unconstrained(self, token: int) -> None:
        """Binds the text if its thoughts end with this token."""
        self._unconstrained_tail = [*self._unconstrained_tail[-len(THINK_END) :], token]  # a new list: copies share it
        _, ended, behind = str(self._tokenizer.decode(self._unconstrained_tail)).partition(THINK_END)
        if ended:
            self._unconstrained, self._unconstrained_tail = False, []
            self._matcher.try_consume_tokens(self._ll_tokenizer.tokenize_bytes(behind.encode()))

    def _advance(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens([token])
        if self._matcher.is_error():
            raise RequestError(f"The grammar was left: {self._matcher.get_error().splitlines()[0]}")

    @staticmethod
    def _check_prefix(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        """Raises RequestError now if the first tokens are too much for the grammar."""
        matcher = matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise RequestError(f"This schema cannot be followed: {matcher.get_error().splitlines()[0]}")

    # --- looking ahead ---

    def advance_to(self, output: Sequence[int]) -> None:
        self._consume(list(output[self._consumed :]))

    def forced_tokens(self) -> list[int]:
        if self._unconstrained:
            return []
        if self._matcher.is_stopped():
            return [] if self._matcher.stop_reason() == "EndOfSentence" else [self._eos]
        return list(self._matcher.compute_ff_tokens())

    def likely_tokens(self) -> list[int]:
        """The first token of the bytes that must come, which could be divided into tokens in other ways too."""
        if self._unconstrained:
            return []
        return list(self._ll_tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes())[:1])

    def accept_token(self, token: int) -> bool:
        if self._unconstrained:
            return True
        known = token < self._ll_tokenizer.vocab_size  # a draft's may be none: models have more than their tokenizers
        return known and not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count and not self._unconstrained:
            self._matcher.rollback(count)


def ll_tokenizer(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    if tokenizer not in _tables:
        if tokenizer.eos_token_id is None:
            raise CapabilityError("Structured output needs a tokenizer with an end-of-sequence token.")
        try:
            _tables[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:
            raise CapabilityError(f"llguidance cannot read this model's tokenizer: {error}.") from error
    return _tables[tokenizer]
