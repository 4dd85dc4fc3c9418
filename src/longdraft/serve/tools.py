"""Tool calls: the prompt that lists the tools, and the grammar of calls.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen. The tools go to
the chat template if it supports them, else into a system message.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from longdraft.engine.chat import apply_chat_template
from longdraft.errors import PromptError, RequestError
from longdraft.options import listed
from longdraft.serve import structured
from longdraft.serve.reasoning import THINK_END, THINK_START
from longdraft.serve.structured import Constraint, json_grammar, lark_grammar, lark_tag
from longdraft.serve.tool_parser import ARGUMENTS_KEY, TOOL_CALL_END, TOOL_CALL_START, call_start_pattern
from longdraft.serve.tool_types import get_tool_type

_JSON_SPACE, _LARK_SPACE = r"[ \n\t]{0,40}", r"/\s{0,40}/"  # white space in a call's JSON, and around it
# The braces are escaped twice: for this f-string, and for the call of format().
_INSTRUCTIONS = f"""You may call these functions:
{{functions}}
To call one, answer with {TOOL_CALL_START}{{{{"name": NAME, "arguments": {{{{...}}}}}}}}{TOOL_CALL_END} \
and nothing else."""


def resolve_tool_choice(
    tools: Sequence[dict[str, Any]], tool_choice: str | Mapping[str, Any] | None
) -> tuple[str, list[dict[str, Any]]]:
    """Returns ("none", "auto", "required" or the name of the function to call; the tools that may be called).

    Raises:
        RequestError: a tool is not a named function, or the choice is unknown.
    """
    by_name = {}
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else {}
        name = function.get("name")
        if not (isinstance(name, str) and name and isinstance(function.get("parameters") or {}, Mapping | bool)):
            form = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            raise RequestError(f"each of tools must be a function: {form}")
        by_name[name] = tool
    allowed = list(by_name)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        fields = _choice_fields(tool_choice)
        choices = fields.get("tools")
        names = [_choice_name(x) for x in choices if isinstance(x, Mapping)] if isinstance(choices, list) else []
        allowed, tool_choice = [name for name in names if name in by_name], fields.get("mode", "auto")
        if not allowed:
            raise RequestError(f"tool_choice allows {listed(names)}, but tools has {listed(by_name)}")
    if isinstance(tool_choice, Mapping):
        name = _choice_name(tool_choice)
        if name in by_name:
            return name, [by_name[name]]
        if name not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice names {name!r}, but tools has {listed(by_name)}")
        tool_choice = name
    if tool_choice not in (None, "none", "auto", "required"):
        raise RequestError(f"tool_choice must be none, auto, required or a function, not {tool_choice!r}")
    if tool_choice == "required" and not tools:
        raise RequestError("tool_choice is required, but there are no tools: add some, or leave it out")
    tool_choice = tool_choice or "auto"
    return tool_choice, [] if tool_choice == "none" else [by_name[name] for name in allowed]


def _choice_fields(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool choice's fields. Chats write ``{"type": T, T: fields}``, responses ``{"type": T, **fields}``."""
    fields = choice.get(get_tool_type(choice))
    return fields if isinstance(fields, Mapping) else choice


def _choice_name(choice: Mapping[str, Any]) -> str:
    """Returns the function's name, or the choice's type if no function is named."""
    return str(_choice_fields(choice).get("name") or get_tool_type(choice))


