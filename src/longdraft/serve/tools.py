"""Tool calls: the prompt that lists the tools, and the grammar of calls.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the form of Qwen's and Hermes' models. The tools
go through the chat template if it supports them, else into a system message.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from longdraft.errors import PromptError, RequestError
from longdraft.model.chat import apply_chat_template
from longdraft.serve.reasoning import THINK_END, THINK_START
from longdraft.serve.structured import (
    LENIENT,
    Constraint,
    json_grammar,
    lark_tag,
    relax_tool_schema,
    validate_grammar,
    warn_not_followed,
)
from longdraft.serve.tool_parser import ARGUMENTS_KEY, TOOL_CALL_END, TOOL_CALL_START, call_start_pattern
from longdraft.serve.tool_types import tool_type

_SPACE, _SPACES = r"[ \n\t]{0,40}", r"/\s{0,40}/"  # white space within a call: in its JSON, and between its parts
_INSTRUCTIONS = f"""You may call these functions:
{{functions}}
To call one, answer with {TOOL_CALL_START}{{{{"name": NAME, "arguments": {{{{...}}}}}}}}{TOOL_CALL_END} and nothing else."""


def resolve_tool_choice(
    tools: Sequence[dict[str, Any]], tool_choice: str | Mapping[str, Any] | None
) -> tuple[str, list[dict[str, Any]]]:
    """The choice as "none", "auto", "required" or the name of the function to call; and the functions that may be.

    Raises:
        RequestError: a tool is not a named function, or the choice is unknown.
    """
    known = {}
    for tool in tools:
        function = tool.get("function")
        found = function if isinstance(function, Mapping) else {}
        name = found.get("name")
        if not (isinstance(name, str) and name and isinstance(found.get("parameters") or {}, Mapping | bool)):
            raise RequestError(
                "tools are functions: {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        known[name] = tool
    allowed = list(known)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        among = _inner(tool_choice)
        listed = among.get("tools")
        named = [_name(each) for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
        allowed, tool_choice = [name for name in named if name in known], among.get("mode", "auto")
        if not allowed:
            raise RequestError(f"tool_choice allows {', '.join(named) or 'nothing'}, and tools has {_listed(known)}")
    if isinstance(tool_choice, Mapping):
        name = _name(tool_choice)
        if name in known:
            return name, [known[name]]
        if name not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice names {name!r}, and tools has {_listed(known)}")
        tool_choice = name
    if tool_choice not in (None, "none", "auto", "required"):
        raise RequestError(f"tool_choice is none, auto, required or a function, not {tool_choice!r}")
    if tool_choice == "required" and not tools:
        raise RequestError("tool_choice is required, and there are no tools")
    tool_choice = tool_choice or "auto"
    return tool_choice, [] if tool_choice == "none" else [known[name] for name in allowed]


def _inner(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a choice, which chats have under the name of its type."""
    found = choice.get(tool_type(choice))
    return found if isinstance(found, Mapping) else choice


