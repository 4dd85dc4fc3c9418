"""Chats as training text: rows of other projects as messages, rendered as the model sees them, and what it wrote there.

The tokens that the assistant wrote are those between the generation prompt and the end of its turn. A template shows
them in the text of the whole chat, except for reasoning that it drops (DeepSeek-R1, QwQ): the last turn's is put back,
so that the text is what the model has written.
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
# Names of who speaks that templates do not know.
_ROLES = {"human": "user", "developer": "system", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant")
# Keys of a chat that is a list of turns; of a question, and of its answer.
_LISTS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("response", "completion", "output", "answer", "answers")
_REASONING = ("reasoning_content", "reasoning", "thinking")
# A part of a token such as <|end|>.
_PART = re.compile("<[^<>]*$")
# Marks where an answer begins or ends. The space shows whether a template trims answers.
_MARK = "\u2400-cut-\u2400 "


def chat_messages(example: Mapping[str, Any]) -> list[Message] | None:
    """A row's chat as messages that templates take, up to the last answer; None: the row holds no chat.

    Raises:
        ValueError: there is no answer, or a turn is not text.
    """
    turns = next((example[key] for key in _LISTS if key in example), None)
    if turns is None and "data" in example:
        turns = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), example["data"])]
    asked, answered = (next((example[key] for key in keys if key in example), None) for keys in (_QUESTIONS, _ANSWERS))
    if isinstance(answered, Mapping):  # SQuAD
        answered = "".join(answered["text"][:1])
    if turns is None and "text" not in example and asked and answered:
        if isinstance(asked, str):
            asked = "\n\n".join(filter(None, (example.get("context"), asked, example.get("input"))))
            asked = [{"role": "user", "content": asked}]
        turns = [*asked, *([{"role": "assistant", "content": answered}] if isinstance(answered, str) else answered)]
    if turns is None:
        return None
    messages = list(dropwhile(lambda each: each["role"] == "assistant", map(_message, turns)))
    if (
        (system := example.get("system") or example.get("system_prompt"))
        and messages
        and messages[0]["role"] != "system"
    ):
        messages.insert(0, {"role": "system", "content": system})
    answers = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    if not answers:
        raise ValueError("without an answer of the assistant")
    return messages[: answers[-1] + 1]


def _message(turn: Mapping[str, Any]) -> Message:
    """A turn with role and content, reasoning in ``reasoning_content``, and the arguments of its calls as objects."""
    role, content = turn.get("role") or turn["from"], turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, list):
        if any(part.get("type", "text") != "text" for part in content):
            raise ValueError("with content that is not text")
        content = "".join(part["text"] for part in content)
    calls = [_call(call) for call in turn.get("tool_calls") or ()]
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError("with content that is not text")
    reasoning = next(filter(None, map(turn.get, _REASONING)), "").strip()
    if not reasoning and role in ("assistant", "gpt") and content and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning, content = reasoning.strip().removeprefix("<think>").strip(), content.lstrip("\n")
    dropped = {"from", "value", "role", "content", "tool_calls"}
    message = {k: v for k, v in turn.items() if k not in dropped and v is not None}
    message |= {"role": _ROLES.get(role, role), "content": content or ""}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
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
    """Token ids of a chat up to the end of its last answer, and which of them the assistant wrote.

    Args:
        messages: of :func:`chat_messages`. tools: for the template. settings: further arguments of the template.
        cut: the last answer was cut off, so its end is not learned.

    Raises:
        ValueError: the template refuses the chat, or does not show its last answer behind its generation prompt.
    """
    if (own := chat_template_arguments(tokenizer)) is None:
        raise ValueError("with a chat, for which the tokenizer has no template")
    render: Render = partial(apply_chat_template, tokenizer, tools=tools, **own, **(template_kwargs or {}))
    ended = partial(render, add_generation_prompt=False)
    messages = _with_calls(ended, messages)
    if not (text := _answered(render, ended, messages, truncated, "</think>" in str(tokenizer.chat_template))):
        raise ValueError("with a thought that the chat template does not show")
    spans = list[tuple[int, int]]()
    for i in [i for i, each in enumerate(messages) if each["role"] == "assistant"]:
        begun, end = render(messages[:i]), len(text)
        if (start := common_prefix_len(begun, text)) < len(begun):
            start = len(_PART.sub("", begun[:start]))
        # Behind what they share there may be an opened thought, which the template leaves out of ended turns.
        kept = start == len(begun) or text.startswith(ended(messages[:i]))
        if i < len(messages) - 1:
            start, end = _earlier(text, ended, messages, i, start if kept else None)
        elif not kept:
            raise ValueError("whose beginning the chat template changes as it grows")
        if start < end:
            spans.append((start, end))
    return _tokens(text, spans, tokenizer)


def _answered(render: Render, ended: Render, messages: Sequence[Message], cut: bool, thinks: bool) -> str:
    """The text of a chat up to the end of its last answer. Reasoning that the template drops is put back if ``thinks``:
    the template knows of <think>; else the text is empty."""
    *before, last = messages
    begun, content, reasoning = render(before), last["content"], last.get("reasoning_content", "")
    asked = [each for each in before if each["role"] == "user"][-1:]
    if before != asked and asked and not ended(messages).startswith((begun, ended(before).rstrip())):
        # The text begins in another way once it is answered (Mistral, gpt-oss): the model saw it as it was before.
        alone = _answered(render, ended, [*asked, last], cut, thinks)
        return begun + alone.removeprefix(render(asked)) if alone.startswith(render(asked)) else alone
    if not content and ("tool_calls" in last or not reasoning) and reasoning in (whole := ended(messages)):
        return whole.rstrip()
    head, mark, tail = ended([*before, {**last, "content": content + _MARK}]).rpartition(_MARK.strip())
    if not mark:
        raise ValueError("whose last answer the chat template does not show")
    head, tail = (head, tail[1:]) if tail.startswith(" ") else (head.rstrip(), tail)  # the template trims
    if reasoning and (reasoning not in head or not content):
        if not thinks:
            return ""
        opened = begun if begun.rstrip().endswith("<think>") else f"{begun}<think>\n"
        head = opened + reasoning + (f"\n</think>\n\n{content}" if content or not cut else "")
    return head if cut else (head + tail).rstrip()


def _earlier(text: str, ended: Render, messages: Sequence[Message], i: int, start: int | None) -> tuple[int, int]:
    """Start (if it is not known) and end of an earlier answer in the text of its chat; (0, 0): it is not seen there."""
    if start is not None and text.startswith(through := ended(messages[: i + 1]).rstrip()):
        return start, len(through)
    # Many templates show the last answer in a way of its own: with its thought (Qwen3), with another end (gpt-oss).
    content, edges = messages[i]["content"], list[int]()
    for marked in (_MARK + content, content + _MARK):
        shown = ended([*messages[:i], {**messages[i], "content": marked}, *messages[i + 1 :]])
        edges.append(common_prefix_len(shown, text))
        if not shown[edges[-1] :].lstrip().startswith(_MARK.strip()):
            return 0, 0
    tail = ended([*messages[:i], {**messages[i], "content": content + _MARK}]).rpartition(_MARK.strip())[2].strip()
    rest = text[edges[1] :].lstrip()
    said = tail if rest.startswith(tail) else _PART.sub("", rest[: common_prefix_len(tail, rest)]).rstrip()
    return edges[0] if start is None else start, len(text) - len(rest) + len(said)


def _with_calls(ended: Render, messages: Sequence[Message]) -> Sequence[Message]:
    """A chat whose calls have arguments as the template shows them: as objects, or as JSON (DeepSeek)."""
    problem: Exception = ValueError("with a call of a tool that the chat template does not show")
    encoded = _changed(messages, lambda f: f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)})
    for form in (messages, encoded):
        try:
            if encoded == messages or ended(form) != ended(_changed(form, lambda f: f | {"name": ""})):
                return form
        except PromptError as refused:
            problem = refused
    raise problem


def _changed(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Messages with other functions in their calls."""
    calls = [[each | {"function": change(each["function"])} for each in m.get("tool_calls", ())] for m in messages]
    return [{**m, "tool_calls": c} if c else m for m, c in zip(messages, calls, strict=True)]


def _tokens(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and which of them begin inside of spans of its characters."""
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    if tokenizer.is_fast:
        encoded = encode(text, return_offsets_mapping=True)
        return encoded["input_ids"], [any(s <= at < e for s, e in spans) for at, _ in encoded["offset_mapping"]]
    ids = encode(text)["input_ids"]
    counted = [[len(encode(text[:at])["input_ids"]) for at in span] for span in spans]
    return ids, [any(s <= i < e for s, e in counted) for i in range(len(ids))]
