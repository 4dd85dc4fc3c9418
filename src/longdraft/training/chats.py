"""Encodes chats for training: converts chats of various formats to token ids, and marks the assistant's tokens.

An answer lies between the generation prompt and the end of the assistant's turn. Both are searched in the rendered
chat. Some templates drop reasoning (DeepSeek-R1, QwQ). The last answer's reasoning, which the model wrote, is added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, dropwhile
from typing import TYPE_CHECKING, Any

from longdraft.engine.chat import apply_chat_template, chat_template_arguments
from longdraft.errors import PromptError
from longdraft.memory.token_ids import common_prefix_len

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
# Messages -> text. ``render_prompt`` adds a generation prompt at the end, ``render_turns`` does not.
Render = Callable[..., str]
# Other role names -> role names of chat templates.
_ROLES = {"human": "user", "developer": "system", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant")
# Keys of various formats for: the list of turns, a single question, its answer, and the reasoning within a turn.
_TURNS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("response", "completion", "output", "answer", "answers")
_REASONINGS = ("reasoning_content", "reasoning", "thinking")
# The cut-off beginning of a special token such as <|end|>.
_PARTIAL_TOKEN = re.compile("<[^<>]*$")
# Inserted at an answer's edge, to find the edge in the rendered text. Templates that trim answers drop the last space.
_MARK = "\u2400-cut-\u2400 "


def chat_messages(example: Mapping[str, Any]) -> list[Message] | None:
    """Returns the messages of an example's chat up to the last answer; None: the example holds no chat.

    Raises ValueError if there is no answer, or a turn is not text. All messages of this file continue "3 rows ...".
    """
    turns = next((example[key] for key in _TURNS if key in example), None)
    if turns is None and "data" in example:  # UltraChat
        turns = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), example["data"])]
    question, answer = (next((example[key] for key in keys if key in example), None) for keys in (_QUESTIONS, _ANSWERS))
    if isinstance(answer, Mapping):  # SQuAD
        answer = "".join(answer["text"][:1])
    if turns is None and "text" not in example and question and answer:
        if isinstance(question, str):
            question = "\n\n".join(filter(None, (example.get("context"), question, example.get("input"))))
            question = [{"role": "user", "content": question}]
        turns = [*question, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
    if turns is None:
        return None
    messages = list(dropwhile(lambda message: message["role"] == "assistant", map(_convert_turn, turns)))
    system = example.get("system") or example.get("system_prompt")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    answer_indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answer_indices:
        raise ValueError("without an answer of the assistant")
    return messages[: answer_indices[-1] + 1]


def _convert_turn(turn: Mapping[str, Any]) -> Message:
    """Converts a turn to a message: role, content, ``reasoning_content``, and tool calls with parsed arguments."""
    role, content = turn.get("role") or turn["from"], turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, list):
        if any(part.get("type", "text") != "text" for part in content):
            raise ValueError("with content that is not text")
        content = "".join(part["text"] for part in content)
    calls = [_tool_call(call) for call in turn.get("tool_calls") or ()]
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError("with content that is not text")
    reasoning = next(filter(None, map(turn.get, _REASONINGS)), "").strip()
    if not reasoning and role in ("assistant", "gpt") and content and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning, content = reasoning.strip().removeprefix("<think>").strip(), content.lstrip("\n")
    converted_keys = {"from", "value", "role", "content", "tool_calls"}
    message = {k: v for k, v in turn.items() if k not in converted_keys and v is not None}
    message |= {"role": _ROLES.get(role, role), "content": content or ""}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a tool call, or its function alone, to OpenAI's form, but with ``arguments`` as an object."""
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**(call if "function" in call else {"type": "function"}), "function": function}


