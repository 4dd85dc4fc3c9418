"""Structured output: a logits processor that masks the tokens that a grammar forbids, with llguidance.

The engine calls the processor for each token to emit, in order; the grammar's state advances by the new tokens. Before
a verification the engine asks which tokens the grammar forces, to draft them at no cost, and which drafted tokens it
forbids (:mod:`longdraft.engine.grammar`).
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

# A cache, because making an LLTokenizer takes up to a second.
_ll_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, LLTokenizer] = WeakKeyDictionary()

# Keywords of JSON schema whose value is a schema or a list of schemas.
_SUBSCHEMA = {"items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "additionalItems", "not", "if",
          "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}  # fmt: skip
# Keywords whose value is a {name: schema} object.
_NAMED_SUBSCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
# Keywords that may allow properties which ``properties`` does not list.
_OPEN_KEYWORDS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "if"}
# llguidance's options for tools' schemas: it ignores unsupported keywords. By default it refuses such a schema.
LENIENT = {"lenient": True, "coerce_one_of": True}


def response_schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema of OpenAI's ``response_format``, None for type text; raises RequestError if it lacks one."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    wrapper = response_format.get(str(kind), response_format)  # clients of llama.cpp omit OpenAI's wrapper
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"type": "object"}
    if kind not in ("json_object", "json_schema"):
        raise RequestError(f"response_format.type must be text, json_object or json_schema, not {kind!r}")
    if not isinstance(schema, Mapping):
        raise RequestError(f"response_format of type {kind} needs {kind}.schema, an object")
    return schema


def json_grammar(schema: Mapping[str, Any], rules: str = "start: answer") -> str:
    """Returns the grammar of a JSON schema. It allows no white space and no unlisted properties.

    Args:
        rules: Lark rules, among them ``start``. They refer to the schema by the rule ``answer``.

    Raises:
        RequestError: llguidance does not accept the schema.
    """
    schema_json = json.dumps({**close_objects(schema), "x-guidance": {"whitespace_flexible": False}})
    return lark_grammar(f"{rules}\nanswer: %json {schema_json}\n")


def close_objects(schema: Any) -> Any:
    """Adds ``additionalProperties: false`` to objects that list properties and have no keyword that allows others.

    A schema with ``allOf`` is unchanged: its objects may have the properties of several lists.
    """
    return schema if '"allOf"' in json.dumps(schema) else _close_objects(schema)


def _close_objects(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = _map_subschemas(schema, _close_objects)
    if "properties" in schema and not _OPEN_KEYWORDS & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _map_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the schema with ``change`` applied to each direct subschema."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _NAMED_SUBSCHEMAS and isinstance(value, Mapping):
            changed[key] = {name: change(subschema) for name, subschema in value.items()}
        elif key in _SUBSCHEMA:
            changed[key] = [change(item) for item in value] if isinstance(value, list) else change(value)
    return changed


def rebase_refs(schema: Any, pointer: str) -> Any:
    """Makes each ``$ref`` of a schema relative to ``pointer`` (``#/$defs/a``), where another schema will embed it."""
    if not isinstance(schema, Mapping):
        return schema
    # An $id would change what references are relative to.
    without_id = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    rebased = _map_subschemas(without_id, lambda subschema: rebase_refs(subschema, pointer))
    reference = rebased.get("$ref")
    if isinstance(reference, str) and reference[:2] in ("#", "#/"):  # within the schema
        rebased["$ref"] = pointer + reference[1:]
    return rebased


def relax_tool_schema(schema: Mapping[str, Any], def_name: str, tool_name: str) -> dict[str, Any]:
    """Prepares a tool's schema to be embedded at ``#/$defs/{def_name}``. If llguidance refuses it, the properties at
    fault, or else the whole schema, allow any value. Logs a warning once."""

    def check(schema: Mapping[str, Any]) -> tuple[bool, list[str]]:  # -> (is refused, warnings)
        embedding = {"$ref": f"#/$defs/{def_name}", "$defs": {def_name: schema}, "x-guidance": LENIENT}
        return LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(json.dumps(embedding)))

    schema = close_objects(rebase_refs(schema, f"#/$defs/{def_name}"))
    (refused, warnings), relaxed = check(schema), []
    if refused and isinstance(properties := schema.get("properties"), Mapping):
        single = {name: {**schema, "properties": {name: x}, "required": []} for name, x in properties.items()}
        relaxed = [name for name, schema_of_one in single.items() if check(schema_of_one)[0]]
        schema = {**schema, "properties": {**properties, **dict.fromkeys(relaxed, True)}}
        refused, warnings = check(schema)
    if refused:
        schema, relaxed, warnings = {"type": "object"}, ["all of it"], []
    if relaxed or warnings:
        warn_not_followed(tool_name, ", ".join([*relaxed, *warnings]))
    return dict(schema)


