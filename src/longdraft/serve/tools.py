"""Tool calls: the prompt that lists the tools, the grammar of calls, and the parser that finds them in the text.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the form of Qwen's and Hermes' models. The tools
go through the chat template if it supports them, else into a system message.
"""

from __future__ import annotations

import contextlib
import copy
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
import torch
from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from longdraft.errors import PromptError, RequestError
from longdraft.model.chat import applied
from longdraft.serve.structured import LENIENT, Constraint, checked, in_grammar, loosened, say
from longdraft.serve.thinking import THINK, UNTHINK

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE, _SPACES = r"[ \n\t]{0,40}", r"/\s{0,40}/"  # white space within a call: in its JSON, and between its parts
_INSTRUCTIONS = f"""You may call these functions:
{{functions}}
To call one, answer with {OPEN}{{{{"name": NAME, "arguments": {{{{...}}}}}}}}{CLOSE} and nothing else."""


def checked_choice(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> str:
    """The choice as "none", "auto", "required" or the name of the function to call.

    Raises:
        RequestError: a tool is not a named function, or the choice is unknown.
    """
    names = []
    for tool in tools:
        function = tool.get("function")
        found = function if tool.get("type", "function") == "function" and isinstance(function, Mapping) else {}
        name = found.get("name")
        if not (isinstance(name, str) and name and isinstance(found.get("parameters") or {}, Mapping | bool)):
            raise RequestError(
                "tools are functions: {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        names.append(name)
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = str(function.get("name") if isinstance(function, Mapping) else function)
        if choice not in names:
            raise RequestError(f"tool_choice names {choice!r}, and tools has {', '.join(names) or 'none'}")
        return choice
    if choice not in ("none", "auto", "required"):
        raise RequestError(f"tool_choice is none, auto, required or a function, not {choice!r}")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, and there are no tools")
    return choice


def bound(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    prompt: int,
    thinking: bool = False,
) -> Constraint:
    """The logits processor of a text that may call these functions ("auto"), or has to."""

    def made(tools: Sequence[Mapping[str, Any]]) -> Constraint:
        if choice == "auto":
            return CallConstraint(tokenizer, tools, prompt, parallel, thinking)
        chosen = [tool for tool in tools if choice in ("required", tool["function"]["name"])]
        calls = "call+" if parallel and choice == "required" else "call"
        tags = (in_grammar(tokenizer, tag) for tag in (OPEN, CLOSE))
        rules = f"start: {calls}\ncall: {' answer '.join(tags)}\nanswer: %json {_call_schema(chosen)}\n"
        return Constraint(tokenizer, checked(str(LLMatcher.grammar_from_lark(rules))), prompt)

    try:
        return made(tools)
    except RequestError:  # too much for a grammar
        names = [tool["function"]["name"] for tool in tools]
        say(", ".join(names), "all of it")
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
        parameters[place] = loosened(schema, place, function["name"])
        calls.append({
            "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{place}"}},
        })  # fmt: skip
    guidance = {"whitespace_flexible": False, **LENIENT, **options}
    return json.dumps({"anyOf": calls, "$defs": parameters, "x-guidance": guidance})


# What stands before a call without tags, as Qwen2.5-Coder writes it: a block of code perhaps, other calls, or its
# template's second brace. And what may stand behind one.
_BEFORE = r"(?<=\n)[ \t]{0,16}(?:```\w{0,16}\s{0,16})?[\[,\s]{0,16}"
_BEHIND = regex.compile(r"[\s\]}]{0,16}+(?:```\s{0,16}+)?+(?=[^\s`])")
_ARGUMENTS = r'\s{0,16},\s{0,16}"arguments"\s{0,16}:\s{0,16}(?=\{)'


def _starts(names: Iterable[str], further: str = "") -> Any:
    """The pattern of what begins a call of the functions, in a text that has a line's end before it."""
    known = "|".join(regex.escape(json.dumps(name, ensure_ascii=False)[1:-1]) for name in names)
    bare = rf'|{_BEFORE}(?P<bare>\{{\{{?\s{{0,16}}"name"\s{{0,16}}:\s{{0,16}}"(?P<name>{known})"{further})'
    return regex.compile(OPEN + (bare if known else ""))


