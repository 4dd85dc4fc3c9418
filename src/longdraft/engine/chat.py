"""Turns messages and texts into token ids, by the model's chat template or, without one, as plain text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.engine.rendering import render_template
from longdraft.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# FastChat's conversation template vicuna_v1.1: Vicuna's and LongChat's checkpoints come without a template.
_VICUNA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions.{% endif %} {% for m in messages %}"
    "{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FAMILY_TEMPLATES = {"vicuna": _VICUNA, "longchat": _VICUNA}
"""Model family (a part of the model's name, in lower case) -> chat template."""
_warned_names: set[str] = set()  # tokenizers without a template that were warned of
# transformers renders this to tell us the variables for templates, with which our sandbox renders the model's template.
_JSON_TEMPLATE = "{{ {'messages': messages, 'tools': tools, 'documents': documents} | tojson }}"


def chat_template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Returns the ``chat_template`` argument for :func:`apply_chat_template`, if the tokenizer has no template itself.

    {} is for a tokenizer with a template, None for a prompt in plain text. A tokenizer without one gets its family's
    template (:data:`FAMILY_TEMPLATES`) if its family is known, and a warning."""
    if tokenizer.chat_template:
        return {}
    name = "/".join(Path(full_name := str(tokenizer.name_or_path)).parts[-2:])
    family = next((family for family in FAMILY_TEMPLATES if family in name.lower()), None)
    if full_name not in _warned_names:
        _warned_names.add(full_name)
        fallback = "plain text" if family is None else f"put into the template published for {family}"
        logger.warning("%s comes without a chat template: prompts are %s.", name or "The tokenizer", fallback)
    return None if family is None else {"chat_template": FAMILY_TEMPLATES[family]}


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    **template_kwargs: Any,
) -> str:
    """Renders messages as ``tokenizer.apply_chat_template`` does, within limits of time and memory (:mod:`.rendering`).

    The arguments are those of ``tokenizer.apply_chat_template``; ``template_kwargs`` are variables of the template.
    Raises PromptError, which names the model, if the template refuses the messages, fails or exceeds a limit."""
    from transformers import PreTrainedTokenizerBase

    kwargs: dict[str, Any] = {"tools": tools, "documents": documents, "tokenize": False}
    is_overridden = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    try:
        if is_overridden:  # a subclass renders with the user's own code, so it needs no sandbox
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **kwargs))
        variables = json.loads(tokenizer.apply_chat_template(list(messages), chat_template=_JSON_TEMPLATE, **kwargs))
        variables |= {"add_generation_prompt": add_generation_prompt}
        source = tokenizer.get_chat_template(chat_template, tools)
        return render_template(source, {**tokenizer.special_tokens_map, **template_kwargs, **variables})
    except Exception as error:  # a template can raise any type
        reason = str(error) if isinstance(error, PromptError) else f"fails: {error}"
        raise PromptError(f"The chat template of {tokenizer.name_or_path or 'the tokenizer'} {reason}.") from error


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    instruction: str,
    document: str | None = None,
    system: str | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Returns the token ids of one user turn (document, blank line, instruction), ready for the model's answer.

    Without a chat template, of the tokenizer or of its family, the prompt is plain text: system message, document and
    instruction, with blank lines between them.

    Args:
        tokenizer: the model's tokenizer.
        instruction: the user's request; may be empty if there is a document.
        document: the text that the instruction is about; None for none.
        system: the system message; None for none.
        template_kwargs: further variables of the chat template, such as ``enable_thinking``.

    Raises PromptError if document and instruction are empty, a text is not valid Unicode, or the template fails."""
    user = _join_paragraphs(document, instruction)
    if not user.strip():
        raise PromptError("The prompt is empty: give an instruction, a document, or both.")
    if chat_template_arguments(tokenizer) is None:
        return encode(tokenizer, _join_paragraphs(system, user))
    system_messages = [{"role": "system", "content": system}] if system and system.strip() else []
    try:
        return encode_conversation(tokenizer, [*system_messages, {"role": "user", "content": user}], **template_kwargs)
    except PromptError as error:
        advice = " Leave the system message out." if system_messages else ""
        raise PromptError(f"{error}{advice}") from error


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    answer_prefix: str = "",
    **template_kwargs: Any,
) -> list[int]:
    """Returns the token ids of a conversation, ready for the model's next answer; without a template, of plain text.

    Args:
        tokenizer: the model's tokenizer.
        messages: dicts with role, content, and further fields that the template reads.
        answer_prefix: the beginning of the next answer, which the model continues.
        template_kwargs: further variables of the chat template.

    Raises PromptError if a text is not valid Unicode, or if the template refuses the messages."""
    for message in messages:
        _check_unicode(str(message["content"]))
    if (template_arguments := chat_template_arguments(tokenizer)) is None:
        texts = [str(message["content"]) for message in messages]
        return encode(tokenizer, "\n\n".join([*texts, answer_prefix] if answer_prefix else texts))
    text = apply_chat_template(tokenizer, messages, **template_arguments, **template_kwargs)
    if not text.strip():
        raise PromptError(
            f"The chat template of {tokenizer.name_or_path or 'the tokenizer'} rendered nothing: give it one that "
            "writes the messages (tokenizer.chat_template), or pass the prompt as plain text (chat=False)."
        )
    text += _check_unicode(answer_prefix)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of plain text, with the special tokens that the tokenizer adds (such as BOS).
    Raises PromptError if the text is empty, not valid Unicode, or has no token in this vocabulary."""
    if not text.strip():
        raise PromptError("The prompt is empty: give some text.")
    # verbose=True would warn about long prompts, whose length the engine checks.
    ids: list[int] = tokenizer(_check_unicode(text), verbose=False)["input_ids"]
    if not ids:
        raise PromptError("The tokenizer turns this prompt into no tokens: is this tokenizer for another model?")
    return ids


def _join_paragraphs(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part and part.strip())


def _check_unicode(text: str) -> str:
    """Returns the text. Raises PromptError for a lone surrogate, about which tokenizers raise unclear errors."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt is not valid Unicode at character {error.start}: read the file as UTF-8."
        ) from error
    return text