@lru_cache(maxsize=1000)  # logs once for each tool
def warn_not_followed(tool_name: str, parts: str) -> None:
    logger.warning("The schema of tool %r is not followed in: %s", tool_name, parts)


def lark_grammar(rules: str) -> str:
    """Converts Lark rules to a grammar. Raises RequestError if llguidance does not accept them."""
    grammar = str(LLMatcher.grammar_from_lark(rules))
    if problem := LLMatcher.validate_grammar(grammar):
        raise RequestError(f"This schema cannot be followed: {problem.splitlines()[0]}")
    return grammar


def lark_tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """Returns Lark's notation for a tag such as ``<tool_call>``: a special token if there is one, else text."""
    ll = ll_tokenizer(tokenizer)
    tokens = ll.tokenize_str(tag)
    return tag if len(tokens) == 1 and ll.is_special_token(tokens[0]) else json.dumps(tag)


class Constraint:
    """A request's logits processor that follows a grammar; implements :class:`~longdraft.engine.grammar.Grammar`.

    Args:
        grammar: a grammar in llguidance's format.
        in_reasoning: the prompt ends inside ``<think>``. Text up to ``</think>`` is then unconstrained.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, prompt_len: int, in_reasoning: bool = False
    ) -> None:
        self._tokenizer, self._ll_tokenizer = tokenizer, ll_tokenizer(tokenizer)
        self._unconstrained, self._tail = in_reasoning, list[int]()  # the tail: last tokens of unconstrained text
        self._matcher = LLMatcher(self._ll_tokenizer, grammar)
        self._prompt_len, self._num_consumed = prompt_len, 0
        self._eos_id = tokenizer.eos_token_id
        self._check_prefix(self._matcher, self._matcher.compute_ff_tokens())  # ff: tokens that the grammar forces

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        clone = copy.copy(self)
        clone._matcher = self._matcher.deep_copy()
        return clone

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._consume(input_ids[0, self._prompt_len + self._num_consumed :].tolist())
        if self._unconstrained:
            return scores
        if self._matcher.is_stopped():
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool, device="cpu")
            allowed[self._eos_id] = True
        else:
            # llguidance returns a byte for each token, 0 if it is forbidden. The head may have more tokens, or fewer.
            mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            allowed = torch.nn.functional.pad(mask[: scores.shape[-1]], (0, max(0, scores.shape[-1] - len(mask))))
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _consume(self, token_ids: list[int]) -> None:
        for token in token_ids:
            self._num_consumed += 1
            if self._unconstrained:
                self._advance_unconstrained(token)
            else:
                self._advance(token)

    def _advance_unconstrained(self, token: int) -> None:
        """Begins to follow the grammar if this token completes ``</think>``."""
        self._tail = [*self._tail[-len(THINK_END) :], token]  # a new list, because clones share the old one
        _, end_tag, answer = str(self._tokenizer.decode(self._tail)).partition(THINK_END)
        if end_tag:
            self._unconstrained, self._tail = False, []
            self._matcher.try_consume_tokens(self._ll_tokenizer.tokenize_bytes(answer.encode()))

    def _advance(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens([token])
        if self._matcher.is_error():
            raise RequestError(f"The text does not follow the grammar: {self._matcher.get_error().splitlines()[0]}")

    @staticmethod
    def _check_prefix(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        """Raises RequestError if the grammar is too complex for llguidance to accept ``token_ids`` at its start."""
        matcher = matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise RequestError(f"This schema cannot be followed: {matcher.get_error().splitlines()[0]}")

    # --- the methods of Grammar, for drafts ---

    def advance_to(self, output: Sequence[int]) -> None:
        self._consume(list(output[self._num_consumed :]))

    def forced_tokens(self) -> list[int]:
        if self._unconstrained:
            return []
        if self._matcher.is_stopped():
            return [] if self._matcher.stop_reason() == "EndOfSentence" else [self._eos_id]
        return list(self._matcher.compute_ff_tokens())

    def likely_tokens(self) -> list[int]:
        """Returns the usual first token of a text that the grammar forces, which other tokens could write too."""
        if self._unconstrained:
            return []
        return list(self._ll_tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes())[:1])

    def accept_token(self, token: int) -> bool:
        if self._unconstrained:
            return True
        exists = token < self._ll_tokenizer.vocab_size  # the logits may be more than the vocabulary
        return exists and not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count and not self._unconstrained:
            self._matcher.rollback(count)


def ll_tokenizer(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    """Returns llguidance's tokenizer for a transformers tokenizer. Raises CapabilityError if it cannot be made."""
    if tokenizer not in _ll_tokenizers:
        if tokenizer.eos_token_id is None:
            raise CapabilityError("Structured output needs a tokenizer with an end-of-sequence token.")
        try:
            _ll_tokenizers[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:
            raise CapabilityError(f"llguidance cannot read this model's tokenizer: {error}.") from error
    return _ll_tokenizers[tokenizer]