def tool_constraint(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], tool_choice: str, parallel: bool,
    prompt_len: int, in_reasoning: bool = False, answer_schema: Mapping[str, Any] | None = None,
) -> Constraint | None:  # fmt: skip
    """Makes the logits processor of an answer that may ("auto") or must call tools; None if nothing is constrained.

    Args:
        tool_choice: "auto", "required" or the name of the function to call.
        in_reasoning: the prompt ends inside ``<think>``, where nothing is constrained.
        answer_schema: JSON schema of an answer without calls; None: any text.
    """
    start = r"start: /\n{0,2}/" if in_reasoning else "start:"  # line breaks may follow </think>
    answer_grammar = "" if answer_schema is None else json_grammar(answer_schema, f"{start} answer")
    if not tools:
        return Constraint(tokenizer, answer_grammar, prompt_len, in_reasoning) if answer_grammar else None

    def build(tools: Sequence[Mapping[str, Any]]) -> Constraint:
        if tool_choice == "auto" and answer_schema is None:
            return ToolCallConstraint(tokenizer, tools, prompt_len, parallel, in_reasoning)
        tags = [lark_tag(tokenizer, tag) for tag in (TOOL_CALL_START, TOOL_CALL_END)]
        if tool_choice != "auto":
            calls = "call+" if parallel and tool_choice == "required" else "call"
            rules = f"{start} {calls}\ncall: {' function '.join(tags)}\nfunction: %json {_call_schema(tools)}\n"
            return Constraint(tokenizer, lark_grammar(rules), prompt_len, in_reasoning)
        function = _call_schema(tools, whitespace_flexible=True, whitespace_pattern=_JSON_SPACE)
        # One call or, with parallel, several: all in tags, or all bare.
        tagged, bare = (f"{rule} ({_LARK_SPACE} {rule})*" if parallel else rule for rule in ("tagged", "function"))
        tagged_call = f" {_LARK_SPACE} function {_LARK_SPACE} ".join(tags)
        call_rules = f"calls: {tagged} | {bare}\ntagged: {tagged_call}\nfunction: %json {function}\n"
        grammar = json_grammar(answer_schema or {}, f"{start} (calls | answer)\n{call_rules}")
        grammars = grammar, lark_grammar(f"{start} calls\n{call_rules}"), answer_grammar
        names = [tool["function"]["name"] for tool in tools]
        return _CallOrAnswerConstraint(tokenizer, *grammars, names, prompt_len, in_reasoning)

    try:
        return build(tools)
    except RequestError:  # the parameters' schemas are too complex: only the names are constrained
        names = [tool["function"]["name"] for tool in tools]
        structured.warn_not_followed(", ".join(names), "all of it")
        return build([{"function": {"name": name}} for name in names])


def _call_schema(tools: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns the JSON schema of a call of one of the tools, with ``options`` of llguidance.

    Parts of the parameters' schemas that llguidance does not support allow any value.
    """
    call_schemas, definitions = [], {}
    for number, function in enumerate(tool["function"] for tool in tools):
        schema, def_name = function.get("parameters"), f"f{number}"
        schema = schema if isinstance(schema, Mapping) else {}
        if "$ref" not in schema:
            schema = {**schema, "type": "object"}
        definitions[def_name] = structured.relax_tool_schema(schema, def_name, function["name"])
        call_schemas.append({
            "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{def_name}"}},
        })  # fmt: skip
    guidance = {"whitespace_flexible": False, **structured.LENIENT, **options}
    return json.dumps({"anyOf": call_schemas, "$defs": definitions, "x-guidance": guidance})


class _CallOrAnswerConstraint(Constraint):
    """Constrains a text to either calls or an answer with a schema.

    The first tokens decide. If the most probable text cannot begin a call, an answer follows. If the tokens begin a
    call, calls follow, even if an answer could begin with the same tokens.

    Args:
        grammar: accepts calls or an answer.
        call_grammar: accepts calls alone.
        answer_grammar: accepts an answer alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, call_grammar: str, answer_grammar: str,
        names: Iterable[str], prompt_len: int, in_reasoning: bool,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, grammar, prompt_len, in_reasoning)
        self._call_matcher = LLMatcher(self._ll_tokenizer, call_grammar)
        self._answer_matcher = LLMatcher(self._ll_tokenizer, answer_grammar)
        self._start_pattern = call_start_pattern(names, ARGUMENTS_KEY)
        self._undecided: list[int] | None = []  # the answer's tokens; None after the decision

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.advance_to(input_ids[0, self._prompt_len :].tolist())
        if not self._unconstrained and self._undecided is not None:
            text = self._tokenizer.decode([*self._undecided, int(scores[0].argmax())]).lstrip()
            if text and text[0] not in "<{[`":  # a call begins with one of these
                self._matcher, self._undecided = self._answer_matcher.deep_copy(), None
        return super().__call__(input_ids, scores)

    def _advance(self, token: int) -> None:
        super()._advance(token)
        if self._undecided is None:
            return
        tokens = self._undecided = [*self._undecided, token]  # a new list, because clones share the old one
        match = self._start_pattern.match("\n" + str(self._tokenizer.decode(tokens)).lstrip(), 1, partial=True)
        if match and match.partial:
            return
        self._undecided, matcher = None, self._call_matcher.deep_copy()
        if match and matcher.try_consume_tokens(tokens) == len(tokens):
            self._matcher = matcher