def _name(choice: Mapping[str, Any]) -> str:
    return str(_inner(choice).get("name") or tool_type(choice))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def tool_constraint(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str,
    parallel: bool,
    prompt_len: int,
    in_reasoning: bool = False,
    answer_schema: Mapping[str, Any] | None = None,
) -> Constraint | None:
    """The logits processor of a text that may call these functions ("auto"), or has to; None: nothing binds it.

    Args:
        thinking: the prompt ends within ``<think>``, where nothing is bound.
        schema: of a text that is no call; None: it is free.
    """
    start = r"start: /\n{0,2}/" if in_reasoning else "start:"
    answer = "" if answer_schema is None else json_grammar(answer_schema, f"{start} answer")
    if not tools:
        return Constraint(tokenizer, answer, prompt_len, in_reasoning) if answer else None

    def made(tools: Sequence[Mapping[str, Any]]) -> Constraint:
        if tool_choice == "auto" and answer_schema is None:
            return ToolCallConstraint(tokenizer, tools, prompt_len, parallel, in_reasoning)
        tags = [lark_tag(tokenizer, tag) for tag in (TOOL_CALL_START, TOOL_CALL_END)]
        if tool_choice != "auto":
            calls = "call+" if parallel and tool_choice == "required" else "call"
            rules = f"{start} {calls}\ncall: {' function '.join(tags)}\nfunction: %json {_call_schema(tools)}\n"
            return Constraint(
                tokenizer, validate_grammar(str(LLMatcher.grammar_from_lark(rules))), prompt_len, in_reasoning
            )
        function = _call_schema(tools, whitespace_flexible=True, whitespace_pattern=_SPACE)
        tagged, bare = (f"{each} ({_SPACES} {each})*" if parallel else each for each in ("tagged", "function"))
        within = f" {_SPACES} function {_SPACES} ".join(tags)
        calls = f"calls: {tagged} | {bare}\ntagged: {within}\nfunction: %json {function}\n"
        either = json_grammar(answer_schema or {}, f"{start} (calls | answer)\n{calls}")
        only = validate_grammar(str(LLMatcher.grammar_from_lark(f"{start} calls\n{calls}")))
        names = [tool["function"]["name"] for tool in tools]
        return _Either(tokenizer, either, only, answer, names, prompt_len, in_reasoning)

    try:
        return made(tools)
    except RequestError:  # too much for a grammar
        names = [tool["function"]["name"] for tool in tools]
        warn_not_followed(", ".join(names), "all of it")
        return made([{"function": {"name": name}} for name in names])


def _call_schema(tools: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The schema of a call of one of the functions; what a grammar cannot follow of their parameters is left out.

    Args:
        options: llguidance's.
    """
    calls, parameters = [], {}
    for number, function in enumerate(tool["function"] for tool in tools):
        schema, place = function.get("parameters"), f"f{number}"
        schema = schema if isinstance(schema, Mapping) else {}
        if "$ref" not in schema:
            schema = {**schema, "type": "object"}
        parameters[place] = relax_tool_schema(schema, place, function["name"])
        calls.append({
            "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{place}"}},
        })  # fmt: skip
    guidance = {"whitespace_flexible": False, **LENIENT, **options}
    return json.dumps({"anyOf": calls, "$defs": parameters, "x-guidance": guidance})


class _Either(Constraint):
    """Binds a text to calls or to an answer: to an answer where the model would begin to say something, to calls once
    it begins as one, though the answer could begin so too.

    Args:
        grammar: of both. calls, answer: of one alone. names: of the functions.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, calls: str, answer: str, names: Iterable[str],
        prompt: int, thinking: bool,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, grammar, prompt, thinking)
        self._calls, self._answer = (LLMatcher(self._ll_tokenizer, each) for each in (calls, answer))
        self._starts = call_start_pattern(names, ARGUMENTS_KEY)
        self._begun: list[int] | None = []  # tokens that may begin a call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.advance_to(input_ids[0, self._prompt_len :].tolist())
        if not self._unconstrained and self._begun is not None:
            begun = self._tokenizer.decode([*self._begun, int(scores[0].argmax())]).lstrip()
            if begun and begun[0] not in "<{[`":  # of which no call begins
                self._matcher, self._begun = self._answer.deep_copy(), None
        return super().__call__(input_ids, scores)

    def _advance(self, token: int) -> None:
        super()._advance(token)
        if self._begun is None:
            return
        begun = self._begun = [*self._begun, token]  # a new list: copies share it
        found = self._starts.match("\n" + str(self._tokenizer.decode(begun)).lstrip(), 1, partial=True)
        if found and found.partial:  # it may yet
            return
        self._begun, calls = None, self._calls.deep_copy()
        if found and calls.try_consume_tokens(begun) == len(begun):
            self._matcher = calls