def encode_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None, truncated: bool = False,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Encodes a chat up to the end of its last answer. Returns token ids, and for each True if the assistant wrote it.
    Raises ValueError or PromptError if the template refuses the chat, or hides a part of the chat.

    Args:
        tools: the tools that the chat template shows.
        template_kwargs: further arguments of the chat template.
        truncated: the last answer reached a token limit, so it has no end-of-turn token.
    """
    if (template := chat_template_arguments(tokenizer)) is None:
        raise ValueError("with a chat, for which the tokenizer has no template")
    render_prompt: Render = partial(apply_chat_template, tokenizer, tools=tools, **template, **(template_kwargs or {}))
    render_turns: Render = partial(render_prompt, add_generation_prompt=False)
    messages = _choose_arguments_form(render_turns, messages)
    has_think_tags = "</think>" in str(tokenizer.chat_template)
    if not (text := _render_chat(render_prompt, render_turns, messages, truncated, has_think_tags)):
        raise ValueError("with reasoning that the chat template does not show")
    spans = list[tuple[int, int]]()
    for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        prompt, end = render_prompt(messages[:i]), len(text)
        if (start := common_prefix_len(prompt, text)) < len(prompt):
            start = len(_PARTIAL_TOKEN.sub("", prompt[:start]))
        # The generation prompt may end with <think>, which some templates leave out of complete turns.
        text_has_prompt = start == len(prompt) or text.startswith(render_turns(messages[:i]))
        if i < len(messages) - 1:
            start, end = _find_answer(text, render_turns, messages, i, start if text_has_prompt else None)
        elif not text_has_prompt:
            raise ValueError("whose first turns the chat template renders differently after later turns")
        if start < end:
            spans.append((start, end))
    return _tokenize(text, spans, tokenizer)


def _render_chat(
    render_prompt: Render, render_turns: Render, messages: Sequence[Message], truncated: bool, has_think_tags: bool
) -> str:
    """Renders a chat up to the end of the last answer. If the template drops reasoning, adds the answer's reasoning in
    <think> tags. Returns "" if the template drops reasoning and has no <think> tags."""
    *before, last = messages
    prompt, content, reasoning = render_prompt(before), last["content"], last.get("reasoning_content", "")
    last_question = [message for message in before if message["role"] == "user"][-1:]
    if (
        before != last_question
        and last_question
        and not render_turns(messages).startswith((prompt, render_turns(before).rstrip()))
    ):
        # The answer changes how earlier turns are rendered (Mistral, gpt-oss). The model saw them as in ``prompt``, so
        # the answer is rendered behind the last question alone, and appended to ``prompt``.
        short_prompt = render_prompt(last_question)
        short_chat = _render_chat(render_prompt, render_turns, [*last_question, last], truncated, has_think_tags)
        return prompt + short_chat.removeprefix(short_prompt) if short_chat.startswith(short_prompt) else short_chat
    # An answer of tool calls alone, or an empty one, has no text whose end could be marked.
    if not content and ("tool_calls" in last or not reasoning) and reasoning in (rendered := render_turns(messages)):
        return rendered.rstrip()
    head, mark, tail = render_turns([*before, {**last, "content": content + _MARK}]).rpartition(_MARK.strip())
    if not mark:
        raise ValueError("whose last answer the chat template does not show")
    # The mark ends with a space. If the space is gone, the template trims answers.
    head, tail = (head, tail[1:]) if tail.startswith(" ") else (head.rstrip(), tail)
    if reasoning and (reasoning not in head or not content):
        if not has_think_tags:
            return ""
        thinking = prompt if prompt.rstrip().endswith("<think>") else f"{prompt}<think>\n"
        head = thinking + reasoning + (f"\n</think>\n\n{content}" if content or not truncated else "")
    return head if truncated else (head + tail).rstrip()


def _find_answer(
    text: str, render_turns: Render, messages: Sequence[Message], i: int, start: int | None
) -> tuple[int, int]:
    """Returns (start, end) in ``text`` of the answer in message i, which is not the last answer, or (0, 0) if the
    template hides it. ``start``: None if the start is unknown."""
    if start is not None and text.startswith(prefix := render_turns(messages[: i + 1]).rstrip()):
        return start, len(prefix)
    # Many templates render the last answer differently: with reasoning (Qwen3), or with another end (gpt-oss).
    content, edges = messages[i]["content"], list[int]()  # edges: start and end of the content in ``text``
    for marked in (_MARK + content, content + _MARK):
        rendered = render_turns([*messages[:i], {**messages[i], "content": marked}, *messages[i + 1 :]])
        edges.append(common_prefix_len(rendered, text))
        if not rendered[edges[-1] :].lstrip().startswith(_MARK.strip()):
            return 0, 0
    # tail: what follows the content of a last answer. The part of the tail that ``text`` has too ends the turn.
    as_last = render_turns([*messages[:i], {**messages[i], "content": content + _MARK}])
    tail, rest = as_last.rpartition(_MARK.strip())[2].strip(), text[edges[1] :].lstrip()
    ending = tail if rest.startswith(tail) else _PARTIAL_TOKEN.sub("", rest[: common_prefix_len(tail, rest)]).rstrip()
    return edges[0] if start is None else start, len(text) - len(rest) + len(ending)


def _choose_arguments_form(render_turns: Render, messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages whose tool calls have arguments in the form that the template renders: objects or JSON text."""
    problem: Exception = ValueError("with a tool call that the chat template does not show")
    with_json = _map_functions(messages, lambda f: f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)})
    for candidate in (messages, with_json):
        try:
            # If the template shows tool calls, the chat looks different without the functions' names.
            without_names = _map_functions(candidate, lambda f: f | {"name": ""})
            if with_json == messages or render_turns(candidate) != render_turns(without_names):
                return candidate
        except PromptError as error:
            problem = error
    raise problem


def _map_functions(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Returns the messages with ``change`` applied to the function of each tool call."""
    calls = [[call | {"function": change(call["function"])} for call in m.get("tool_calls", ())] for m in messages]
    return [{**m, "tool_calls": c} if c else m for m, c in zip(messages, calls, strict=True)]


def _tokenize(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a text, and for each token True if it begins in a span (start, end) of characters."""
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    if tokenizer.is_fast:
        encoded = encode(text, return_offsets_mapping=True)
        return encoded["input_ids"], [any(s <= first < e for s, e in spans) for first, _ in encoded["offset_mapping"]]
    ids = encode(text)["input_ids"]
    token_spans = [[len(encode(text[:edge])["input_ids"]) for edge in span] for span in spans]
    return ids, [any(s <= i < e for s, e in token_spans) for i in range(len(ids))]