class ToolCallConstraint(Constraint):
    """Constrains a call once the model has begun it. All other text is unconstrained.

    Args:
        parallel: several calls are allowed.
        in_reasoning: the prompt ends inside ``<think>``, where no call can begin.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], prompt_len: int, parallel: bool,
        in_reasoning: bool,
    ) -> None:  # fmt: skip
        rule = f"call: %json {_call_schema(tools, whitespace_flexible=True, whitespace_pattern=_JSON_SPACE)}\n"
        tagged = f"start: {_LARK_SPACE} call {_LARK_SPACE} {lark_tag(tokenizer, TOOL_CALL_END)} {_LARK_SPACE}\n{rule}"
        super().__init__(tokenizer, lark_grammar(tagged), prompt_len)
        self._tagged_matcher = self._matcher
        bare = f'start: (call | "{{" call "}}") {_LARK_SPACE}\n{rule}'  # as in the examples of some chat templates
        self._bare_matcher = LLMatcher(self._ll_tokenizer, lark_grammar(bare))
        names = [tool["function"]["name"] for tool in tools]
        for name in names:
            prefix = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)[:-2]  # without the closing }}
            self._check_prefix(self._bare_matcher, self._ll_tokenizer.tokenize_bytes(prefix.encode()))
        self._start_pattern = call_start_pattern(names)
        self._parallel, self._in_reasoning = parallel, in_reasoning
        self._unconstrained, self._at_start = True, True
        self._last_char = "\n"  # the character before the tail

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        # Unconstrained text does not change the matcher.
        return copy.copy(self) if self._unconstrained else super().__deepcopy__(memo)

    def _advance(self, token: int) -> None:
        super()._advance(token)
        if self._matcher.is_accepting() and self._parallel:
            self._unconstrained, self._tail, self._last_char = True, [], "\n"

    def _advance_unconstrained(self, token: int) -> None:
        """Begins to follow the grammar if this token completes the start of a call."""
        self._tail = [*self._tail, token]  # a new list, because clones share the old one
        text = self._last_char + str(self._tokenizer.decode(self._tail))
        # <think> opens reasoning only at the start of the text.
        if self._at_start and (stripped := text.strip()):
            self._in_reasoning |= stripped.startswith(THINK_START)
            self._at_start = THINK_START.startswith(stripped) and not self._in_reasoning
            if self._at_start:
                return
        if self._in_reasoning:  # keeps the last 8 tokens: </think> has 8 characters
            self._in_reasoning = THINK_END not in text
            self._tail, self._last_char = (self._tail[-len(THINK_END) :], " ") if self._in_reasoning else ([], text[-1])
            return
        match = self._start_pattern.search(text, 1, partial=True)
        if match.partial and match.start() < len(text):  # may become a call
            return
        self._tail, self._last_char = [], text[-1]
        if match.partial:
            return
        is_tagged = not match.groupdict().get("bare")
        call = text[match.end() :] if is_tagged else text[match.start("bare") :]
        matcher = (self._tagged_matcher if is_tagged else self._bare_matcher).deep_copy()
        tokens = self._ll_tokenizer.tokenize_bytes(call.encode())
        if matcher.try_consume_tokens(tokens) == len(tokens):  # text that the grammar refuses is not a call
            self._matcher, self._unconstrained = matcher, matcher.is_accepting() and self._parallel

    def forced_tokens(self) -> list[int]:
        # After a call, another call may follow instead of the end.
        return [] if self._parallel and self._matcher.is_stopped() else super().forced_tokens()


def messages_with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (the messages for the chat template, further arguments of the template)."""
    if tools and _supports_tools(tokenizer, list(tools)):
        return messages, {"tools": list(tools)}
    messages = [_with_calls_as_text(message) for message in messages]
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        paragraphs = filter(None, [messages[0]["content"], _INSTRUCTIONS.format(functions=functions)])
        messages[0] = messages[0] | {"content": "\n\n".join(paragraphs)}
    return messages, {}


def _supports_tools(tokenizer: PreTrainedTokenizerBase, tools: list[Mapping[str, Any]]) -> bool:
    """True if the chat template writes the tools into the prompt."""
    if tokenizer.chat_template is None:
        return False
    turn = [{"role": "user", "content": "-"}]
    try:
        without_tools, with_tools = (apply_chat_template(tokenizer, turn, tools=x) for x in (None, tools))
    except PromptError:  # the template fails
        return False
    return bool(without_tools != with_tools)


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with tool calls and results as text, for templates that do not support tools."""
    content = message["content"]
    other_fields = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_json = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        content += f"{TOOL_CALL_START}{call_json}{TOOL_CALL_END}"
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    return {**other_fields, "content": content}
