"""Turns messages and texts into token ids, by the model's chat template or, without one, as plain text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import PromptError
from longdraft.model.rendering import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# FastChat's vicuna_v1.1, also for LongChat: these checkpoints come without a template.
_VICUNA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions.{% endif %} {% for m in messages %}"
    "{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FAMILY_TEMPLATES = {"vicuna": _VICUNA, "longchat": _VICUNA}
"""Part of a model's name -> chat template of its family."""
_warned: set[str] = set()
# Returns the variables that transformers hands to a template. It is our own, so no limits are needed.
_ECHO_TEMPLATE = "{{ {'messages': messages, 'tools': tools, 'documents': documents} | tojson }}"


def chat_template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Arguments for :func:`apply_chat_template`; None if there is no template, so that prompts are plain text.

    A tokenizer without a template gets that of its family, if there is one. Either way a warning says so, once.
    """
    if tokenizer.chat_template:
        return {}
    name = "/".join(Path(path := str(tokenizer.name_or_path)).parts[-2:])
    family = next((family for family in FAMILY_TEMPLATES if family in name.lower()), None)
    if path not in _warned:
        _warned.add(path)
        instead = "plain text" if family is None else f"put into the template published for {family}"
        logger.warning("%s comes without a chat template: prompts are %s.", name or "The tokenizer", instead)
    return None if family is None else {"chat_template": FAMILY_TEMPLATES[family]}


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    **template: Any,
) -> str:
    """Renders messages as ``tokenizer.apply_chat_template`` does, with limits of time and memory (:mod:`.rendering`).

    Raises PromptError, which names the model, if the template refuses the messages, fails or exceeds a limit.
    """
    from transformers import PreTrainedTokenizerBase

    kwargs: dict[str, Any] = {"tools": tools, "documents": documents, "tokenize": False}
    is_overridden = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    try:
        if is_overridden:  # the user's own code, not a template from a file
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **kwargs))
        variables = json.loads(tokenizer.apply_chat_template(list(messages), chat_template=_ECHO_TEMPLATE, **kwargs))
        variables |= {"add_generation_prompt": add_generation_prompt}
        source = tokenizer.get_chat_template(chat_template, tools)
        return render_template(source, {**tokenizer.special_tokens_map, **template, **variables})
    except Exception as error:  # a template can raise any type
        reason = str(error) if isinstance(error, PromptError) else f"fails: {error}"
        raise PromptError(f"The chat template of {tokenizer.name_or_path or 'the tokenizer'} {reason}.") from error


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    instruction: str,
    document: str | None = None,
    system: str | None = None,
    **template: Any,
) -> list[int]:
    """Token ids of one user turn, ready for the model's answer: document, blank line, instruction.

    Document or instruction may be empty. Without a chat template, also in :data:`FAMILY_TEMPLATES`, the prompt is
    system, document and instruction as plain text, with blank lines between them.

    Args:
        template: further arguments of the chat template, such as ``enable_thinking``.

    Raises PromptError if both are empty, if text is not valid Unicode, or if the template refuses the system message.
    """
    user = _join(document, instruction)
    if not user.strip():
        raise PromptError("The prompt is empty: give an instruction, a document, or both.")
    if chat_template_arguments(tokenizer) is None:
        return encode(tokenizer, _join(system, user))
    turns = [("system", system), ("user", user)] if system and system.strip() else [("user", user)]
    try:
        return encode_conversation(tokenizer, [{"role": role, "content": text} for role, text in turns], **template)
    except PromptError as error:
        advice = " Leave the system message out." if len(turns) > 1 else ""
        raise PromptError(f"{error}{advice}") from error


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], answer_prefix: str = "", **template: Any
) -> list[int]:
    """Token ids of a conversation, ready for the model's next answer; plain text without a template.

    Args:
        messages: each has role, content, and other fields that the template reads.
        answer_prefix: the beginning of the answer.
        template: further arguments of the template.

    Raises PromptError if text is not valid Unicode or the template refuses the messages.
    """
    for message in messages:
        _check_unicode(str(message["content"]))
    if (template_arguments := chat_template_arguments(tokenizer)) is None:
        texts = [str(message["content"]) for message in messages]
        return encode(tokenizer, "\n\n".join([*texts, answer_prefix] if answer_prefix else texts))
    text = apply_chat_template(tokenizer, messages, **template_arguments, **template)
    if not text.strip():
        raise PromptError(
            f"The chat template of {tokenizer.name_or_path or 'the tokenizer'} rendered nothing: give it one that "
            "writes the messages (tokenizer.chat_template), or pass the prompt as plain text (chat=False)."
        )
    text += _check_unicode(answer_prefix)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of raw text, with the special tokens that the tokenizer adds (such as a first BOS).

    Raises PromptError if the text is empty, not valid Unicode, or has no token in this vocabulary.
    """
    if not text.strip():
        raise PromptError("The prompt is empty: give some text.")
    # verbose=True would warn about long prompts; the engine checks lengths itself.
    ids: list[int] = tokenizer(_check_unicode(text), verbose=False)["input_ids"]
    if not ids:
        raise PromptError("The tokenizer turns this prompt into no tokens: is it for another model?")
    return ids


def _join(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part and part.strip())


def _check_unicode(text: str) -> str:
    """Returns the text. Raises PromptError for a lone surrogate, which would fail deep inside the tokenizer."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt is not valid Unicode at character {error.start}: read the file as UTF-8."
        ) from error
    return text
