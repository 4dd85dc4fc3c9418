"""Encodes chats for training: converts other projects' formats to messages, renders them, and masks assistant tokens.

The assistant's tokens lie between the generation prompt and the end of its turn. They are found in the rendered chat.
Some templates drop reasoning (DeepSeek-R1, QwQ). That of the last turn is put back, as the model did write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, dropwhile
from typing import TYPE_CHECKING, Any

from longdraft.errors import PromptError
from longdraft.memory.token_ids import common_prefix_len
from longdraft.model.chat import apply_chat_template, chat_template_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Render = Callable[..., str]
# Other formats' names of roles -> the names that templates know.
_ROLES = {"human": "user", "developer": "system", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant")
# Keys under which formats keep a list of turns, a question, its answer, and reasoning within a turn.
_LISTS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("response", "completion", "output", "answer", "answers")
_REASONING = ("reasoning_content", "reasoning", "thinking")
# The cut-off beginning of a special token such as <|end|>.
_PARTIAL_TOKEN = re.compile("<[^<>]*$")
# Inserted at an answer's edge, to find it in the rendered text. A template that trims answers drops the space.
_MARK = "\u2400-cut-\u2400 "


def chat_messages(example: Mapping[str, Any]) -> list[Message] | None:
    """Returns the messages of an example's chat up to the last answer; None: the example holds no chat.

    Raises:
        ValueError: there is no answer, or a turn is not text.
    """
    turns = next((example[key] for key in _LISTS if key in example), None)
    if turns is None and "data" in example:
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
    messages = list(dropwhile(lambda message: message["role"] == "assistant", map(_message, turns)))
    system = example.get("system") or example.get("system_prompt")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("without an answer of the assistant")
    return messages[: answers[-1] + 1]


def _message(turn: Mapping[str, Any]) -> Message:
    """A turn as a message: role, content, ``reasoning_content``, and tool calls with their arguments as objects."""
    role, content = turn.get("role") or turn["from"], turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, list):
        if any(part.get("type", "text") != "text" for part in content):
            raise ValueError("with content that is not text")
        content = "".join(part["text"] for part in content)
    calls = [_tool_call(call) for call in turn.get("tool_calls") or ()]
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError("with content that is not text")
    reasoning = next(filter(None, map(turn.get, _REASONING)), "").strip()
    if not reasoning and role in ("assistant", "gpt") and content and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning, content = reasoning.strip().removeprefix("<think>").strip(), content.lstrip("\n")
    converted = {"from", "value", "role", "content", "tool_calls"}
    message = {k: v for k, v in turn.items() if k not in converted and v is not None}
    message |= {"role": _ROLES.get(role, role), "content": content or ""}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**(call if "function" in call else {"type": "function"}), "function": function}


def encode_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    truncated: bool = False,
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat up to the end of its last answer, and for each whether the assistant wrote it.

    Args:
        tools, template_kwargs: arguments of the chat template.
        truncated: the last answer reached a token limit, so no end of turn follows it.

    Raises:
        ValueError: the template refuses the chat, or the last answer does not follow its generation prompt.
    """
    if (template := chat_template_arguments(tokenizer)) is None:
        raise ValueError("with a chat, for which the tokenizer has no template")
    render: Render = partial(apply_chat_template, tokenizer, tools=tools, **template, **(template_kwargs or {}))
    plain: Render = partial(render, add_generation_prompt=False)
    messages = _with_arguments(plain, messages)
    if not (text := _answered(render, plain, messages, truncated, "</think>" in str(tokenizer.chat_template))):
        raise ValueError("with a thought that the chat template does not show")
    spans = list[tuple[int, int]]()
    for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        prompt, end = render(messages[:i]), len(text)
        if (start := common_prefix_len(prompt, text)) < len(prompt):
            start = len(_PARTIAL_TOKEN.sub("", prompt[:start]))
        # The generation prompt may open a thought, which the template leaves out of ended turns.
        found = start == len(prompt) or text.startswith(plain(messages[:i]))
        if i < len(messages) - 1:
            start, end = _find_earlier(text, plain, messages, i, start if found else None)
        elif not found:
            raise ValueError("whose beginning the chat template changes as it grows")
        if start < end:
            spans.append((start, end))
    return _tokenize(text, spans, tokenizer)