class ToolCallConstraint(Constraint):
    """Binds calls of functions from where they begin; the text before, between and behind is the model's own.

    Args:
        parallel: several calls may come. thinking: the prompt ends within ``<think>``, where nothing is a call.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], prompt_len: int, parallel: bool,
        in_reasoning: bool,
    ) -> None:  # fmt: skip
        answer = f"answer: %json {_call_schema(tools, whitespace_flexible=True, whitespace_pattern=_SPACE)}\n"
        tagged = f"start: {_SPACES} answer {_SPACES} {lark_tag(tokenizer, TOOL_CALL_END)} {_SPACES}\n{answer}"
        super().__init__(tokenizer, validate_grammar(str(LLMatcher.grammar_from_lark(tagged))), prompt_len)
        self._tagged = self._matcher
        bare = f'start: (answer | "{{" answer "}}") {_SPACES}\n{answer}'
        self._bare = LLMatcher(self._ll_tokenizer, validate_grammar(str(LLMatcher.grammar_from_lark(bare))))
        names = [tool["function"]["name"] for tool in tools]
        for name in names:
            begun = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)[:-2]
            self._check_prefix(self._bare, self._ll_tokenizer.tokenize_bytes(begun.encode()))
        self._starts = call_start_pattern(names)
        self._parallel, self._thinking = parallel, in_reasoning
        self._unconstrained, self._first = True, True
        self._before = "\n"  # the character before the tokens that may begin a call

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        return copy.copy(self) if self._unconstrained else super().__deepcopy__(memo)

    def _advance(self, token: int) -> None:
        super()._advance(token)
        if self._matcher.is_accepting() and self._parallel:
            self._unconstrained, self._unconstrained_tail, self._before = True, [], "\n"

    def _advance_unconstrained(self, token: int) -> None:
        """Binds the text if a call begins with this token."""
        self._unconstrained_tail = [*self._unconstrained_tail, token]  # a new list: copies share it
        text = self._before + str(self._tokenizer.decode(self._unconstrained_tail))
        if self._first and (said := text.strip()):
            self._thinking |= said.startswith(THINK_START)
            self._first = THINK_START.startswith(said) and not self._thinking
            if self._first:
                return
        if self._thinking:
            self._thinking = THINK_END not in text
            self._unconstrained_tail, self._before = (
                (self._unconstrained_tail[-len(THINK_END) :], " ") if self._thinking else ([], text[-1])
            )
            return
        found = self._starts.search(text, 1, partial=True)
        if found.partial and found.start() < len(text):  # it may yet
            return
        self._unconstrained_tail, self._before = [], text[-1]
        if found.partial:
            return
        tagged = not found.groupdict().get("bare")
        begun = text[found.end() :] if tagged else text[found.start("bare") :]
        matcher = (self._tagged if tagged else self._bare).deep_copy()
        tokens = self._ll_tokenizer.tokenize_bytes(begun.encode())
        # What fits no call is no call.
        if matcher.try_consume_tokens(tokens) == len(tokens):
            self._matcher, self._unconstrained = matcher, matcher.is_accepting() and self._parallel

    def forced_tokens(self) -> list[int]:
        return [] if self._parallel and self._matcher.is_stopped() else super().forced_tokens()


def messages_with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages for the model's chat template, and its further arguments."""
    if tools and _supports_tools(tokenizer, list(tools)):
        return messages, {"tools": list(tools)}
    messages = [_as_text(message) for message in messages]
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        told = filter(None, [messages[0]["content"], _INSTRUCTIONS.format(functions=functions)])
        messages[0] = messages[0] | {"content": "\n\n".join(told)}
    return messages, {}


def _supports_tools(tokenizer: PreTrainedTokenizerBase, tools: list[Mapping[str, Any]]) -> bool:
    """True if the chat template writes the tools into the prompt."""
    if tokenizer.chat_template is None:
        return False
    turn = [{"role": "user", "content": "-"}]
    try:
        plain, with_tools = (apply_chat_template(tokenizer, turn, tools=each) for each in (None, tools))
    except PromptError:  # a mistake in the template
        return False
    return bool(plain != with_tools)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its tool calls, or their results, as text."""
    content = message["content"]
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        content += (
            f'{TOOL_CALL_START}{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}{TOOL_CALL_END}'
        )
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    return {**kept, "content": content}