class CallConstraint(Constraint):
    """Binds calls of functions from where they begin; the text before, between and behind is the model's own.

    Args:
        parallel: several calls may come. thinking: the prompt ends within ``<think>``, where nothing is a call.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], prompt: int, parallel: bool,
        thinking: bool,
    ) -> None:  # fmt: skip
        answer = f"answer: %json {_call_schema(tools, whitespace_flexible=True, whitespace_pattern=_SPACE)}\n"
        tagged = f"start: {_SPACES} answer {_SPACES} {in_grammar(tokenizer, CLOSE)} {_SPACES}\n{answer}"
        super().__init__(tokenizer, checked(str(LLMatcher.grammar_from_lark(tagged))), prompt)
        self._tokenizer, self._tagged = tokenizer, self._matcher
        bare = f'start: (answer | "{{" answer "}}") {_SPACES}\n{answer}'
        self._bare = LLMatcher(self._table, checked(str(LLMatcher.grammar_from_lark(bare))))
        names = [tool["function"]["name"] for tool in tools]
        for name in names:
            begun = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)[:-2]
            self._try(self._bare, self._table.tokenize_bytes(begun.encode()))
        self._starts = _starts(names)
        self._parallel, self._thinking = parallel, thinking
        self._free, self._first = True, True
        self._text, self._before = list[int](), "\n"  # tokens that may begin a call, and the character before them

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        return copy.copy(self) if self._free else super().__deepcopy__(memo)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.read(input_ids[0, self._prompt :].tolist())
        return scores if self._free else super().__call__(input_ids, scores)

    def _consume(self, new: list[int]) -> None:
        for token in new:
            if self._free:
                self._consumed += 1
                self._look(token)
            else:
                super()._consume([token])
                if self._matcher.is_accepting() and self._parallel:
                    self._free, self._text, self._before = True, [], "\n"

    def _look(self, token: int) -> None:
        """Binds the text if a call begins with this token."""
        self._text = [*self._text, token]  # a new list: copies share it
        text = self._before + str(self._tokenizer.decode(self._text))
        if self._first and (said := text.strip()):
            self._thinking |= said.startswith(THINK)
            self._first = THINK.startswith(said) and not self._thinking
            if self._first:
                return
        if self._thinking:
            self._thinking = UNTHINK not in text
            self._text, self._before = (self._text[-len(UNTHINK) :], " ") if self._thinking else ([], text[-1])
            return
        found = self._starts.search(text, 1, partial=True)
        if found.partial and found.start() < len(text):  # it may yet
            return
        self._text, self._before = [], text[-1]
        if found.partial:
            return
        tagged = not found.groupdict().get("bare")
        begun = text[found.end() :] if tagged else text[found.start("bare") :]
        matcher = (self._tagged if tagged else self._bare).deep_copy()
        tokens = self._table.tokenize_bytes(begun.encode())
        # What fits no call is no call.
        if matcher.try_consume_tokens(tokens) == len(tokens):
            self._matcher, self._free = matcher, matcher.is_accepting() and self._parallel

    def forced(self) -> list[int]:
        return [] if self._free or (self._parallel and self._matcher.is_stopped()) else super().forced()

    def likely(self) -> list[int]:
        return [] if self._free else super().likely()

    def follow(self, token: int) -> bool:
        return self._free or super().follow(token)

    def back(self, count: int) -> None:
        if not self._free:
            super().back(count)


def with_tools(
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
        plain, with_tools = (applied(tokenizer, turn, tools=each) for each in (None, tools))
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
        content += f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}{CLOSE}'
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    return {**kept, "content": content}


_JSON = json.JSONDecoder(strict=False)
# The beginning of a call in tags: the name comes first, so that its arguments can be streamed.
_HEAD = regex.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")' + _ARGUMENTS)


class ToolParser:
    """Separates calls from text while it streams.

    Args:
        names: functions of which a call may come without tags. only: all of the text is calls.
    """

    def __init__(self, names: Iterable[str] = (), only: bool = False) -> None:
        names, self._only = list(names), only
        self._starts, self._named = _starts(names, _ARGUMENTS), _starts(names)
        self._pending = ""  # text that has not been reported
        self._before = "\n"  # the character before it
        self._blank, self._said = "", False  # white space that is not reported before a call; whether text was
        self._state: Literal["text", "tag", "arguments", "end"] = "text"
        self._tagged = True
        self._arguments = ""  # of the call that has begun
        self._calls = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """OpenAI's deltas for the next piece of text."""
        self._pending += text
        deltas: list[dict[str, Any]] = []
        while self._pending:
            before = self._state, len(self._pending)
            deltas += getattr(self, f"_in_{self._state}")()
            if (self._state, len(self._pending)) == before:
                break
        return deltas

    def finish(self, cut: bool = False) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of what is left, and the finish reason if there were calls.

        Args:
            cut: the text was ended at a limit or a stop, where a call that has begun is no text.
        """
        rest, self._pending = (OPEN if self._state == "tag" else "") + self._pending, ""
        begun = (self._only and rest) or rest.startswith(OPEN[:5]) or self._named.search(self._before + rest, 1)
        whole = self._state in ("text", "tag") and not (cut and begun)
        deltas = self._content(rest) if whole else []
        if self._blank and not self._calls:
            deltas = [{"content": self._blank}]
        return deltas, "tool_calls" if self._calls and (whole or self._state == "end") else None

    def _content(self, text: str) -> list[dict[str, Any]]:
        self._before = text[-1:] or self._before
        self._said = self._said or bool(text.strip())
        if not self._said:
            self._blank += text
            return []
        text, self._blank = self._blank + text, ""
        return [{"content": text}] if text else []

    def _in_text(self) -> list[dict[str, Any]]:
        found = self._starts.search(self._before + self._pending, 1, partial=True)
        text, self._pending = self._pending[: found.start() - 1], self._pending[found.start() - 1 :]
        deltas = self._content(text)
        if found.partial:
            return deltas
        self._pending, self._blank, self._said = self._pending[found.end() - found.start() :], "", False
        self._tagged = not found.groupdict().get("bare")
        if self._tagged:
            self._state = "tag"
            return deltas
        return [*deltas, self._begin(json.loads(f'"{found["name"]}"'))]

    def _in_tag(self) -> list[dict[str, Any]]:
        if head := _HEAD.match(self._pending):
            self._pending = self._pending[head.end() :]
            return [self._begin(json.loads(head[1]))]
        inside, closed, after = self._pending.partition(CLOSE)
        if not closed:
            return []
        self._pending, self._state = after, "text"  # no grammar bound it
        return self._content(f"{OPEN}{inside}{CLOSE}")

    def _begin(self, name: str) -> dict[str, Any]:
        self._state, self._arguments = "arguments", ""
        return _call(self._calls, name, "")

    def _in_arguments(self) -> list[dict[str, Any]]:
        text, self._pending = self._pending, ""
        self._arguments += text
        with contextlib.suppress(ValueError, RecursionError):  # while their end has not come
            if "}" in text:
                end = len(text) + _JSON.raw_decode(self._arguments)[1] - len(self._arguments)
                text, self._pending = text[:end], text[end:]
                self._state, self._before = "end", "\n"
        delta = _call(self._calls, None, text)
        self._calls += self._state == "end"
        return [delta]

    def _in_end(self) -> list[dict[str, Any]]:
        """Leaves out what ends a call: its tag, or brackets and a fence."""
        if self._tagged:
            before, _, after = self._pending.partition(CLOSE)
            ended = before != self._pending
        else:
            found = _BEHIND.match(self._pending, partial=True)
            ended = found is None or not found.partial
            after = self._pending[found.end() if found else 0 :]
        if ended:
            self._pending, self._state = after, "text"
        return []


def _call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    """OpenAI's delta of a call; a name begins it."""
    if name is None:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "function": function, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return {"tool_calls": [call]}