def _answered(render: Render, plain: Render, messages: Sequence[Message], truncated: bool, has_think: bool) -> str:
    """Renders a chat up to the end of its last answer. Reasoning that the template drops is put back in <think> tags,
    or the text is empty if the template has no such tags. ``plain`` renders without a generation prompt."""
    *before, last = messages
    prompt, content, reasoning = render(before), last["content"], last.get("reasoning_content", "")
    question = [message for message in before if message["role"] == "user"][-1:]
    if before != question and question and not plain(messages).startswith((prompt, plain(before).rstrip())):
        # An answer changes how the text before it is rendered (Mistral, gpt-oss). The model saw it as it was before.
        alone = _answered(render, plain, [*question, last], truncated, has_think)
        return prompt + alone.removeprefix(render(question)) if alone.startswith(render(question)) else alone
    if not content and ("tool_calls" in last or not reasoning) and reasoning in (full := plain(messages)):
        return full.rstrip()
    head, mark, tail = plain([*before, {**last, "content": content + _MARK}]).rpartition(_MARK.strip())
    if not mark:
        raise ValueError("whose last answer the chat template does not show")
    head, tail = (head, tail[1:]) if tail.startswith(" ") else (head.rstrip(), tail)  # the template trims
    if reasoning and (reasoning not in head or not content):
        if not has_think:
            return ""
        opened = prompt if prompt.rstrip().endswith("<think>") else f"{prompt}<think>\n"
        head = opened + reasoning + (f"\n</think>\n\n{content}" if content or not truncated else "")
    return head if truncated else (head + tail).rstrip()


def _find_earlier(text: str, plain: Render, messages: Sequence[Message], i: int, start: int | None) -> tuple[int, int]:
    """Start (unless given) and end of an earlier answer in the rendered chat; (0, 0): the template hides it."""
    if start is not None and text.startswith(through := plain(messages[: i + 1]).rstrip()):
        return start, len(through)
    # Many templates render the last answer differently: with its reasoning (Qwen3), with another end (gpt-oss).
    content, edges = messages[i]["content"], list[int]()
    for marked in (_MARK + content, content + _MARK):
        rendered = plain([*messages[:i], {**messages[i], "content": marked}, *messages[i + 1 :]])
        edges.append(common_prefix_len(rendered, text))
        if not rendered[edges[-1] :].lstrip().startswith(_MARK.strip()):
            return 0, 0
    tail = plain([*messages[:i], {**messages[i], "content": content + _MARK}]).rpartition(_MARK.strip())[2].strip()
    rest = text[edges[1] :].lstrip()
    ending = tail if rest.startswith(tail) else _PARTIAL_TOKEN.sub("", rest[: common_prefix_len(tail, rest)]).rstrip()
    return edges[0] if start is None else start, len(text) - len(rest) + len(ending)


def _with_arguments(plain: Render, messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages whose tool calls have arguments in the form that the template takes: objects, or JSON text."""
    problem: Exception = ValueError("with a call of a tool that the chat template does not show")
    encoded = _map_functions(messages, lambda f: f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)})
    for form in (messages, encoded):
        try:
            if encoded == messages or plain(form) != plain(_map_functions(form, lambda f: f | {"name": ""})):
                return form
        except PromptError as error:
            problem = error
    raise problem


def _map_functions(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Messages with ``change`` applied to the function of each tool call."""
    calls = [[call | {"function": change(call["function"])} for call in m.get("tool_calls", ())] for m in messages]
    return [{**m, "tool_calls": c} if c else m for m, c in zip(messages, calls, strict=True)]


def _tokenize(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and for each whether it begins within one of the spans (start, end) of characters."""
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    if tokenizer.is_fast:
        encoded = encode(text, return_offsets_mapping=True)
        return encoded["input_ids"], [any(s <= at < e for s, e in spans) for at, _ in encoded["offset_mapping"]]
    ids = encode(text)["input_ids"]
    token_spans = [[len(encode(text[:at])["input_ids"]) for at in span] for span in spans]
    return ids, [any(s <= i < e for s, e in token_spans) for i in range(len(ids))]
